/* File operations, as the caller's user, in the sandbox's own root. Each runs in a process of its own: input comes on
 * descriptor 0, output goes to 1 with the same flow control as a command's, the errno is the exit code.
 *
 * An entry of LIST and STAT:  u32 mode | u32 uid | u32 gid | u64 size | u64 mtime ns | u32 n, path | u32 m, link target */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "files.h"

enum { MOVED = 1 << 20 };
char chunk[CHUNK];
static const char *at_work;

/* A file being written aside, to be removed when the operation fails. */
static struct {
    int dir;
    const char *name;
} unfinished;

_Noreturn void finish(int error) {
    if (error && unfinished.name) unlinkat(unfinished.dir, unfinished.name, 0);
    if (error && at_work && write_all(2, at_work, strlen(at_work))) { /* the node knows the path it asked for */ }
    _exit(error & 0xff);
}

void check(bool good) {
    if (!good) finish(errno);
}

void working_at(const char *path) { at_work = path; }

/* ---- reading and writing --------------------------------------------------------------------- */

/* Of what /proc tells about this very process, whose memory and program are the helper's and not the sandbox's. */
bool tells_of_us(int fd) {
    struct statfs fs;
    if (fstatfs(fd, &fs) || fs.f_type != PROC_SUPER_MAGIC) return false;
    char self[32], ours[32], path[PATH_MAX];
    snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
    int prefix = snprintf(ours, sizeof ours, "/proc/%d", getpid());
    ssize_t length = readlink(self, path, sizeof path - 1);
    if (length < 0) return true;
    path[length] = 0;
    return !strncmp(path, ours, (size_t)prefix) && (path[prefix] == '/' || !path[prefix]);
}

