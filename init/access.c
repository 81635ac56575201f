/* What an access policy is made of: mounts over paths of the sandbox, and a Landlock domain. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/landlock.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "setup.h"

#ifndef LANDLOCK_RESTRICT_SELF_LOG_NEW_EXEC_ON
#define LANDLOCK_RESTRICT_SELF_LOG_NEW_EXEC_ON (1U << 1)
#endif

enum { MAY_BE_MISSING = 1, REAL_PATH = 2, ONE_NAME = 4, IN_PLACE = 8, ONLY_LOOK = 16 };

/* The path, never outside of `root`. Links that a layer brought are followed within it; in a sandbox that runs (REAL_PATH)
 * none is, since what lives there could turn it between our look and our mount. */
static int find(int root, const char *path, unsigned flags, struct stat *st) {
    struct open_how how = {.flags = O_PATH | O_CLOEXEC, .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS};
    if (flags & REAL_PATH) how.resolve |= RESOLVE_NO_SYMLINKS;
    int fd = (int)syscall(SYS_openat2, root, path, &how, sizeof how);
    if (fd < 0) return -1;
    int error = fstat(fd, st) ? errno : S_ISREG(st->st_mode) && (flags & ONE_NAME) && st->st_nlink > 1 ? EMLINK : 0;
    if (!error) return fd;
    close(fd);
    errno = error;
    return -1;
}

static int set_attributes(int mount, uint64_t set, uint64_t clear, unsigned recursive) {
    struct mount_attr attributes = {.attr_set = set, .attr_clr = clear};
    return syscall(SYS_mount_setattr, mount, "", AT_EMPTY_PATH | recursive, &attributes, sizeof attributes) ? errno : 0;
}

/* A copy of what is at `from`/`path`, with other attributes, on top of `target`. What is set is set for all mounts in it;
 * what is cleared only for the outermost: one below may have been narrowed by itself. */
static int cover(int from, const char *path, int target, uint64_t set, uint64_t clear) {
    unsigned flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH | AT_RECURSIVE;
    int tree = (int)syscall(SYS_open_tree, from, path, flags);
    if (tree < 0) return errno;
    int error = set_attributes(tree, set, clear, clear ? 0 : AT_RECURSIVE);
    unsigned move = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH;
    if (!error && syscall(SYS_move_mount, tree, "", target, "", move)) error = errno;
    close(tree);
    return error;
}

/* Other attributes for what is below a path: by a bind of it on itself, so that the rest of its mount keeps its own; or in
 * place, where the path is that of a whole mount, which then also holds for directories and roots that are open already. */
int op_restrict(struct setup *s) {
    int root = read_fd(s);
    const char *path = read_text(&s->plan);
    uint64_t set = (uint64_t)read_int(&s->plan), clear = (uint64_t)read_int(&s->plan);
    unsigned flags = (unsigned)read_int(&s->plan);
    if (s->plan.bad) return EBADMSG;
    struct stat st;
    int target = find(root, path, flags, &st);
    bool missing = target < 0 && (errno == ENOENT || errno == ENOTDIR || errno == ELOOP);
    if (target < 0) return missing && (flags & MAY_BE_MISSING) ? 0 : setup_fail(s, errno, path);
    int error = 0;
    if (flags & IN_PLACE) error = set_attributes(target, set, clear, 0);
    else if (!(flags & ONLY_LOOK)) error = cover(target, "", target, set, clear);
    close(target);
    return error ? setup_fail(s, error, path) : 0;
}

/* Covers a path by something that nobody inside can open. Root there has all rights to what belongs to its own ids, and
 * an ordinary user's sandbox has no other ids; but entries of /proc that belong to the machine's root refuse both. */
int op_hide(struct setup *s) {
    int root = read_fd(s);
    const char *path = read_text(&s->plan);
    unsigned flags = (unsigned)read_int(&s->plan);
    if (s->plan.bad) return EBADMSG;
    struct stat st;
    int target = find(root, path, flags | ONE_NAME, &st);
    if (target < 0) return setup_fail(s, errno, path);
    const char *mask = S_ISDIR(st.st_mode) ? "proc/tty/driver" : "proc/sys/kernel/cad_pid";
    int error = flags & ONLY_LOOK ? 0 : cover(root, mask, target, MOUNT_ATTR_NOEXEC, 0);
    close(target);
    return error ? setup_fail(s, error, path) : 0;
}

