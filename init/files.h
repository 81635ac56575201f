/* What the file operations share. Each runs in a process of its own and ends with an errno as its exit code. */
#ifndef SHOAL_FILES_H
#define SHOAL_FILES_H

#include <limits.h>
#include <sys/stat.h>
#include <time.h>

#include "init.h"

enum { CHUNK = 64 << 10 };
extern char chunk[CHUNK];

/* ---- files.c --------------------------------------------------------------------------------- */

_Noreturn void finish(int error); /* 0 or an errno; what was unfinished is removed, and `at` told on descriptor 2 */
void check(bool good);            /* else ends with errno */
void working_at(const char *path); /* for the message of an error; the text must stay where it is */
bool is_dot(const char *name);
bool is_gone(int error);           /* what was there a moment ago is not any more: the sandbox goes on living */
bool tells_of_us(int fd);
int try_open(const char *path, int flags, mode_t mode);  /* through no magic link of /proc; -1 and errno */
int open_path(const char *path, int flags, mode_t mode); /* the same, or the operation ends */
void make_parents(const char *path);
int parent_directory(const char *path, const char **name);
/* A file is written aside and renamed over: the name in `dir`, removed again should the operation fail. */
const char *name_aside(int dir);
int open_aside(int dir);
void publish(int dir, const char *name);

/* ---- tar.c: a stream of members, in on descriptor 0, out on 1 --------------------------------- */

enum { TAR_FILE = '0', TAR_HARD_LINK = '1', TAR_SYMLINK = '2', TAR_DIRECTORY = '5', TAR_FIFO = '6' };
enum { TAR_PATH = 2 * PATH_MAX };

struct member {
    char type;
    mode_t mode;
    uint32_t uid, gid;
    uint64_t size; /* bytes of data that follow */
    struct timespec modified;
    bool linked;   /* a file of several names: later members may be links to it */
    bool sparse;   /* the data is a map and then what is not holes */
    uint64_t real_size;
    char path[TAR_PATH], link[PATH_MAX];
};
void put_bytes(const void *data, size_t length);
void put_file(int fd, uint64_t length); /* from where it stands; ends the operation when there is less */
void put_padding(uint64_t length);
void put_flush(void);
void put_member(const struct member *m);
void put_end(void);
void get_bytes(void *data, size_t length);
void get_file(int fd, uint64_t length);
void get_padding(uint64_t length);
bool get_member(struct member *m); /* false at the end of the stream */

/* ---- pack.c, unpack.c, watch.c ---------------------------------------------------------------- */

_Noreturn void pack(const char *path);
_Noreturn void unpack(const char *path, bool owners);
_Noreturn void watch_path(const char *path, bool recursive);

#endif