/* Through no magic link of /proc: /proc/self/exe would be the helper, whatever the sandbox calls it by. */
int try_open(const char *path, int flags, mode_t mode) {
    struct open_how how = {.flags = (uint64_t)(flags | O_CLOEXEC), .mode = mode, .resolve = RESOLVE_NO_MAGICLINKS};
    return (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
}

int open_path(const char *path, int flags, mode_t mode) {
    int fd = try_open(path, flags, mode);
    check(fd >= 0);
    return fd;
}

/* O_NONBLOCK so that a FIFO without a writer is an error at once and not a wait for ever. */
static int open_regular(const char *path, int flags) {
    int fd = open_path(path, flags | O_NONBLOCK | O_NOCTTY, 0);
    struct stat st;
    check(!fstat(fd, &st));
    if (S_ISDIR(st.st_mode)) finish(EISDIR);
    if (!S_ISREG(st.st_mode)) finish(EINVAL);
    if (tells_of_us(fd)) finish(EACCES);
    return fd;
}

/* Up to `most` bytes; 0 at the end. One of the two is a pipe: pages are moved there and not copied, where the file's system can. */
static size_t transfer(int from, int to, size_t most) {
    ssize_t moved = splice(from, NULL, to, NULL, most, SPLICE_F_MOVE);
    if (moved >= 0 || errno != EINVAL) {
        check(moved >= 0);
        return (size_t)moved;
    }
    ssize_t got = read(from, chunk, most < CHUNK ? most : CHUNK);
    check(got >= 0 && !write_all(to, chunk, (size_t)got));
    return (size_t)got;
}

static void copy(int from, int to) {
    while (transfer(from, to, MOVED)) {}
}

/* Input is framed, u32 length then bytes and a final 0, so that a caller who dies half-way publishes nothing. */
static void copy_input(int to) {
    for (;;) {
        uint8_t header[4];
        for (size_t have = 0; have < 4;) {
            ssize_t got = read(0, header + have, 4 - have);
            if (got == 0) finish(ECANCELED);
            check(got > 0);
            have += (size_t)got;
        }
        size_t left = get_u32(header);
        if (!left) return;
        while (left) {
            size_t got = transfer(0, to, left);
            if (got == 0) finish(ECANCELED);
            left -= got;
        }
    }
}

void make_parents(const char *path) {
    char *copy_of = strdup(path);
    check(copy_of != NULL);
    for (char *at = copy_of + 1; *at; at++) {
        if (*at != '/') continue;
        *at = 0;
        check(!mkdir(copy_of, 0755) || errno == EEXIST);
        *at = '/';
    }
    free(copy_of);
}

int parent_directory(const char *path, const char **name) {
    const char *slash = strrchr(path, '/');
    if (!slash) {
        *name = path;
        return AT_FDCWD;
    }
    *name = slash + 1;
    char *parent = strndup(path, slash == path ? 1 : (size_t)(slash - path));
    check(parent != NULL);
    int fd = open(parent, O_PATH | O_DIRECTORY | O_CLOEXEC);
    check(fd >= 0);
    free(parent);
    return fd;
}

const char *name_aside(int dir) {
    static char name[32];
    uint64_t random;
    check(getrandom(&random, sizeof random, 0) == sizeof random);
    snprintf(name, sizeof name, ".shoal-%016llx", (unsigned long long)random);
    unfinished.dir = dir;
    unfinished.name = name;
    return name;
}

int open_aside(int dir) {
    int fd = openat(dir, name_aside(dir), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    check(fd >= 0);
    return fd;
}

void publish(int dir, const char *name) {
    check(!renameat(dir, unfinished.name, dir, name));
    unlinkat(dir, unfinished.name, 0); /* renaming over another link to the same file does nothing, and is no error */
    unfinished.name = NULL;
}

/* Written aside and renamed over. An existing file keeps its mode and owner; a symlink is written through, as an editor
 * would, to what it points to. */
static void write_file_atomically(const char *path, mode_t mode) {
    char target[PATH_MAX];
    struct stat old;
    bool exists = !stat(path, &old);
    check(exists || errno == ENOENT);
    if (exists && S_ISDIR(old.st_mode)) finish(EISDIR);
    if (exists && !S_ISREG(old.st_mode)) finish(EINVAL);
    if (exists) check(realpath(path, target) != NULL && !access(target, W_OK)); /* the rename alone would not ask */
    else snprintf(target, sizeof target, "%s", path);
    if (!exists) make_parents(target);
    const char *name;
    int dir = parent_directory(target, &name);
    if (!*name) finish(EISDIR);
    int fd = open_aside(dir);
    copy_input(fd);
    check(!exists || !fchown(fd, old.st_uid, old.st_gid) || errno == EPERM);
    check(!fchmod(fd, mode != (mode_t)-1 ? mode : exists ? old.st_mode & 07777 : 0644));
    publish(dir, name);
    finish(0);
}

static void append(const char *path) {
    make_parents(path);
    int fd = open_path(path, O_WRONLY | O_APPEND | O_CREAT | O_NONBLOCK | O_NOCTTY, 0644);
    struct stat st;
    check(!fstat(fd, &st));
    if (!S_ISREG(st.st_mode)) finish(S_ISDIR(st.st_mode) ? EISDIR : EINVAL);
    copy_input(fd);
    finish(0);
}

/* ---- directories ----------------------------------------------------------------------------- */

static void put_entry(int at, const char *name, const char *path, const struct stat *st) {
    static char link[PATH_MAX];
    ssize_t target = S_ISLNK(st->st_mode) ? readlinkat(at, name, link, sizeof link) : 0;
    if (target < 0) target = 0;
    size_t length = strlen(path);
    uint8_t head[32], count[4];
    put_u32(head, st->st_mode);
    put_u32(head + 4, st->st_uid);
    put_u32(head + 8, st->st_gid);
    put_u64(head + 12, (uint64_t)st->st_size);
    put_u64(head + 20, (uint64_t)st->st_mtim.tv_sec * 1000000000u + (uint64_t)st->st_mtim.tv_nsec);
    put_u32(head + 28, (uint32_t)length);
    put_u32(count, (uint32_t)target);
    check(fwrite(head, 1, 32, stdout) == 32 && fwrite(path, 1, length, stdout) == length &&
          fwrite(count, 1, 4, stdout) == 4 && fwrite(link, 1, (size_t)target, stdout) == (size_t)target);
}

bool is_dot(const char *name) { return !strcmp(name, ".") || !strcmp(name, ".."); }

/* The path of where the walk is, below its start. One for all levels: a sandbox can nest them deeply. */
static char walked[PATH_MAX * 2];

bool is_gone(int error) { return error == ENOENT || error == ENOTDIR || error == ELOOP || error == EACCES; }

/* An entry that vanishes while we walk is no error: the sandbox goes on living. */
static void list(int fd, size_t length, int64_t depth) {
    DIR *directory = fdopendir(fd);
    check(directory != NULL);
    for (struct dirent *entry; (entry = readdir(directory));) {
        struct stat st;
        if (is_dot(entry->d_name) || fstatat(fd, entry->d_name, &st, AT_SYMLINK_NOFOLLOW)) continue;
        size_t name = strlen(entry->d_name);
        if (length + name + 2 > sizeof walked) finish(ENAMETOOLONG);
        memcpy(walked + length, entry->d_name, name + 1);
        put_entry(fd, entry->d_name, walked, &st);
        if (!S_ISDIR(st.st_mode) || depth <= 1) continue;
        int child = openat(fd, entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (child < 0 && is_gone(errno)) continue;
        check(child >= 0);
        memcpy(walked + length + name, "/", 2);
        if (tells_of_us(child)) close(child);
        else list(child, length + name + 1, depth - 1);
    }
    closedir(directory);
}

static int remove_below(int parent, const char *name) {
    if (!unlinkat(parent, name, 0)) return 0;
    if (errno != EISDIR && errno != EPERM) return errno;
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return errno;
    DIR *directory = fdopendir(fd);
    int error = directory ? 0 : errno;
    for (struct dirent *entry; directory && !error && (entry = readdir(directory));)
        if (!is_dot(entry->d_name)) error = remove_below(fd, entry->d_name);
    if (directory) closedir(directory);
    return error ? error : unlinkat(parent, name, AT_REMOVEDIR) ? errno : 0;
}

static void remove_path(const char *path) {
    const char *name;
    int parent = parent_directory(path, &name);
    if (!*name || is_dot(name)) finish(EBUSY);
    finish(remove_below(parent, name));
}

static void make_directory(const char *path, mode_t mode) {
    make_parents(path);
    if (!mkdir(path, mode)) finish(chmod(path, mode) ? errno : 0);
    struct stat st;
    check(errno == EEXIST && !stat(path, &st));
    finish(S_ISDIR(st.st_mode) ? 0 : ENOTDIR);
}

_Noreturn void file_operation(const struct request *q) {
    const char *path = q->argv[0];
    struct stat st;
    switch (q->operation) {
    case FILE_READ: copy(open_regular(path, O_RDONLY), 1); break;
    case FILE_WRITE: write_file_atomically(path, (mode_t)q->number); break;
    case FILE_APPEND: append(path); break;
    case FILE_STAT: {
        int fd = open(path, O_PATH | O_NOFOLLOW | O_CLOEXEC);
        check(fd >= 0 && !fstat(fd, &st));
        if (tells_of_us(fd)) finish(EACCES);
        put_entry(fd, "", path, &st);
        break;
    }
    case FILE_LIST: {
        int fd = open_path(path, O_RDONLY | O_DIRECTORY, 0);
        if (tells_of_us(fd)) finish(EACCES);
        list(fd, 0, q->number);
        break;
    }
    case FILE_MKDIR: make_directory(path, (mode_t)q->number); break;
    case FILE_REMOVE: remove_path(path); break;
    case FILE_RENAME:
        if (!q->argv[1]) finish(EINVAL);
        finish(rename(path, q->argv[1]) ? errno : 0);
    case FILE_SYMLINK:
        if (!q->argv[1]) finish(EINVAL);
        make_parents(path);
        finish(symlink(q->argv[1], path) ? errno : 0);
    case FILE_PACK: pack(path);
    case FILE_UNPACK: unpack(path, q->number);
    case FILE_WATCH: watch_path(path, q->number);
    default: finish(ENOSYS);
    }
    check(!fflush(stdout));
    finish(0);
}