/* A copy of a whole tree of mounts, as it is now. */
int op_clone_all(struct setup *s) {
    int64_t out = read_int(&s->plan);
    int root = read_fd(s);
    if (s->plan.bad) return EBADMSG;
    unsigned flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH | AT_RECURSIVE;
    return store_fd(s, out, (int)syscall(SYS_open_tree, root, "", flags));
}

/* Into the mount namespace of a sandbox of this spawner, by the pid of its init. The spawner is init's parent: as long as
 * it has not reaped it, nobody else has the number. */
int op_visit(struct setup *s) {
    pid_t pid = (pid_t)read_int(&s->plan);
    if (s->plan.bad) return EBADMSG;
    int mounts = spawner_mounts(pid);
    return mounts < 0 ? ESRCH : setns(mounts, CLONE_NEWNS) ? errno : 0;
}

/* ---- Landlock -------------------------------------------------------------------------------- */

/* What is missing gives no right, and so needs no rule. */
static void allow_execution(int rules, const char *path) {
    struct stat st;
    int fd = find(AT_FDCWD, path, 0, &st);
    if (fd < 0) return;
    struct landlock_path_beneath_attr rule = {.allowed_access = LANDLOCK_ACCESS_FS_EXECUTE, .parent_fd = fd};
    syscall(SYS_landlock_add_rule, rules, LANDLOCK_RULE_PATH_BENEATH, &rule, 0);
    close(fd);
}

/* Puts us, and so every command that we start later, into a domain that executes nothing but what is at or below these
 * paths. It also keeps them from looking into processes outside of it (/proc/<pid>/cwd, root, fd, ptrace), which may still
 * hold what the policy has hidden since. One domain for all: it costs a command nothing. A kernel without
 * Landlock leaves it at the mounts, as `doctor` says. */
int enter_domain(char **paths, size_t count) {
    struct landlock_ruleset_attr handled = {.handled_access_fs = LANDLOCK_ACCESS_FS_EXECUTE};
    int rules = (int)syscall(SYS_landlock_create_ruleset, &handled, sizeof handled.handled_access_fs, 0);
    if (rules < 0) return errno == ENOSYS || errno == EOPNOTSUPP ? 0 : errno;
    for (size_t i = 0; i < count; i++) allow_execution(rules, paths[i]);
    int error = prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ? errno : 0;
    /* Where the host's audit is on, the kernel writes down what it refuses; before Linux 6.15 the flag is unknown. */
    unsigned flags = LANDLOCK_RESTRICT_SELF_LOG_NEW_EXEC_ON;
    if (!error && syscall(SYS_landlock_restrict_self, rules, flags)) error = errno;
    if (error == EINVAL) error = syscall(SYS_landlock_restrict_self, rules, 0) ? errno : 0;
    close(rules);
    return error;
}

int op_landlock(struct setup *s) {
    size_t count;
    char **paths = read_list(&s->plan, &count);
    int error = s->plan.bad ? EBADMSG : enter_domain(paths, count);
    free(paths);
    return error;
}

/* ---- the rest -------------------------------------------------------------------------------- */

/* Where file operations find the tree as it is without the access policy. */
int op_view(struct setup *s) {
    s->inside.view = read_fd(s);
    return s->plan.bad ? EBADMSG : 0;
}

/* A file that memfd_create makes is on no mount that could be told not to execute. */
int op_no_memory_files(struct setup *s) {
    (void)s;
    enum { MEMFD_SECRET = 447 }; /* the same number on every architecture; not in older headers */
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0 /* offset of seccomp_data.nr; other architectures are killed elsewhere */),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_memfd_create, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, MEMFD_SECRET, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EACCES),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof rules / sizeof *rules, rules};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return errno;
    return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) ? errno : 0;
}
