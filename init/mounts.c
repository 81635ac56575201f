/* The operations of a plan that make, change and place mounts. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "setup.h"

#ifndef FSCONFIG_SET_FD
#define FSCONFIG_SET_FD 5
#endif

/* The file system's own words on what it disliked, else what it was told. */
static int fs_error(struct setup *s, int fs, int error, const char *said) {
    char text[sizeof s->detail];
    ssize_t length = read(fs, text, sizeof text - 1);
    if (length > 0) {
        text[length] = 0;
        said = text;
    }
    close(fs);
    return setup_fail(s, error, said);
}

static int configure(int fs, const char *option) {
    char key[64];
    const char *equals = strchr(option, '=');
    if (!equals) return (int)syscall(SYS_fsconfig, fs, FSCONFIG_SET_FLAG, option, NULL, 0);
    snprintf(key, sizeof key, "%.*s", (int)(equals - option), option);
    return (int)syscall(SYS_fsconfig, fs, FSCONFIG_SET_STRING, key, equals + 1, 0);
}

/* The options of the plan, one by one. All are read, also after one that failed: what follows them is read next. */
static int configure_all(struct setup *s, int fs) {
    int error = 0;
    for (size_t count = read_count(&s->plan); count && !s->plan.bad; count--) {
        const char *option = read_text(&s->plan);
        if (!s->plan.bad && !error && configure(fs, option)) error = fs_error(s, fs, errno, option);
    }
    if (s->plan.bad && !error) close(fs);
    return s->plan.bad ? EBADMSG : error;
}

static int create_mount(struct setup *s, int64_t out, int fs, unsigned attributes) {
    if (syscall(SYS_fsconfig, fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0)) return fs_error(s, fs, errno, "create");
    int mount = (int)syscall(SYS_fsmount, fs, FSMOUNT_CLOEXEC, attributes);
    if (mount < 0) return fs_error(s, fs, errno, "fsmount");
    close(fs);
    return store_fd(s, out, mount);
}

int op_mount(struct setup *s) {
    int64_t out = read_int(&s->plan);
    const char *type = read_text(&s->plan);
    unsigned attributes = (unsigned)read_int(&s->plan);
    int fs = s->plan.bad ? -1 : (int)syscall(SYS_fsopen, type, FSOPEN_CLOEXEC);
    if (fs < 0) return s->plan.bad ? EBADMSG : errno;
    int error = configure_all(s, fs);
    return error ? error : create_mount(s, out, fs, attributes);
}

/* Since Linux 6.13 overlay takes descriptors; before, the path of one in /proc does the same. */
static int overlay_directory(int fs, const char *key, int fd) {
    if (!syscall(SYS_fsconfig, fs, FSCONFIG_SET_FD, key, NULL, fd)) return 0;
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return (int)syscall(SYS_fsconfig, fs, FSCONFIG_SET_STRING, key, path, 0);
}

int op_overlay(struct setup *s) {
    int64_t out = read_int(&s->plan);
    int upper = read_fd(s), work = read_fd(s);
    unsigned attributes = (unsigned)read_int(&s->plan);
    uid_t owner = (uid_t)read_int(&s->plan);
    int fs = s->plan.bad ? -1 : (int)syscall(SYS_fsopen, "overlay", FSOPEN_CLOEXEC);
    if (fs < 0) return s->plan.bad ? EBADMSG : errno;
    int error = configure_all(s, fs);
    int64_t lowers = error ? 0 : read_int(&s->plan);
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

int op_clone_tree(struct setup *s) {
    int64_t out = read_int(&s->plan);
    int from = read_fd(s);
    const char *path = read_text(&s->plan);
    if (s->plan.bad) return EBADMSG;
    unsigned flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW;
    int tree = (int)syscall(SYS_open_tree, from, path, flags);
    return tree < 0 ? setup_fail(s, errno, path) : store_fd(s, out, tree);
}

int op_idmap(struct setup *s) {
    int mount = read_fd(s), userns = read_fd(s);
    if (s->plan.bad) return EBADMSG;
    struct mount_attr attributes = {.attr_set = MOUNT_ATTR_IDMAP, .userns_fd = (uint64_t)userns};
    return syscall(SYS_mount_setattr, mount, "", AT_EMPTY_PATH, &attributes, sizeof attributes) ? errno : 0;
}

int op_attributes(struct setup *s) {
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

int op_attach(struct setup *s) {
    int mount = read_fd(s), root = read_fd(s);
    const char *path = read_text(&s->plan);
    if (s->plan.bad) return EBADMSG;
    int target = open_below(root, path);
    if (target < 0) return setup_fail(s, errno, path);
    unsigned flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH;
    int error = syscall(SYS_move_mount, mount, "", target, "", flags) ? errno : 0;
    close(target);
    return error ? setup_fail(s, error, path) : 0;
}

/* Files of one folder over files of the same names in another, both below a root whose folders on the way are mounts that
 * `attach` has placed, so no layer has a say in them. Far cheaper than a clone and an attach for each. */
int op_bind(struct setup *s) {
    int root = read_fd(s);
    const char *from = read_text(&s->plan), *to = read_text(&s->plan);
    int error = s->plan.bad ? EBADMSG : fchdir(root) ? errno : 0;
    for (size_t count = read_count(&s->plan); count && !s->plan.bad && !error; count--) {
        char source[256], target[256];
        const char *name = read_text(&s->plan);
        if (s->plan.bad) break;
        snprintf(source, sizeof source, "%s/%s", from, name);
        snprintf(target, sizeof target, "%s/%s", to, name);
        if (mount(source, target, NULL, MS_BIND, NULL)) error = setup_fail(s, errno, target);
    }
    return s->plan.bad ? EBADMSG : error;
}

static int let_go(void *unused) {
    (void)unused;
    _exit(syscall(SYS_umount2, ".", 2 /* MNT_DETACH */) ? 1 : 0);
}

/* Makes the root "/", and lets go of the spawner's tree, which is on top of it then. That waits for a grace period of RCU,
 * up to a millisecond on a busy machine, so a process beside us does it while we go on; init waits for its end before it
 * starts anything. It shares our memory, but of it only its stack is touched. */
int op_pivot(struct setup *s) {
    static _Alignas(16) char stack[8192];
    int root = read_fd(s);
    if (s->plan.bad) return EBADMSG;
    if (fchdir(root)) return setup_fail(s, errno, "fchdir");
    if (syscall(SYS_pivot_root, ".", ".")) return setup_fail(s, errno, "pivot_root");
    s->inside.letting_go = clone(let_go, stack + sizeof stack, CLONE_VM | SIGCHLD, NULL);
    if (s->inside.letting_go < 0) return setup_fail(s, errno, "clone");
    return chdir("/") ? setup_fail(s, errno, "chdir") : 0;
}

/* Into another mount namespace, to take a tree or a file from there; or into one of cgroups. */
int op_enter(struct setup *s) {
    int space = read_fd(s);
    return s->plan.bad ? EBADMSG : setns(space, 0) ? errno : 0;
}
