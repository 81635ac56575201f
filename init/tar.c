/* The tar format of pax (POSIX.1-2001), as far as trees need it: names of any bytes, times in nanoseconds, holes as GNU tar
 * writes them ("sparse format 1.0"). What is read here comes from the node. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "files.h"

enum { BLOCK = 512, RECORDS_MAX = 64 << 10 };
enum { NAME = 0, MODE = 100, UID = 108, GID = 116, SIZE = 124, MTIME = 136, SUM = 148, TYPE = 156, LINK = 157, MAGIC = 257 };

static char out[CHUNK], records[RECORDS_MAX];
static size_t out_used, in_start, in_end, records_used;

/* ---- bytes ----------------------------------------------------------------------------------- */

void put_flush(void) {
    check(!write_all(1, out, out_used));
    out_used = 0;
}

void put_bytes(const void *data, size_t length) {
    for (size_t some; length; length -= some, data = (const char *)data + some) {
        if (out_used == CHUNK) put_flush();
        some = length < CHUNK - out_used ? length : CHUNK - out_used;
        memcpy(out + out_used, data, some);
        out_used += some;
    }
}

void put_file(int fd, uint64_t length) {
    while (length) {
        if (out_used == CHUNK) put_flush();
        size_t room = CHUNK - out_used;
        ssize_t got = read(fd, out + out_used, length < room ? (size_t)length : room);
        if (got < 0 && errno == EINTR) continue;
        check(got >= 0);
        if (!got) finish(ESTALE); /* it was cut while we read; its size has been told */
        out_used += (size_t)got;
        length -= (uint64_t)got;
    }
}

void put_padding(uint64_t length) {
    static const char zeros[BLOCK];
    put_bytes(zeros, (BLOCK - length % BLOCK) % BLOCK);
}

static void refill(void) {
    ssize_t got;
    while ((got = read(0, chunk, CHUNK)) < 0 && errno == EINTR) {}
    check(got >= 0);
    if (!got) finish(ECANCELED);
    in_start = 0;
    in_end = (size_t)got;
}

/* What has come already, at most `length` bytes of it. */
static const char *get_some(uint64_t length, size_t *count) {
    if (in_start == in_end) refill();
    *count = length < in_end - in_start ? (size_t)length : in_end - in_start;
    const char *at = chunk + in_start;
    in_start += *count;
    return at;
}

void get_bytes(void *data, size_t length) {
    for (size_t some; length; length -= some, data = (char *)data + some) {
        const char *at = get_some(length, &some);
        memcpy(data, at, some);
    }
}

void get_file(int fd, uint64_t length) {
    for (size_t some; length; length -= some) {
        const char *at = get_some(length, &some);
        check(!write_all(fd, at, some));
    }
}

void get_padding(uint64_t length) {
    char block[BLOCK];
    get_bytes(block, (BLOCK - length % BLOCK) % BLOCK);
}

/* ---- writing members ------------------------------------------------------------------------- */

static void octal(char *to, size_t width, uint64_t value) {
    for (to[--width] = 0; width--; value >>= 3) to[width] = (char)('0' + (value & 7));
}

static unsigned sum_of(const char *block) {
    unsigned sum = 0;
    for (int i = 0; i < BLOCK; i++) sum += i >= SUM && i < TYPE ? ' ' : (unsigned char)block[i];
    return sum;
}

/* Numbers that do not fit stand in the records, and here without their upper digits. */
static void put_header(const struct member *m, char type, uint64_t size) {
    char block[BLOCK] = {0};
    strncpy(block + NAME, m->path, 100);
    octal(block + MODE, 8, m->mode & 07777);
    octal(block + UID, 8, m->uid);
    octal(block + GID, 8, m->gid);
    octal(block + SIZE, 12, size);
    octal(block + MTIME, 12, m->modified.tv_sec > 0 ? (uint64_t)m->modified.tv_sec : 0);
    block[TYPE] = type;
    strncpy(block + LINK, m->link, 100);
    memcpy(block + MAGIC, "ustar\00000", 8);
    octal(block + SUM, 7, sum_of(block));
    block[SUM + 7] = ' ';
    put_bytes(block, BLOCK);
}

/* "<length> <key>=<value>\n", where the length counts its own digits. */
static void record(const char *key, const char *value) {
    size_t rest = strlen(key) + strlen(value) + 3, total = rest;
    char digits[24];
    for (size_t width = 0; width != (size_t)snprintf(digits, sizeof digits, "%zu", total);) {
        width = strlen(digits);
        total = rest + width;
    }
    records_used += (size_t)snprintf(records + records_used, RECORDS_MAX - records_used, "%s %s=%s\n", digits, key, value);
}

static void record_number(const char *key, uint64_t value) {
    char text[24];
    snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    record(key, text);
}

static void record_time(const struct timespec *t) {
    enum { YEARS = 9000000 }; /* the sandbox may have set any; these are what 64 bits of nanoseconds hold */
    int64_t seconds = t->tv_sec / 1000 > YEARS ? YEARS * 1000LL : t->tv_sec / 1000 < -YEARS ? -YEARS * 1000LL : t->tv_sec;
    int64_t ns = seconds * 1000000000 + t->tv_nsec;
    uint64_t size = ns < 0 ? -(uint64_t)ns : (uint64_t)ns;
    char text[48];
    snprintf(text, sizeof text, "%s%llu.%09llu", ns < 0 ? "-" : "", (unsigned long long)(size / 1000000000),
             (unsigned long long)(size % 1000000000));
    record("mtime", text);
}

