/* The operations of a plan that make the sandbox itself: its first process, who that is, and what it may do. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "setup.h"

enum { FLAG_WAIT_KILLABLE = 1 << 5 }; /* SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV, for older headers */

void raise_capabilities(void) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    syscall(SYS_capget, &header, data);
    for (int i = 0; i < 2; i++) data[i].effective = data[i].permitted;
    syscall(SYS_capset, &header, data);
}

static void release_child(int sync, char byte) {
    if (write_all(sync, &byte, 1)) { /* the child is gone; whoever waits for it will be told */ }
    close(sync);
}

/* Splits the plan: what follows is done by the child, as PID 1 of the new namespaces. */
int op_clone(struct setup *s) {
    uint64_t flags = (uint64_t)read_int(&s->plan);
    uid_t owner = (uid_t)read_int(&s->plan);
    const char *uids = read_text(&s->plan), *gids = read_text(&s->plan);
    int network = read_fd(s), home = read_fd(s);
    int channel = read_fd(s), cgroup = read_fd(s);
    if (s->plan.bad || s->reply_count == REPLY_FDS_MAX) return EBADMSG;
    int sync[2], pidfd = -1;
    if (pipe2(sync, O_CLOEXEC)) return errno;
    if (network != AT_FDCWD && setns(network, CLONE_NEWNET)) {
        int error = setup_fail(s, errno, "setns");
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
    int error = pid < 0 ? setup_fail(s, errno, "clone3") : 0;
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
    if (network != AT_FDCWD && setns(home, CLONE_NEWNET) && !error) error = setup_fail(s, errno, "setns home");
    close(sync[0]);
    if (pid < 0) {
        close(sync[1]);
        return error;
    }
    if (!error) error = write_maps(pid, uids, gids);
    /* While it waits for us: an ordinary user can't look at it any more once it is not dumpable. */
    char path[32];
    snprintf(path, sizeof path, "/proc/%d/ns/mnt", pid);
    s->child_mounts = open(path, O_RDONLY | O_CLOEXEC);
    release_child(sync[1], error ? 'x' : 'g');
    s->child = pid;
    s->reply[s->reply_count++] = pidfd;
    s->plan.at = s->plan.end;
    return error;
}

int op_identity(struct setup *s) {
    (void)s;
    if (syscall(SYS_setgroups, 0, NULL) && errno != EPERM) return errno; /* EPERM: an ordinary user's namespace */
    if (syscall(SYS_setresgid, 0, 0, 0) || syscall(SYS_setresuid, 0, 0, 0)) return errno;
    return 0;
}

int op_join(struct setup *s) {
    int fd = read_fd(s);
    if (s->plan.bad) return EBADMSG;
    return write_all(fd, "0", 1) ? errno : 0; /* oneself, by "0": moving another waits for a grace period */
}

int op_unshare(struct setup *s) {
    int flags = (int)read_int(&s->plan);
    return s->plan.bad ? EBADMSG : unshare(flags) ? errno : 0;
}

int op_hostname(struct setup *s) {
    const char *name = read_text(&s->plan);
    return s->plan.bad ? EBADMSG : sethostname(name, strlen(name)) ? errno : 0;
}

int op_rlimit(struct setup *s) {
    int resource = (int)read_int(&s->plan);
    struct rlimit limit = {.rlim_cur = (rlim_t)read_int(&s->plan), .rlim_max = (rlim_t)read_int(&s->plan)};
    return s->plan.bad ? EBADMSG : setrlimit(resource, &limit) ? errno : 0;
}

/* What commands without input read. It must be an open file of this sandbox alone: flags and locks belong to the open file,
 * and the one that was given is every sandbox's. Nothing of the sandbox has run yet, but a layer may have anything there. */
static int open_null(int given) {
    struct stat found;
    int fd = open("/dev/null", O_RDWR | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return given;
    if (!fstat(fd, &found) && S_ISCHR(found.st_mode) && found.st_rdev == makedev(1, 3) && !fcntl(fd, F_SETFL, O_RDWR)) return fd;
    close(fd);
    return given;
}

/* How commands are accounted for: the unified directory, where OOM kills and refused processes are counted, the files to
 * join; and what init must not look up by a path, since the sandbox may change what is there. */
int op_commands(struct setup *s) {
    int commands = read_fd(s), events = read_fd(s), refusals = read_fd(s);
    s->inside.commands_dir = commands == AT_FDCWD ? -1 : commands;
    s->inside.oom_events = events == AT_FDCWD ? -1 : events;
    s->inside.process_events = refusals == AT_FDCWD ? -1 : refusals;
    s->inside.null = open_null(read_fd(s));
    s->inside.terminals = read_fd(s);
    s->inside.open_files = (uint64_t)read_int(&s->plan);
    s->inside.processes = (uint64_t)read_int(&s->plan);
    int64_t joins = read_int(&s->plan);
    if (joins < 0 || joins > 8) return EBADMSG;
    for (s->inside.join_count = 0; (int64_t)s->inside.join_count < joins; s->inside.join_count++)
        s->inside.join[s->inside.join_count] = read_fd(s);
    return s->plan.bad ? EBADMSG : 0;
}

/* Keeps `keep` and nothing else, for us and, by the bounding set, for every command. */
int op_capabilities(struct setup *s) {
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

int op_seccomp(struct setup *s) {
    int no_new_privileges = (int)read_int(&s->plan);
    size_t length;
    const char *bytes = read_bytes(&s->plan, &length);
    if (s->plan.bad || length % sizeof(struct sock_filter)) return EBADMSG;
    if (no_new_privileges && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return errno;
    if (!length) return 0;
    /* Only the kernel looks at it, and copies it first: it need not be aligned. */
    struct sock_fprog program = {(unsigned short)(length / sizeof(struct sock_filter)), (void *)bytes};
    return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) ? errno : 0;
}

/* For the sandbox that the plan goes on to make: init runs on these, and so does all that it starts. A command may widen
 * that again; its quota holds all the same. */
int op_affinity(struct setup *s) {
    s->inside.processors = read_bytes(&s->plan, &s->inside.processors_length);
    return s->plan.bad ? EBADMSG : 0;
}

static int send_listener(int socket, int listener) {
    char byte = 'l';
    struct iovec part = {&byte, 1};
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof listener)];
    } control = {0};
    control.header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof listener)};
    memcpy(CMSG_DATA(&control.header), &listener, sizeof listener);
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    return sendmsg(socket, &message, MSG_NOSIGNAL) == 1 ? 0 : errno;
}

/* A filter whose audited calls ask a listener, which goes to the node over the channel. From here on each of those calls
 * waits for an answer, ours too: only sendmsg must not be one, or the node would never get what it answers by. */
int op_seccomp_audited(struct setup *s) {
    int channel = read_fd(s);
    size_t length;
    const char *bytes = read_bytes(&s->plan, &length);
    if (s->plan.bad || !length || length % sizeof(struct sock_filter)) return EBADMSG;
    struct sock_fprog program = {(unsigned short)(length / sizeof(struct sock_filter)), (void *)bytes};
    unsigned flags = SECCOMP_FILTER_FLAG_NEW_LISTENER;
    /* Linux 5.19: once received, a call is not begun again at every signal. */
    int listener = (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags | FLAG_WAIT_KILLABLE, &program);
    if (listener < 0 && errno == EINVAL) listener = (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program);
    if (listener < 0) return errno;
    int error = send_listener(channel, listener);
    close(listener);
    return error;
}
