/* A stream into a file or a tree. Below the destination no link is followed; the sandbox may move things about meanwhile,
 * which can lead to an error, but out of it to nowhere. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "files.h"

static const char *destination;
static bool keep_owners;
static int root = -1; /* the destination, when it is a directory */
static struct member member;

/* ---- where a member goes --------------------------------------------------------------------- */

static int open_below(const char *path, size_t length) {
    static char text[TAR_PATH];
    memcpy(text, path, length);
    text[length] = 0;
    struct open_how how = {
        .flags = O_PATH | O_DIRECTORY | O_CLOEXEC,
        .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS,
    };
    int fd = root < 0 ? -1 : (int)syscall(SYS_openat2, root, length ? text : ".", &how, sizeof how);
    if (fd < 0) finish(root < 0 ? EBADMSG : errno == ENOTDIR || errno == ELOOP ? EEXIST : errno);
    return fd;
}

static const char *last_name(const char *path) {
    const char *slash = strrchr(path, '/');
    const char *name = slash ? slash + 1 : path;
    if (!*name || is_dot(name)) finish(EBADMSG);
    return name;
}

/* The folder of a member and its name in it. Members of one folder follow each other, so the last one stays open. */
static int locate(const char **name) {
    static char open_path[TAR_PATH];
    static int open_fd = -1;
    if (!strcmp(member.path, ".")) return parent_directory(destination, name);
    *name = last_name(member.path);
    size_t length = *name == member.path ? 0 : (size_t)(*name - member.path - 1);
    if (open_fd >= 0 && strlen(open_path) == length && !memcmp(open_path, member.path, length)) return open_fd;
    if (open_fd >= 0) close(open_fd);
    open_fd = open_below(member.path, length);
    memcpy(open_path, member.path, length);
    open_path[length] = 0;
    return open_fd;
}

/* ---- members --------------------------------------------------------------------------------- */

static uint64_t get_line(uint64_t *left) {
    uint64_t value = 0;
    for (char byte; *left;) {
        get_bytes(&byte, 1);
        --*left;
        if (byte == '\n') return value;
        if (byte < '0' || byte > '9') break;
        value = value * 10 + (uint64_t)(byte - '0');
    }
    finish(EBADMSG);
}

static void get_sparse(int fd) {
    enum { PIECES_MAX = 1 << 20 };
    uint64_t left = member.size, count = get_line(&left), used, at = 0;
    if (count > PIECES_MAX) finish(EBADMSG);
    uint64_t *map = allocate(count * 2 * sizeof *map);
    for (uint64_t i = 0; i < 2 * count; i++) map[i] = get_line(&left);
    used = member.size - left;
    get_padding(used);
    left -= (512 - used % 512) % 512;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t start = map[2 * i], length = map[2 * i + 1];
        if (start < at || length > left || start > member.real_size || length > member.real_size - start) finish(EBADMSG);
        check(lseek(fd, (off_t)start, SEEK_SET) >= 0);
        get_file(fd, length);
        left -= length;
        at = start + length;
    }
    if (left) finish(EBADMSG);
    check(!ftruncate(fd, (off_t)member.real_size));
    free(map);
}

static void check_owner(bool good) {
    if (!good) finish(errno == EINVAL ? EOVERFLOW : errno); /* a number that this user namespace does not have */
}

/* Owners as they were told, or of a file that was there before as they are. Without the right to it: ours. */
static void give_owner(int fd, int dir, const char *name) {
    struct stat old;
    if (keep_owners) {
        check_owner(!fchown(fd, member.uid, member.gid));
    } else if (!strcmp(member.path, ".") && !fstatat(dir, name, &old, AT_SYMLINK_NOFOLLOW) && S_ISREG(old.st_mode)) {
        check(!fchown(fd, old.st_uid, old.st_gid) || errno == EPERM);
    }
}

