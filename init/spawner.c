/* Makes sandboxes on request. One datagram is one plan; one datagram answers it. Lives in a nearly empty mount
 * namespace, because the cost of CLONE_NEWNS grows with the mounts it copies. Ends when its node does, and then takes
 * every sandbox and cgroup with it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "init.h"

enum { REQUEST_MAX = 1 << 18, PASSED_MAX = 64, CLEANUP_MAX = 8, CLEANUP_NAME = 64, SLOW_MAX = 256, HOME_GROUP = 4, EXIT_NOTICE = 0xffffffff };

struct sandbox {
    pid_t pid;
    int mounts; /* its mount namespace, held so that tearing it down is not part of its death */
};

struct spawner {
    int socket, signals, reaper;
    pid_t reaper_pid;
    int slow[SLOW_MAX]; /* descriptors for the reaper */
    size_t slow_count;
    int own_mounts;
    int kept[KEPT_MAX];
    struct sandbox *sandboxes;
    size_t count, capacity;
    int cleanup_parent[CLEANUP_MAX];
    char cleanup_name[CLEANUP_MAX][CLEANUP_NAME];
    size_t cleanup_count;
};

/* ---- the reaper: shares our descriptors and closes what is slow to close ---------------------- */

static pid_t spawner_pid;

static int reaper_loop(void *argument) {
    int from = *(int *)argument, fd;
    /* It holds the write end of its own pipe and the node's socket too, so no end of file would ever come. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != spawner_pid) _exit(0);
    while (read(from, &fd, sizeof fd) == sizeof fd) close(fd);
    _exit(0);
}

/* Closing the last descriptor of a mount or a mount namespace waits for RCU. Only this process should. */
static int start_reaper(pid_t *reaper) {
    static _Alignas(4096) char stack[16384];
    static int ends[2];
    spawner_pid = getpid();
    if (pipe2(ends, O_CLOEXEC)) return -1;
    *reaper = clone(reaper_loop, stack + sizeof stack, CLONE_VM | CLONE_FILES | SIGCHLD, &ends[0]);
    if (*reaper < 0) return -1;
    return ends[1];
}

static void flush_slow(struct spawner *s) {
    size_t size = s->slow_count * sizeof *s->slow;
    if (size && write(s->reaper, s->slow, size) != (ssize_t)size)
        for (size_t i = 0; i < s->slow_count; i++) close(s->slow[i]);
    s->slow_count = 0;
}

/* Gathered until there are many or nothing else is to do: on a busy machine each wake-up of the reaper is felt. */
static void close_slowly(struct spawner *s, int fd) {
    if (fd <= 0) return;
    s->slow[s->slow_count++] = fd;
    if (s->slow_count == SLOW_MAX) flush_slow(s);
}

/* ---- start ----------------------------------------------------------------------------------- */

/* A tree with nothing in it but /proc and the place where a sandbox's root is attached. */
static int enter_empty_tree(struct spawner *s) {
    int proc = (int)syscall(SYS_open_tree, AT_FDCWD, "/proc", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE);
    if (proc < 0 || unshare(CLONE_NEWNS)) return -1;
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) return -1;
    if (mount("shoal", "/proc", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=64k,mode=755")) return -1;
    if (chdir("/proc") || mkdir("proc", 0555) || mkdir("new", 0755)) return -1;
    unsigned flags = MOVE_MOUNT_F_EMPTY_PATH;
    if (syscall(SYS_move_mount, proc, "", AT_FDCWD, "proc", flags)) return -1;
    close(proc);
    if (syscall(SYS_pivot_root, ".", ".") || umount2(".", MNT_DETACH) || chdir("/")) return -1;
    s->own_mounts = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
    return s->own_mounts < 0 ? -1 : 0;
}

static int raise_open_files(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit)) return -1;
    limit.rlim_cur = limit.rlim_max;
    return setrlimit(RLIMIT_NOFILE, &limit);
}

/* Directories of ours to remove at the end, opened now because their paths are out of reach later. The arguments are
 * wiped: every init shows them in /proc/1/cmdline, and they tell of the host. */
