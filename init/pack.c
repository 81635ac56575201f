/* A file or a tree as a stream. A directory comes twice: before what is in it, so that it can be made, and after it, when
 * its mode and times can be set. What vanishes meanwhile is left out, as are sockets, devices and what is in /proc of us. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "files.h"

enum { PIECES_MAX = 4096, BUCKETS = 4096 };

static struct member member;
static char walked[TAR_PATH];

/* ---- files of several names ------------------------------------------------------------------ */

struct known {
    dev_t device;
    ino_t inode;
    struct known *next;
    char path[];
};
static struct known *known[BUCKETS];

static const char *first_name(const struct stat *st, const char *path) {
    struct known **bucket = &known[st->st_ino % BUCKETS];
    for (struct known *k = *bucket; k; k = k->next)
        if (k->inode == st->st_ino && k->device == st->st_dev) return k->path;
    struct known *k = allocate(sizeof *k + strlen(path) + 1);
    *k = (struct known){st->st_dev, st->st_ino, *bucket};
    strcpy(k->path, path);
    *bucket = k;
    return NULL;
}

/* ---- holes ----------------------------------------------------------------------------------- */

static struct {
    uint64_t start, length;
} pieces[PIECES_MAX];
static size_t piece_count;

/* The last of very many takes all that is left, holes too. False for a file without holes. */
static bool find_pieces(int fd, const struct stat *st) {
    off_t at = 0, size = st->st_size;
    piece_count = 0;
    if (st->st_blocks * 512 >= size) return false;
    while (at < size) {
        off_t start = lseek(fd, at, SEEK_DATA);
        if (start < 0 && errno == ENXIO) break;
        off_t end = start < 0 ? -1 : lseek(fd, start, SEEK_HOLE);
        if (end < 0) return false;
        if (end > size || piece_count == PIECES_MAX - 2) end = size;
        if (start >= end) break;
        pieces[piece_count].start = (uint64_t)start;
        pieces[piece_count++].length = (uint64_t)(end - start);
        at = end;
    }
    if (piece_count == 1 && pieces[0].length == (uint64_t)size) return false;
    pieces[piece_count].start = (uint64_t)size; /* as GNU tar marks a hole at the end */
    pieces[piece_count++].length = 0;
    return true;
}

static void put_sparse(int fd, const struct stat *st) {
    static char map[PIECES_MAX * 42];
    int length = sprintf(map, "%zu\n", piece_count);
    uint64_t data = 0;
    for (size_t i = 0; i < piece_count; i++) {
        length += sprintf(map + length, "%llu\n%llu\n", (unsigned long long)pieces[i].start, (unsigned long long)pieces[i].length);
        data += pieces[i].length;
    }
    member.sparse = true;
    member.real_size = (uint64_t)st->st_size;
    member.size = (((uint64_t)length + 511) & ~511ull) + data;
    put_member(&member);
    put_bytes(map, (size_t)length);
    put_padding((uint64_t)length);
    for (size_t i = 0; i < piece_count; i++) {
        check(lseek(fd, (off_t)pieces[i].start, SEEK_SET) >= 0);
        put_file(fd, pieces[i].length);
    }
    put_padding(data);
}

/* ---- members --------------------------------------------------------------------------------- */

static void describe(char type, const char *path, const struct stat *st) {
    member.type = type;
    member.mode = st->st_mode & 07777;
    member.uid = st->st_uid;
    member.gid = st->st_gid;
    member.modified = st->st_mtim;
    member.size = member.real_size = 0;
    member.linked = member.sparse = false;
    strcpy(member.path, path);
    *member.link = 0;
}

static void pack_file(int fd, const char *path) {
    struct stat st;
    check(!fstat(fd, &st));
    if (!S_ISREG(st.st_mode)) return;
    describe(TAR_FILE, path, &st);
    member.linked = st.st_nlink > 1;
    const char *first = member.linked ? first_name(&st, path) : NULL;
    if (first) {
        member.type = TAR_HARD_LINK;
        if (strlen(first) >= sizeof member.link) finish(ENAMETOOLONG);
        strcpy(member.link, first);
        put_member(&member);
    } else if (find_pieces(fd, &st)) {
        put_sparse(fd, &st);
    } else {
        check(lseek(fd, 0, SEEK_SET) >= 0);
        member.size = (uint64_t)st.st_size;
        put_member(&member);
        put_file(fd, member.size);
        put_padding(member.size);
    }
}

static void pack_symlink(int dir, const char *name, const struct stat *st) {
    describe(TAR_SYMLINK, walked, st);
    ssize_t length = readlinkat(dir, name, member.link, sizeof member.link - 1);
    if (length < 0) return;
    member.link[length] = 0;
    put_member(&member);
}

static void pack_directory(int fd, size_t length);

static void pack_entry(int dir, const char *name, size_t length) {
    struct stat st;
    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW)) return;
    if (S_ISLNK(st.st_mode)) {
        pack_symlink(dir, name, &st);
    } else if (S_ISFIFO(st.st_mode)) {
        describe(TAR_FIFO, walked, &st);
        put_member(&member);
    } else if (S_ISREG(st.st_mode) || S_ISDIR(st.st_mode)) {
        int kind = S_ISDIR(st.st_mode) ? O_DIRECTORY : O_NONBLOCK | O_NOCTTY;
        int fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | kind);
        if (fd < 0 && is_gone(errno) && errno != EACCES) return;
        check(fd >= 0);
        if (S_ISDIR(st.st_mode)) {
            pack_directory(fd, length);
        } else {
            pack_file(fd, walked);
            close(fd);
        }
    }
}

static void put_directory(int fd) {
    struct stat st;
    check(!fstat(fd, &st));
    describe(TAR_DIRECTORY, *walked ? walked : ".", &st);
    put_member(&member);
}

/* `walked` is its path, of that length. */
static void pack_directory(int fd, size_t length) {
    if (tells_of_us(fd)) {
        close(fd);
        return;
    }
    put_directory(fd);
    DIR *directory = fdopendir(fd);
    check(directory != NULL);
    for (struct dirent *entry; (entry = readdir(directory));) {
        size_t name = strlen(entry->d_name);
        if (is_dot(entry->d_name)) continue;
        if (length + name + 2 > sizeof walked) finish(ENAMETOOLONG);
        size_t start = length ? length + 1 : 0;
        if (length) walked[length] = '/';
        memcpy(walked + start, entry->d_name, name + 1);
        pack_entry(fd, entry->d_name, start + name);
        walked[length] = 0;
    }
    put_directory(fd);
    closedir(directory);
}

_Noreturn void pack(const char *path) {
    struct stat st;
    working_at(path);
    int fd = open_path(path, O_RDONLY | O_NONBLOCK | O_NOCTTY, 0);
    check(!fstat(fd, &st));
    if (tells_of_us(fd)) finish(EACCES);
    if (S_ISDIR(st.st_mode)) {
        working_at(walked);
        pack_directory(fd, 0);
    } else if (S_ISREG(st.st_mode)) {
        pack_file(fd, ".");
    } else {
        finish(EINVAL);
    }
    put_end();
    finish(0);
}
