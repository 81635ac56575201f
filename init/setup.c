/* Carries out a plan. Each operation is one small function here and one entry in sandbox/plan.py. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/mount.h>
#include <linux/netlink.h>
#include <linux/openat2.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "init.h"
#include "rawclone.h"

#ifndef FSCONFIG_SET_FD
#define FSCONFIG_SET_FD 5
#endif

static int fail(struct setup *s, int error, const char *detail) {
    if (detail) snprintf(s->detail, sizeof s->detail, "%s", detail);
    return error;
}

/* ---- descriptors: -1 is none, below KEPT_BASE a register of this plan, above it a kept one ---- */

static int *place(struct setup *s, int64_t reference) {
    if (reference >= 0 && reference < REGISTERS) return &s->registers[reference];
    if (s->kept && reference >= KEPT_BASE && reference < KEPT_BASE + KEPT_MAX) return &s->kept[reference - KEPT_BASE];
    return NULL;
}

static int read_fd(struct setup *s) {
    int64_t reference = read_int(&s->plan);
    int *at = place(s, reference);
    if (reference == -1) return AT_FDCWD;
    if (!at || *at < 0) {
        s->plan.bad = true;
        return -1;
    }
    return *at;
}

static int store_fd(struct setup *s, int64_t reference, int fd) {
    int *at = place(s, reference);
    if (fd < 0) return errno;
    if (!at) {
        close(fd);
        return EBADMSG;
    }
    if (*at >= 0) close(*at);
    *at = fd;
    return 0;
}

/* ---- mounts ---------------------------------------------------------------------------------- */

/* The file system's own words on what it disliked, else what it was told. */
static int fs_error(struct setup *s, int fs, int error, const char *said) {
    char text[sizeof s->detail];
    ssize_t length = read(fs, text, sizeof text - 1);
    if (length > 0) {
        text[length] = 0;
        said = text;
    }
    close(fs);
    return fail(s, error, said);
}

static int configure(int fs, const char *option) {
    char key[64];
    const char *equals = strchr(option, '=');
    if (!equals) return (int)syscall(SYS_fsconfig, fs, FSCONFIG_SET_FLAG, option, NULL, 0);
    snprintf(key, sizeof key, "%.*s", (int)(equals - option), option);
    return (int)syscall(SYS_fsconfig, fs, FSCONFIG_SET_STRING, key, equals + 1, 0);
}

static int create_mount(struct setup *s, int64_t out, int fs, unsigned attributes) {
    if (syscall(SYS_fsconfig, fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0)) return fs_error(s, fs, errno, "create");
    int mount = (int)syscall(SYS_fsmount, fs, FSMOUNT_CLOEXEC, attributes);
    if (mount < 0) return fs_error(s, fs, errno, "fsmount");
    close(fs);
    return store_fd(s, out, mount);
}

static int op_mount(struct setup *s) {
    int64_t out = read_int(&s->plan);
    const char *type = read_text(&s->plan);
    unsigned attributes = (unsigned)read_int(&s->plan);
    size_t count;
    char **options = read_list(&s->plan, &count);
    int fs = s->plan.bad ? -1 : (int)syscall(SYS_fsopen, type, FSOPEN_CLOEXEC);
    int error = s->plan.bad ? EBADMSG : fs < 0 ? errno : 0;
    for (size_t i = 0; !error && i < count; i++)
        if (configure(fs, options[i])) error = fs_error(s, fs, errno, options[i]);
    free(options);
    return error ? error : create_mount(s, out, fs, attributes);
}

static void raise_capabilities(void) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    syscall(SYS_capget, &header, data);
    for (int i = 0; i < 2; i++) data[i].effective = data[i].permitted;
    syscall(SYS_capset, &header, data);
}

/* Since Linux 6.13 overlay takes descriptors; before, the path of one in /proc does the same. */
static int overlay_directory(int fs, const char *key, int fd) {
    if (!syscall(SYS_fsconfig, fs, FSCONFIG_SET_FD, key, NULL, fd)) return 0;
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return (int)syscall(SYS_fsconfig, fs, FSCONFIG_SET_STRING, key, path, 0);
}

