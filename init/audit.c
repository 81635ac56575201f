/* Answers the audited system calls of one sandbox, on the host: receives each from the kernel, writes down what it is, and
 * lets it go on or refuses it. Nothing that it reads decides anything: which call is refused was said before.
 *
 * What a pointer led to is read from the caller's memory while the caller waits. Another thread may change it before the
 * kernel reads it again, so what is written down is a hint. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "init.h"

#ifndef SECCOMP_IOCTL_NOTIF_SET_FLAGS /* Linux 6.6 */
#define SECCOMP_IOCTL_NOTIF_SET_FLAGS SECCOMP_IOW(4, __u64)
#define SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP (1UL << 0)
#endif

enum { WATCHED_MAX = 512, WATCHED_SIZE = 12, DATA_MAX = 256, PROGRAM_MAX = 256, PAGE = 4096 };
enum { RATE = 1000, BURST = 2000, RESUME = 100 }; /* records a second; calls beyond that are only counted */
enum { PATIENCE_MS = 100, GAP_MS = 200 };
enum { HEAD = 76, NO_CALL = 0xffffffff };
enum kind { ARGUMENTS, TEXT, BUFFER };

struct watched {
    uint32_t number;
    int32_t error; /* -1: it goes on */
    uint8_t kind, pointer, length;
};

struct auditor {
    int listener, socket;
    uint32_t init;
    struct watched watched[WATCHED_MAX];
    size_t count;
    uint32_t dropped;
    uint64_t tokens, refilled; /* thousandths of a record; nanoseconds */
};

/* ---- looking at the caller ------------------------------------------------------------------- */

static size_t read_memory(pid_t pid, uint64_t at, uint8_t *to, size_t size) {
    size_t first = PAGE - at % PAGE; /* what can't be read ends the transfer between two parts, not within one */
    if (first > size) first = size;
    struct iovec ours = {to, size};
    struct iovec theirs[2] = {{(void *)(uintptr_t)at, first}, {(void *)(uintptr_t)(at + first), size - first}};
    ssize_t got = process_vm_readv(pid, &ours, 1, theirs, first == size ? 1 : 2, 0);
    return got < 0 ? 0 : (size_t)got;
}

static size_t read_data(const struct watched *w, const struct seccomp_notif *n, uint8_t *to) {
    uint64_t at = n->data.args[w->pointer], size = w->kind == BUFFER ? n->data.args[w->length] : DATA_MAX;
    if (w->kind == ARGUMENTS || !at) return 0;
    if (size > DATA_MAX) size = DATA_MAX;
    size_t got = read_memory((pid_t)n->pid, at, to, size);
    return w->kind == TEXT ? strnlen((char *)to, got) : got;
}

static size_t read_program(uint32_t pid, uint8_t *to) {
    char path[32];
    snprintf(path, sizeof path, "/proc/%u/exe", pid);
    ssize_t length = readlink(path, (char *)to, PROGRAM_MAX);
    return length < 0 ? 0 : (size_t)length;
}

/* As the sandbox counts: the last number of the line. Not from its `status`, which it can make hundreds of kilobytes long. */
static uint32_t inside_pid(uint32_t pid) {
    char path[40], text[512];
    int handle = (int)syscall(SYS_pidfd_open, pid, O_EXCL); /* PIDFD_THREAD, Linux 6.9: of any thread */
    if (handle < 0) handle = (int)syscall(SYS_pidfd_open, pid, 0);
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", handle);
    int fd = handle < 0 ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (handle >= 0) close(handle);
    if (length <= 0) return 0;
    text[length] = 0;
    char *line = strstr(text, "\nNSpid:"), *end = line ? strchr(line + 1, '\n') : NULL;
    if (!end) return 0;
    *end = 0;
    char *last = strrchr(line, '\t');
    return last ? (uint32_t)strtoul(last + 1, NULL, 10) : 0;
}

/* ---- writing it down ------------------------------------------------------------------------- */