static int remember_cleanup(struct spawner *s, char **paths) {
    for (; *paths && s->cleanup_count < CLEANUP_MAX; paths++) {
        char *slash = strrchr(*paths, '/');
        if (!slash || strlen(slash + 1) >= CLEANUP_NAME) return -1;
        *slash = 0;
        int parent = open(*paths, O_PATH | O_DIRECTORY | O_CLOEXEC);
        if (parent < 0) return -1;
        s->cleanup_parent[s->cleanup_count] = parent;
        size_t name = strlen(slash + 1);
        memcpy(s->cleanup_name[s->cleanup_count++], slash + 1, name + 1);
        memset(slash + 1, 0, name);
        memset(*paths, 0, strlen(*paths));
    }
    return 0;
}

/* What an ordinary user starts with: a user namespace in which he may mount, the same for all spawners of a node, so that
 * each has power over what the others made. The first one makes it, and the node writes its maps. */
static int enter_user_namespace(int socket, int users) {
    char byte;
    if (users >= 0) return setns(users, CLONE_NEWUSER) || unshare(CLONE_NEWNS | CLONE_NEWNET) ? -1 : 0;
    /* The network namespace too: he could not come back to the host's after visiting a sandbox's. */
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET)) return -1;
    if (send(socket, "u", 1, MSG_NOSIGNAL) != 1 || recv(socket, &byte, 1, 0) != 1) return -1;
    return syscall(SYS_setresgid, 0, 0, 0) || syscall(SYS_setresuid, 0, 0, 0) ? -1 : 0;
}

static void keep_basics(struct spawner *s, int host_mounts, int null) {
    s->kept[0] = host_mounts;
    s->kept[1] = s->own_mounts;
    s->kept[2] = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    s->kept[3] = null; /* after it HOME_GROUP, which the node may give */
}

/* ---- requests -------------------------------------------------------------------------------- */

static void answer(struct spawner *s, uint32_t id, int error, const struct setup *plan) {
    uint8_t text[16 + sizeof plan->detail];
    size_t detail = strlen(plan->detail);
    put_u32(text, id);
    put_u32(text + 4, (uint32_t)error);
    put_u32(text + 8, plan->step);
    put_u32(text + 12, (uint32_t)plan->child);
    memcpy(text + 16, plan->detail, detail);
    struct iovec part = {text, 16 + detail};
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof plan->reply)];
    } control = {0};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (plan->reply_count && !error) {
        size_t size = plan->reply_count * sizeof(int);
        message.msg_control = &control;
        message.msg_controllen = CMSG_SPACE(size);
        control.header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(size)};
        memcpy(CMSG_DATA(&control.header), plan->reply, size);
    }
    if (sendmsg(s->socket, &message, MSG_NOSIGNAL) < 0) { /* the node is gone; the next receive says so */ }
}

static void remember(struct spawner *s, pid_t pid, int mounts) {
    if (s->count == s->capacity) {
        s->capacity = s->capacity ? 2 * s->capacity : 64;
        s->sandboxes = realloc(s->sandboxes, s->capacity * sizeof *s->sandboxes);
        if (!s->sandboxes) _exit(ENOMEM);
    }
    s->sandboxes[s->count++] = (struct sandbox){pid, mounts};
}

static void carry_out(struct spawner *s, const uint8_t *request, size_t length, const int *fds, size_t count) {
    static struct setup plan;
    setup_init(&plan, s->kept, request + 4, length - 4, fds, count);
    int error = setup_run(&plan);
    if (error) setns(s->own_mounts, CLONE_NEWNS); /* a plan that failed may have been elsewhere */
    if (plan.child && error) {
        waitpid(plan.child, NULL, 0); /* told to go; nobody expects news of it */
        close_slowly(s, plan.child_mounts);
    } else if (plan.child) {
        remember(s, plan.child, plan.child_mounts);
    }
    answer(s, get_u32(request), error, &plan);
    for (size_t i = 0; i < plan.reply_count; i++) close(plan.reply[i]);
    for (int i = 0; i < REGISTERS; i++) close_slowly(s, plan.registers[i]);
}

/* False when the node is gone. */
static _Alignas(4096) uint8_t request[REQUEST_MAX];

static bool receive(struct spawner *s) {
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(PASSED_MAX * sizeof(int))];
    } control;
    struct iovec part = {request, sizeof request};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t length = recvmsg(s->socket, &message, MSG_CMSG_CLOEXEC);
    if (length < 0) return errno == EINTR || errno == EAGAIN;
    if (length < 4) return false;
    int fds[PASSED_MAX];
    size_t count = 0;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header && header->cmsg_type == SCM_RIGHTS) {
        count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        memcpy(fds, CMSG_DATA(header), count * sizeof(int));
    }
    carry_out(s, request, (size_t)length, fds, count);
    return true;
}