static int op_overlay(struct setup *s) {
    int64_t out = read_int(&s->plan);
    int upper = read_fd(s), work = read_fd(s);
    unsigned attributes = (unsigned)read_int(&s->plan);
    uid_t owner = (uid_t)read_int(&s->plan);
    size_t count;
    char **options = read_list(&s->plan, &count);
    int64_t lowers = read_int(&s->plan);
    int fs = s->plan.bad ? -1 : (int)syscall(SYS_fsopen, "overlay", FSOPEN_CLOEXEC);
    int error = s->plan.bad ? EBADMSG : fs < 0 ? errno : 0;
    for (size_t i = 0; !error && i < count; i++)
        if (configure(fs, options[i])) error = fs_error(s, fs, errno, options[i]);
    free(options);
    for (int64_t i = 0; !error && i < lowers; i++) {
        int lower = read_fd(s);
        if (s->plan.bad) error = EBADMSG;
        else if (overlay_directory(fs, "lowerdir+", lower)) error = fs_error(s, fs, errno, "lowerdir+");
    }
    if (error) return error;
    if (overlay_directory(fs, "upperdir", upper)) return fs_error(s, fs, errno, "upperdir");
    if (overlay_directory(fs, "workdir", work)) return fs_error(s, fs, errno, "workdir");
    /* Overlay probes its work directory with the mounter's fsuid. One that the id-mapped upper does not map makes
     * the mount succeed and be read-only; and changing fsuid drops capabilities, which are taken back here. */
    setfsgid(owner);
    setfsuid(owner);
    raise_capabilities();
    error = create_mount(s, out, fs, attributes);
    setfsuid(0);
    setfsgid(0);
    return error;
}

static int op_clone_tree(struct setup *s) {
    int64_t out = read_int(&s->plan);
    int from = read_fd(s);
    const char *path = read_text(&s->plan);
    if (s->plan.bad) return EBADMSG;
    unsigned flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW;
    int tree = (int)syscall(SYS_open_tree, from, path, flags);
    return tree < 0 ? fail(s, errno, path) : store_fd(s, out, tree);
}

static int op_idmap(struct setup *s) {
    int mount = read_fd(s), userns = read_fd(s);
    if (s->plan.bad) return EBADMSG;
    struct mount_attr attributes = {.attr_set = MOUNT_ATTR_IDMAP, .userns_fd = (uint64_t)userns};
    return syscall(SYS_mount_setattr, mount, "", AT_EMPTY_PATH, &attributes, sizeof attributes) ? errno : 0;
}

static int op_attributes(struct setup *s) {
    int mount = read_fd(s);
    struct mount_attr attributes = {.attr_set = (uint64_t)read_int(&s->plan), .attr_clr = (uint64_t)read_int(&s->plan)};
    if (s->plan.bad) return EBADMSG;
    return syscall(SYS_mount_setattr, mount, "", AT_EMPTY_PATH, &attributes, sizeof attributes) ? errno : 0;
}

/* Below the new root nothing is trusted: a layer may have a symlink where a mount is to go. */
static int open_below(int root, const char *path) {
    struct open_how how = {.flags = O_PATH | O_CLOEXEC, .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS};
    return (int)syscall(SYS_openat2, root, path, &how, sizeof how);
}

static int op_attach(struct setup *s) {
    int mount = read_fd(s), root = read_fd(s);
    const char *path = read_text(&s->plan);
    if (s->plan.bad) return EBADMSG;
    int target = open_below(root, path);
    if (target < 0) return fail(s, errno, path);
    unsigned flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH;
    int error = syscall(SYS_move_mount, mount, "", target, "", flags) ? errno : 0;
    close(target);
    return error ? fail(s, error, path) : 0;
}

static int let_go(void *unused) {
    (void)unused;
    _exit(syscall(SYS_umount2, ".", 2 /* MNT_DETACH */) ? 1 : 0);
}

/* Makes the root "/", and lets go of the spawner's tree, which is on top of it then. That waits for a grace period of RCU,
 * up to a millisecond on a busy machine, so a process beside us does it while we go on; init waits for its end before it
 * starts anything. It shares our memory, but of it only its stack is touched. */