static const struct timespec *times(void) {
    static struct timespec both[2];
    both[0] = (struct timespec){.tv_nsec = UTIME_OMIT};
    both[1] = member.modified;
    return both;
}

static void make_file(void) {
    const char *name;
    int dir = locate(&name), fd = open_aside(dir);
    if (member.sparse) get_sparse(fd);
    else get_file(fd, member.size);
    get_padding(member.size);
    give_owner(fd, dir, name);
    check(!fchmod(fd, member.mode) && !futimens(fd, times()));
    check(!close(fd));
    publish(dir, name);
}

/* Links and FIFOs: made under another name first, so that they too replace what is there in one step. */
static void make_other(void) {
    const char *name, *target;
    int dir = locate(&name), error;
    const char *aside = name_aside(dir);
    if (member.type == TAR_SYMLINK) {
        error = symlinkat(member.link, dir, aside);
    } else if (member.type == TAR_FIFO) {
        error = mkfifoat(dir, aside, member.mode);
    } else {
        target = last_name(member.link);
        int from = open_below(member.link, target == member.link ? 0 : (size_t)(target - member.link - 1));
        error = linkat(from, target, dir, aside, 0);
        close(from);
    }
    check(!error);
    if (member.type != TAR_HARD_LINK) {
        if (keep_owners) check_owner(!fchownat(dir, aside, member.uid, member.gid, AT_SYMLINK_NOFOLLOW));
        check(!utimensat(dir, aside, times(), AT_SYMLINK_NOFOLLOW));
    }
    publish(dir, name);
}

static int open_directory(void) {
    const char *name;
    int dir = locate(&name); /* before `name` is looked at */
    bool top = !strcmp(member.path, ".");
    int fd = top ? try_open(destination, O_RDONLY | O_DIRECTORY, 0)
                 : openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) finish(errno == ENOTDIR || errno == ELOOP ? EEXIST : errno);
    return fd;
}

static bool create_directory(void) {
    const char *name;
    int dir = locate(&name);
    if (!*name) return false; /* "/" */
    bool made = !mkdirat(dir, name, 0700);
    check(made || errno == EEXIST);
    return made;
}

/* Comes twice: the first time it is made, the second time it gets its mode and times, if it was not there before us. */
static void make_directory(void) {
    static enum { NEW, WAS_THERE, OURS } state[TAR_PATH / 2 + 1];
    size_t depth = strcmp(member.path, ".") ? 1 : 0;
    for (const char *at = member.path; *at; at++) depth += *at == '/';
    if (depth > TAR_PATH / 2) finish(EBADMSG);
    if (state[depth] == NEW) {
        state[depth] = create_directory() ? OURS : WAS_THERE;
        int fd = open_directory();
        if (depth) close(fd);
        else root = fd;
        return;
    }
    if (state[depth] == OURS) {
        int fd = open_directory();
        if (keep_owners) check_owner(!fchown(fd, member.uid, member.gid));
        check(!fchmod(fd, member.mode) && !futimens(fd, times()));
        close(fd);
    }
    state[depth] = NEW;
}

/* What is there is replaced; through a link, what it points to. */
static void find_destination(const char *path) {
    static char target[PATH_MAX];
    struct stat st;
    destination = path;
    if (!stat(path, &st)) {
        check(realpath(path, target) != NULL);
        destination = target;
    } else {
        check(errno == ENOENT);
        make_parents(path);
    }
}

_Noreturn void unpack(const char *path, bool owners) {
    working_at(path);
    find_destination(path);
    keep_owners = owners;
    umask(0);
    while (get_member(&member)) {
        working_at(strcmp(member.path, ".") ? member.path : path);
        switch (member.type) {
        case TAR_FILE: make_file(); break;
        case TAR_DIRECTORY: make_directory(); break;
        case TAR_HARD_LINK:
        case TAR_SYMLINK:
        case TAR_FIFO: make_other(); break;
        default: finish(EBADMSG);
        }
    }
    finish(0);
}