/* ---- deaths ---------------------------------------------------------------------------------- */

static void forget(struct spawner *s, pid_t pid) {
    for (size_t i = 0; i < s->count; i++) {
        if (s->sandboxes[i].pid != pid) continue;
        close_slowly(s, s->sandboxes[i].mounts);
        s->sandboxes[i] = s->sandboxes[--s->count];
        return;
    }
}

static void reap(struct spawner *s) {
    struct signalfd_siginfo drained;
    while (read(s->signals, &drained, sizeof drained) > 0) {}
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
        forget(s, pid);
        uint8_t notice[16];
        put_u32(notice, EXIT_NOTICE);
        put_u32(notice + 4, (uint32_t)status);
        put_u32(notice + 8, 0);
        put_u32(notice + 12, (uint32_t)pid);
        if (send(s->socket, notice, sizeof notice, MSG_NOSIGNAL) < 0) return;
    }
}

static void end(struct spawner *s) {
    for (size_t i = 0; i < s->count; i++) kill(s->sandboxes[i].pid, SIGKILL);
    kill(s->reaper_pid, SIGKILL);
    while (waitpid(-1, NULL, 0) > 0 || errno == EINTR) {}
    /* Where we live in one of the groups to remove, the node has said by which file to leave. */
    int home = s->kept[HOME_GROUP];
    if (home > 0 && write_all(home, "0", 1)) { /* ours stays then, for the next node to remove */ }
    for (size_t i = 0; i < s->cleanup_count; i++) remove_directories(s->cleanup_parent[i], s->cleanup_name[i]);
}

/* ---- */

static int start(struct spawner *s, int socket, int users, char **cleanup) {
    s->socket = socket;
    int spare;
    do spare = open("/dev/null", O_RDWR | O_CLOEXEC); /* a daemon may have closed the first three */
    while (spare >= 0 && spare < 3);
    close(spare);
    if (remember_cleanup(s, cleanup) || raise_open_files()) return -1;
    if (geteuid() != 0 && enter_user_namespace(socket, users)) return -1;
    if (users >= 0) close(users);
    int host_mounts = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (host_mounts < 0 || null < 0 || enter_empty_tree(s)) return -1;
    keep_basics(s, host_mounts, null);
    s->reaper = start_reaper(&s->reaper_pid);
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, NULL);
    s->signals = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    return s->reaper < 0 || s->signals < 0 ? -1 : 0;
}

/* What the node ignores, commands would ignore too: Python ignores SIGPIPE. */
static void reset_signals(void) {
    struct sigaction standard = {.sa_handler = SIG_DFL};
    for (int signal = 1; signal < 32; signal++) sigaction(signal, &standard, NULL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

static _Alignas(4096) struct spawner s;

int spawner_mounts(pid_t pid) {
    for (size_t i = 0; i < s.count; i++)
        if (s.sandboxes[i].pid == pid) return s.sandboxes[i].mounts;
    return -1;
}

void spawner_forget(void) {
    madvise(request, sizeof request, MADV_DONTNEED);
    madvise(&s, sizeof s & ~(size_t)4095, MADV_DONTNEED);
}

int spawner_main(int socket, int users, char **cleanup) {
    /* The node's terminal is not ours: Ctrl-C there reaches the node, which then ends us by closing the socket. */
    setsid();
    prctl(PR_SET_NAME, "shoal-spawner");
    umask(0);
    reset_signals();
    uint8_t hello[4];
    int error = start(&s, socket, users, cleanup) ? errno : 0;
    put_u32(hello, (uint32_t)error);
    if (send(socket, hello, sizeof hello, MSG_NOSIGNAL) < 0 || error) return 1;
    for (;;) {
        struct pollfd ready[] = {{.fd = socket, .events = POLLIN}, {.fd = s.signals, .events = POLLIN}};
        if (s.slow_count && poll(ready, 2, 0) == 0) flush_slow(&s);
        if (poll(ready, 2, -1) < 0 && errno != EINTR) break;
        if (ready[1].revents) reap(&s);
        if (ready[0].revents && !receive(&s)) break;
    }
    end(&s);
    return 0;
}