static int op_pivot(struct setup *s) {
    static _Alignas(16) char stack[8192];
    int root = read_fd(s);
    if (s->plan.bad) return EBADMSG;
    if (fchdir(root)) return fail(s, errno, "fchdir");
    if (syscall(SYS_pivot_root, ".", ".")) return fail(s, errno, "pivot_root");
    s->inside.letting_go = clone(let_go, stack + sizeof stack, CLONE_VM | SIGCHLD, NULL);
    if (s->inside.letting_go < 0) return fail(s, errno, "clone");
    return chdir("/") ? fail(s, errno, "chdir") : 0;
}

/* Into another mount namespace, to take a tree or a file from there. */
static int op_enter(struct setup *s) {
    int mounts = read_fd(s);
    return s->plan.bad ? EBADMSG : setns(mounts, CLONE_NEWNS) ? errno : 0;
}

/* ---- files ----------------------------------------------------------------------------------- */

static int op_mkdir(struct setup *s) {
    int at = read_fd(s);
    const char *path = read_text(&s->plan);
    mode_t mode = (mode_t)read_int(&s->plan);
    if (s->plan.bad) return EBADMSG;
    return mkdirat(at, path, mode) ? fail(s, errno, path) : 0; /* our umask is 0 */
}

static int op_open(struct setup *s) {
    int64_t out = read_int(&s->plan);
    int at = read_fd(s);
    const char *path = read_text(&s->plan);
    int flags = (int)read_int(&s->plan);
    if (s->plan.bad) return EBADMSG;
    int fd = openat(at, path, flags | O_CLOEXEC | O_NOFOLLOW);
    return fd < 0 ? fail(s, errno, path) : store_fd(s, out, fd);
}

static int op_write(struct setup *s) {
    int at = read_fd(s);
    const char *path = read_text(&s->plan);
    size_t length;
    const char *data = read_bytes(&s->plan, &length);
    if (s->plan.bad) return EBADMSG;
    return write_file(at, path, data, length) ? fail(s, errno, path) : 0;
}

static int op_chown(struct setup *s) {
    int at = read_fd(s);
    const char *path = read_text(&s->plan);
    uid_t owner = (uid_t)read_int(&s->plan);
    if (s->plan.bad) return EBADMSG;
    return fchownat(at, path, owner, owner, AT_SYMLINK_NOFOLLOW) ? fail(s, errno, path) : 0;
}

/* Of a cgroup, whose files go with its directories. */
static int op_remove_tree(struct setup *s) {
    int at = read_fd(s);
    const char *name = read_text(&s->plan);
    if (s->plan.bad) return EBADMSG;
    return remove_directories(at, name) && errno != ENOENT ? fail(s, errno, name) : 0;
}

static int op_keep(struct setup *s) {
    int fd = read_fd(s);
    int64_t key = read_int(&s->plan);
    if (s->plan.bad || key < KEPT_BASE) return EBADMSG;
    return store_fd(s, key, fcntl(fd, F_DUPFD_CLOEXEC, 3));
}

static int op_drop(struct setup *s) {
    int *at = place(s, read_int(&s->plan));
    if (!at) return EBADMSG;
    if (*at >= 0) close(*at);
    *at = -1;
    return 0;
}

static int op_send(struct setup *s) {
    int fd = read_fd(s);
    if (s->plan.bad || s->reply_count == REPLY_FDS_MAX) return EBADMSG;
    fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (fd < 0) return errno;
    s->reply[s->reply_count++] = fd;
    return 0;
}

/* ---- namespaces ------------------------------------------------------------------------------ */

