#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "init.h"

static const uint8_t *take(struct reader *r, size_t count) {
    if (r->bad || (size_t)(r->end - r->at) < count) {
        r->bad = true;
        return NULL;
    }
    const uint8_t *at = r->at;
    r->at += count;
    return at;
}

int64_t read_int(struct reader *r) {
    const uint8_t *at = take(r, 8);
    return at ? (int64_t)get_u64(at) : 0;
}

const char *read_bytes(struct reader *r, size_t *length) {
    *length = 0;
    const uint8_t *at = take(r, 4);
    if (!at) return "";
    size_t count = get_u32(at);
    const uint8_t *bytes = count < FRAME_PAYLOAD_MAX ? take(r, count + 1) : NULL;
    if (!bytes || bytes[count] != 0) {
        r->bad = true;
        return "";
    }
    *length = count;
    return (const char *)bytes;
}

const char *read_text(struct reader *r) {
    size_t length;
    const char *text = read_bytes(r, &length);
    if (strlen(text) != length) r->bad = true;
    return text;
}

size_t read_count(struct reader *r) {
    const uint8_t *at = take(r, 4);
    size_t count = at ? get_u32(at) : 0;
    /* Each text takes five bytes at least, so a count can't ask for more memory than was sent. */
    if (count <= (size_t)(r->end - r->at) / 5) return count;
    r->bad = true;
    return 0;
}

char **read_list(struct reader *r, size_t *count) {
    size_t wanted = read_count(r);
    char **list = allocate((wanted + 1) * sizeof *list);
    for (*count = 0; *count < wanted; ++*count) list[*count] = (char *)read_text(r);
    return list;
}

void *allocate(size_t size) {
    void *memory = calloc(1, size ? size : 1);
    if (!memory) _exit(ENOMEM);
    return memory;
}

uint8_t *buffer_reserve(struct buffer *b, size_t more) {
    if (b->start == b->end) b->start = b->end = 0;
    if (b->capacity - b->end < more && b->start) {
        memmove(b->data, b->data + b->start, b->end - b->start);
        b->end -= b->start;
        b->start = 0;
    }
    if (b->capacity - b->end < more) {
        b->capacity = (b->end + more + 4095) & ~(size_t)4095;
        b->data = realloc(b->data, b->capacity);
        if (!b->data) _exit(ENOMEM);
    }
    return b->data + b->end;
}

void buffer_consume(struct buffer *b, size_t count) {
    b->start += count;
    if (b->start < b->end) return;
    b->start = b->end = 0;
    if (b->capacity > 4 * FRAME_DATA_MAX) { /* an idle sandbox should not hold what a busy moment needed */
        free(b->data);
        *b = (struct buffer){0};
    }
}

int write_all(int fd, const void *data, size_t length) {
    const char *at = data;
    while (length) {
        ssize_t done = write(fd, at, length);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return -1;
        at += done;
        length -= (size_t)done;
    }
    return 0;
}

int write_file(int dirfd, const char *path, const char *data, size_t length) {
    int fd = openat(dirfd, path, O_WRONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) return -1;
    ssize_t done = write(fd, data, length); /* in one call: the kernel's files take a value whole */
    int error = done == (ssize_t)length ? 0 : done < 0 ? errno : EIO;
    close(fd);
    errno = error;
    return error ? -1 : 0;
}

int remove_directories(int parent, const char *name) {
    /* Most have nothing below them; listing one, with all its files, costs more than removing it. */
    if (!unlinkat(parent, name, AT_REMOVEDIR)) return 0;
    if (errno != EBUSY && errno != ENOTEMPTY) return -1;
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return -1;
    DIR *directory = fdopendir(fd);
    for (struct dirent *entry; directory && (entry = readdir(directory));)
        if (entry->d_type == DT_DIR && entry->d_name[0] != '.') remove_directories(fd, entry->d_name);
    if (directory) closedir(directory);
    return unlinkat(parent, name, AT_REMOVEDIR);
}

uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void close_from(int first) { syscall(SYS_close_range, (unsigned)first, ~0u, 0); }