/* A node that is busy is waited for a little; the caller waits with us, and nobody else. */
static void send_record(struct auditor *a, const uint8_t *record, size_t length) {
    for (int turn = 0; turn < 2; turn++) {
        if (send(a->socket, record, length, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) {
            a->dropped = 0;
            return;
        }
        struct pollfd ready = {.fd = a->socket, .events = POLLOUT};
        if (errno != EAGAIN || poll(&ready, 1, PATIENCE_MS) <= 0) break;
    }
    a->dropped++;
}

static size_t head(const struct auditor *a, uint8_t *record, uint32_t number, uint32_t pid, bool allowed) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    memset(record, 0, HEAD);
    put_u64(record, (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec);
    put_u32(record + 8, number);
    put_u32(record + 12, pid);
    put_u32(record + 16, a->dropped);
    put_u32(record + 20, allowed);
    return HEAD;
}

static void tell(struct auditor *a, const struct watched *w, const struct seccomp_notif *n) {
    uint8_t record[HEAD + PROGRAM_MAX + DATA_MAX];
    size_t length = head(a, record, w->number, inside_pid(n->pid), w->error < 0);
    for (int i = 0; i < 6; i++) put_u64(record + 24 + 8 * i, n->data.args[i]);
    size_t program = read_program(n->pid, record + length);
    put_u32(record + 72, (uint32_t)program);
    length += program;
    length += read_data(w, n, record + length);
    /* If the caller has died its number may be another's, and so may what was read: that is no one's to see. */
    uint64_t id = n->id;
    if (!ioctl(a->listener, SECCOMP_IOCTL_NOTIF_ID_VALID, &id)) send_record(a, record, length);
}

static void tell_gap(struct auditor *a) {
    uint8_t record[HEAD];
    if (a->dropped) send_record(a, record, head(a, record, NO_CALL, 0, true));
}

/* ---- answering ------------------------------------------------------------------------------- */

static bool take_token(struct auditor *a) {
    uint64_t now = now_ns(), gained = (now - a->refilled) / (1000000000u / RATE / 1000);
    if (gained) {
        a->refilled = now;
        a->tokens = a->tokens + gained > BURST * 1000 ? BURST * 1000 : a->tokens + gained;
    }
    /* Once something is missing, a few are missing together: else every second record would be one of a gap. */
    if (a->tokens < (a->dropped ? RESUME * 1000u : 1000u)) return false;
    a->tokens -= 1000;
    return true;
}

static const struct watched *find(const struct auditor *a, uint32_t number) {
    for (size_t i = 0; i < a->count; i++)
        if (a->watched[i].number == number) return &a->watched[i];
    return NULL;
}

static bool answer(struct auditor *a) {
    struct seccomp_notif n;
    memset(&n, 0, sizeof n);
    if (ioctl(a->listener, SECCOMP_IOCTL_NOTIF_RECV, &n)) return errno == EINTR || errno == ENOENT;
    const struct watched *w = find(a, (uint32_t)n.data.nr);
    if (w && n.pid != a->init) {
        if (take_token(a)) tell(a, w, &n);
        else a->dropped++;
    }
    struct seccomp_notif_resp r = {.id = n.id};
    if (!w) r.error = -ENOSYS;
    else if (w->error < 0) r.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
    else r.error = -w->error;
    ioctl(a->listener, SECCOMP_IOCTL_NOTIF_SEND, &r); /* ENOENT: it was killed meanwhile */
    return true;
}

/* ---- */

static int take_table(struct auditor *a) {
    static uint8_t table[WATCHED_MAX * WATCHED_SIZE];
    ssize_t length = recv(a->socket, table, sizeof table, 0);
    if (length <= 0 || length % WATCHED_SIZE) return -1;
    for (const uint8_t *at = table; at < table + length; at += WATCHED_SIZE) {
        struct watched w = {get_u32(at), (int32_t)get_u32(at + 4), at[8], at[9], at[10]};
        if (w.pointer > 5 || w.length > 5) return -1;
        a->watched[a->count++] = w;
    }
    return 0;
}

/* Keeps what is needed to look at processes of other users. An ordinary user has no capability to begin with. */
static void drop_capabilities(void) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{1u << CAP_SYS_PTRACE, 1u << CAP_SYS_PTRACE, 0}, {0, 0, 0}};
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    syscall(SYS_capset, &header, data);
}

int audit_main(int listener, int socket, uint32_t init) {
    static struct auditor a;
    a = (struct auditor){.listener = listener, .socket = socket, .init = init, .tokens = BURST * 1000, .refilled = now_ns()};
    prctl(PR_SET_NAME, "shoal-audit");
    close_from(socket + 1); /* what the node's own parent forgot to close; ours are the two before */
    if (take_table(&a)) return 1;
    drop_capabilities();
    ioctl(listener, SECCOMP_IOCTL_NOTIF_SET_FLAGS, SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP); /* faster, where there is it */
    for (;;) {
        struct pollfd ready[] = {{.fd = listener, .events = POLLIN}, {.fd = socket, .events = 0}};
        int count = poll(ready, 2, a.dropped ? GAP_MS : -1);
        if (count < 0 && errno != EINTR) return 1;
        if (count == 0) tell_gap(&a);
        if (count <= 0) continue;
        if (ready[0].revents & POLLIN && !answer(&a)) return 1;
        if ((ready[0].revents & (POLLHUP | POLLERR)) || ready[1].revents) break; /* the sandbox or the node is gone */
    }
    tell_gap(&a);
    return 0;
}