static int write_maps(pid_t pid, const char *uids, const char *gids) {
    char path[48];
    snprintf(path, sizeof path, "/proc/%d/uid_map", pid);
    if (write_file(AT_FDCWD, path, uids, strlen(uids))) return errno;
    snprintf(path, sizeof path, "/proc/%d/gid_map", pid);
    if (write_file(AT_FDCWD, path, gids, strlen(gids)) == 0) return 0;
    if (errno != EPERM) return errno;
    /* An ordinary user may map his own group only after giving up setgroups. */
    char deny[48];
    snprintf(deny, sizeof deny, "/proc/%d/setgroups", pid);
    if (write_file(AT_FDCWD, deny, "deny", 4)) return errno;
    return write_file(AT_FDCWD, path, gids, strlen(gids)) ? errno : 0;
}

/* A user namespace of its own: a child that does nothing is mapped, its namespace is opened, it goes. */
static int op_userns(struct setup *s) {
    int64_t out = read_int(&s->plan);
    const char *uids = read_text(&s->plan), *gids = read_text(&s->plan);
    if (s->plan.bad) return EBADMSG;
    pid_t pid = (pid_t)syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0);
    if (pid < 0) return errno;
    if (pid == 0)
        for (;;) pause();
    int error = write_maps(pid, uids, gids);
    char path[32];
    snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
    if (!error) error = store_fd(s, out, open(path, O_RDONLY | O_CLOEXEC));
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    return error;
}

struct netns {
    struct setup *setup;
    int64_t out;
    int owner, error;
};

_Noreturn static __attribute__((noinline)) void make_netns(struct netns *n) {
    if (n->owner != AT_FDCWD && setns(n->owner, CLONE_NEWUSER)) n->error = fail(n->setup, errno, "setns");
    else if (unshare(CLONE_NEWNET)) n->error = fail(n->setup, errno, "unshare");
    else n->error = store_fd(n->setup, n->out, open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC));
    if (!n->error) n->error = setup_run(n->setup);
    _exit(0);
}

/* A network namespace owned by a user namespace that no sandbox enters. The nested plan sets it up from inside, in
 * a child that shares memory and descriptors with us, so that what it opens and reports is simply here. */
static int op_netns(struct setup *s) {
    struct netns n = {.setup = s, .out = read_int(&s->plan), .owner = read_fd(s)};
    size_t length;
    const uint8_t *nested = (const uint8_t *)read_bytes(&s->plan, &length);
    if (s->plan.bad) return EBADMSG;
    struct reader rest = s->plan;
    unsigned step = s->step;
    s->plan = (struct reader){nested, nested + length, false};
    pid_t pid = raw_vfork(CLONE_FILES);
    if (pid == 0) make_netns(&n);
    int error = pid < 0 ? errno : n.error;
    if (pid > 0) waitpid(pid, NULL, 0);
    s->plan = rest;
    s->step = step;
    return error;
}

static int op_netlink(struct setup *s) {
    int protocol = (int)read_int(&s->plan);
    size_t length;
    const char *message = read_bytes(&s->plan, &length);
    int64_t acks = read_int(&s->plan);
    if (s->plan.bad) return EBADMSG;
    int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, protocol);
    if (fd < 0) return errno;
    struct sockaddr_nl kernel = {.nl_family = AF_NETLINK};
    int error = sendto(fd, message, length, 0, (struct sockaddr *)&kernel, sizeof kernel) < 0 ? errno : 0;
    _Alignas(8) char answer[16384];
    while (!error && acks > 0) {
        ssize_t got = recv(fd, answer, sizeof answer, 0);
        if (got < 0) error = errno;
        for (struct nlmsghdr *h = (void *)answer; got > 0 && NLMSG_OK(h, (size_t)got); h = NLMSG_NEXT(h, got)) {
            if (h->nlmsg_type != NLMSG_ERROR) continue;
            acks--;
            struct nlmsgerr *e = NLMSG_DATA(h);
            if (e->error && !error) {
                error = -e->error;
                snprintf(s->detail, sizeof s->detail, "message %u", e->msg.nlmsg_seq);
            }
        }
    }
    close(fd);
    return error;
}