void put_member(const struct member *m) {
    records_used = 0;
    record("path", m->path);
    if (*m->link) record("linkpath", m->link);
    record_time(&m->modified);
    record_number("size", m->size);
    record_number("uid", m->uid);
    record_number("gid", m->gid);
    if (m->linked) record("SHOAL.linked", "1");
    if (m->sparse) {
        record("GNU.sparse.major", "1");
        record("GNU.sparse.minor", "0");
        record("GNU.sparse.name", m->path);
        record_number("GNU.sparse.realsize", m->real_size);
    }
    put_header(m, 'x', records_used);
    put_bytes(records, records_used);
    put_padding(records_used);
    put_header(m, m->type, m->size);
}

void put_end(void) {
    static const char zeros[2 * BLOCK];
    put_bytes(zeros, sizeof zeros);
    put_flush();
}

/* ---- reading members ------------------------------------------------------------------------- */

static uint64_t number(const char *field, size_t width) {
    char text[16] = {0};
    memcpy(text, field, width);
    return strtoull(text, NULL, 8);
}

static void take_text(char *to, size_t size, const char *from, size_t length) {
    length = strnlen(from, length);
    if (length >= size) finish(ENAMETOOLONG);
    memcpy(to, from, length);
    to[length] = 0;
}

static struct timespec time_of(const char *value) {
    bool before = *value == '-';
    char *dot;
    struct timespec t = {.tv_sec = strtoll(value + before, &dot, 10)};
    long scale = 100000000;
    for (const char *digit = dot + 1; *dot == '.' && *digit >= '0' && *digit <= '9' && scale; digit++, scale /= 10)
        t.tv_nsec += (*digit - '0') * scale;
    if (!before) return t;
    return t.tv_nsec ? (struct timespec){-t.tv_sec - 1, 1000000000 - t.tv_nsec} : (struct timespec){-t.tv_sec, 0};
}

static void take_record(struct member *m, const char *key, const char *value) {
    if (!strcmp(key, "path")) take_text(m->path, sizeof m->path, value, strlen(value));
    else if (!strcmp(key, "linkpath")) take_text(m->link, sizeof m->link, value, strlen(value));
    else if (!strcmp(key, "size")) m->size = strtoull(value, NULL, 10);
    else if (!strcmp(key, "uid")) m->uid = (uint32_t)strtoul(value, NULL, 10);
    else if (!strcmp(key, "gid")) m->gid = (uint32_t)strtoul(value, NULL, 10);
    else if (!strcmp(key, "mtime")) m->modified = time_of(value);
    else if (!strcmp(key, "GNU.sparse.major")) m->sparse = true;
    else if (!strcmp(key, "GNU.sparse.realsize")) m->real_size = strtoull(value, NULL, 10);
}

static void take_records(struct member *m, size_t length) {
    records[length] = 0;
    for (char *at = records, *end = records + length; at < end;) {
        char *key;
        size_t size = strtoul(at, &key, 10);
        if (*key != ' ' || size < (size_t)(key - at) + 3 || size > (size_t)(end - at) || at[size - 1] != '\n') finish(EBADMSG);
        at[size - 1] = 0;
        char *equals = strchr(++key, '=');
        if (!equals) finish(EBADMSG);
        *equals = 0;
        take_record(m, key, equals + 1);
        at += size;
    }
}

static bool get_header(char *block) {
    get_bytes(block, BLOCK);
    if (!block[NAME] && !block[MAGIC]) return false;
    if (number(block + SUM, 8) != sum_of(block) || memcmp(block + MAGIC, "ustar", 5)) finish(EBADMSG);
    return true;
}

static void take_header(struct member *m, const char *block) {
    m->type = block[TYPE];
    m->mode = (mode_t)number(block + MODE, 8) & 07777;
    m->uid = (uint32_t)number(block + UID, 8);
    m->gid = (uint32_t)number(block + GID, 8);
    m->size = number(block + SIZE, 12);
    m->modified.tv_sec = (time_t)number(block + MTIME, 12);
    take_text(m->path, sizeof m->path, block + NAME, 100);
    take_text(m->link, sizeof m->link, block + LINK, 100);
}

/* The records come before the header whose fields they replace. */
bool get_member(struct member *m) {
    char block[BLOCK];
    memset(m, 0, sizeof *m);
    if (!get_header(block)) return false;
    if (block[TYPE] == 'x') {
        uint64_t length = number(block + SIZE, 12);
        if (length >= RECORDS_MAX) finish(EBADMSG);
        get_bytes(records, length);
        get_padding(length);
        if (!get_header(block)) finish(EBADMSG);
        take_header(m, block);
        take_records(m, length);
    } else {
        take_header(m, block);
    }
    size_t end = strlen(m->path);
    while (end > 1 && m->path[end - 1] == '/') m->path[--end] = 0;
    return true;
}