static int op_listen(struct setup *s) {
    int64_t out = read_int(&s->plan);
    int type = (int)read_int(&s->plan);
    const char *address = read_text(&s->plan);
    int port = (int)read_int(&s->plan), backlog = (int)read_int(&s->plan);
    if (s->plan.bad) return EBADMSG;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    if (inet_pton(AF_INET, address, &at.sin_addr) != 1) return fail(s, EINVAL, address);
    int fd = socket(AF_INET, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return errno;
    if (bind(fd, (struct sockaddr *)&at, sizeof at) || (type == SOCK_STREAM && listen(fd, backlog))) {
        int error = errno;
        close(fd);
        return fail(s, error, address);
    }
    return store_fd(s, out, fd);
}

/* ---- the sandbox itself ---------------------------------------------------------------------- */

static void release_child(int sync, char byte) {
    if (write_all(sync, &byte, 1)) { /* the child is gone; whoever waits for it will be told */ }
    close(sync);
}

/* Splits the plan: what follows is done by the child, as PID 1 of the new namespaces. */
static int op_clone(struct setup *s) {
    uint64_t flags = (uint64_t)read_int(&s->plan);
    uid_t owner = (uid_t)read_int(&s->plan);
    const char *uids = read_text(&s->plan), *gids = read_text(&s->plan);
    int network = read_fd(s), home = read_fd(s);
    int channel = read_fd(s), cgroup = read_fd(s);
    if (s->plan.bad || s->reply_count == REPLY_FDS_MAX) return EBADMSG;
    int sync[2], pidfd = -1;
    if (pipe2(sync, O_CLOEXEC)) return errno;
    if (network != AT_FDCWD && setns(network, CLONE_NEWNET)) {
        int error = fail(s, errno, "setns");
        close(sync[0]), close(sync[1]);
        return error;
    }
    /* The owner of a user namespace is the effective uid of its maker; kernel accounts hang on it. The capabilities that
     * go with the change are needed to place the child in its cgroup. */
    syscall(SYS_setresuid, -1, owner, -1);
    raise_capabilities();
    struct clone_args args = {.flags = flags | CLONE_PIDFD, .pidfd = (uint64_t)(uintptr_t)&pidfd, .exit_signal = SIGCHLD};
    if (cgroup != AT_FDCWD) {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = (uint64_t)cgroup;
    }
    pid_t pid = (pid_t)syscall(SYS_clone3, &args, sizeof args);
    int error = pid < 0 ? fail(s, errno, "clone3") : 0;
    if (pid == 0) {
        char go = 0;
        close(sync[1]);
        if (read(sync[0], &go, 1) != 1 || go != 'g') _exit(0);
        close(sync[0]);
        s->inside.channel = channel;
        s->step++;
        init_main(s);
    }
    syscall(SYS_setresuid, -1, 0, -1);
    if (network != AT_FDCWD && setns(home, CLONE_NEWNET) && !error) error = fail(s, errno, "setns home");
    close(sync[0]);
    if (pid < 0) {
        close(sync[1]);
        return error;
    }
    if (!error) error = write_maps(pid, uids, gids);
    release_child(sync[1], error ? 'x' : 'g');
    s->child = pid;
    s->reply[s->reply_count++] = pidfd;
    s->plan.at = s->plan.end;
    return error;
}

static int op_identity(struct setup *s) {
    (void)s;
    if (syscall(SYS_setgroups, 0, NULL) && errno != EPERM) return errno; /* EPERM: an ordinary user's namespace */
    if (syscall(SYS_setresgid, 0, 0, 0) || syscall(SYS_setresuid, 0, 0, 0)) return errno;
    return 0;
}

static int op_join(struct setup *s) {
    int fd = read_fd(s);
    if (s->plan.bad) return EBADMSG;
    return write_all(fd, "0", 1) ? errno : 0; /* oneself, by "0": moving another waits for a grace period */
}

static int op_unshare(struct setup *s) {
    int flags = (int)read_int(&s->plan);
    return s->plan.bad ? EBADMSG : unshare(flags) ? errno : 0;
}

static int op_hostname(struct setup *s) {
    const char *name = read_text(&s->plan);
    return s->plan.bad ? EBADMSG : sethostname(name, strlen(name)) ? errno : 0;
}

static int op_rlimit(struct setup *s) {
    int resource = (int)read_int(&s->plan);
    struct rlimit limit = {.rlim_cur = (rlim_t)read_int(&s->plan), .rlim_max = (rlim_t)read_int(&s->plan)};
    return s->plan.bad ? EBADMSG : setrlimit(resource, &limit) ? errno : 0;
}

/* How commands are accounted for: the unified directory, where OOM kills are counted, the files to join; and what init
 * must not look up by a path, since the sandbox may change what is there. */
static int op_commands(struct setup *s) {
    int commands = read_fd(s), events = read_fd(s);
    s->inside.commands_dir = commands == AT_FDCWD ? -1 : commands;
    s->inside.oom_events = events == AT_FDCWD ? -1 : events;
    s->inside.null = read_fd(s);
    s->inside.terminals = read_fd(s);
    s->inside.open_files = (uint64_t)read_int(&s->plan);
    int64_t joins = read_int(&s->plan);
    if (joins < 0 || joins > 8) return EBADMSG;
    for (s->inside.join_count = 0; (int64_t)s->inside.join_count < joins; s->inside.join_count++)
        s->inside.join[s->inside.join_count] = read_fd(s);
    return s->plan.bad ? EBADMSG : 0;
}

/* Keeps `keep` and nothing else, for us and, by the bounding set, for every command. */
static int op_capabilities(struct setup *s) {
    uint64_t keep = (uint64_t)read_int(&s->plan);
    if (s->plan.bad) return EBADMSG;
    for (int capability = 0; capability < 64; capability++) {
        if (keep >> capability & 1 || !prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)) continue;
        if (errno != EINVAL) return errno;
        break; /* past the last one that this kernel has */
    }
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{(uint32_t)keep, (uint32_t)keep, 0},
                                             {(uint32_t)(keep >> 32), (uint32_t)(keep >> 32), 0}};
    if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)) return errno;
    return syscall(SYS_capset, &header, data) ? errno : 0;
}

static int op_seccomp(struct setup *s) {
    int no_new_privileges = (int)read_int(&s->plan);
    size_t length;
    const char *bytes = read_bytes(&s->plan, &length);
    if (s->plan.bad || length % sizeof(struct sock_filter)) return EBADMSG;
    if (no_new_privileges && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return errno;
    if (!length) return 0;
    struct sock_filter *filter = allocate(length);
    memcpy(filter, bytes, length);
    struct sock_fprog program = {(unsigned short)(length / sizeof *filter), filter};
    int error = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) ? errno : 0;
    free(filter);
    return error;
}

/* In the order of sandbox/plan.py; the index is the code on the wire. */
static int (*const operations[])(struct setup *) = {
    op_mount,    op_overlay, op_clone_tree, op_idmap,   op_attributes, op_attach,  op_pivot,        op_enter, op_mkdir, op_open,
    op_write, op_chown, op_remove_tree, op_keep,    op_drop,       op_send,    op_userns,     op_netns,   op_netlink,      op_listen, op_clone,
    op_identity, op_join,    op_unshare,    op_hostname,   op_rlimit,  op_commands,   op_capabilities, op_seccomp,
};

void setup_init(struct setup *s, int *kept, const uint8_t *plan, size_t length, const int *fds, size_t count) {
    memset(s, 0, sizeof *s);
    s->plan = (struct reader){plan, plan + length, false};
    s->kept = kept;
    s->inside = (struct inside){.channel = -1, .commands_dir = -1, .oom_events = -1, .null = -1, .terminals = -1};
    for (size_t i = 0; i < REGISTERS; i++) s->registers[i] = i < count ? fds[i] : -1;
}

int setup_run(struct setup *s) {
    for (; s->plan.at < s->plan.end; s->step++) {
        uint8_t code = *s->plan.at++;
        if (code >= sizeof operations / sizeof *operations) return fail(s, EBADMSG, "unknown operation");
        int error = operations[code](s);
        if (error == EBADMSG && s->plan.bad) return fail(s, error, "malformed arguments");
        if (error) return error;
    }
    return 0;
}

void setup_close(struct setup *s) {
    for (int i = 0; i < REGISTERS; i++)
        if (s->registers[i] >= 0) close(s->registers[i]);
}
