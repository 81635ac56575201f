/* What the shell of a session says on its socket, handed to the node unread and in its place among the output. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "stream.h"

/* ---- reports --------------------------------------------------------------------------------- */

/* One report at a time is on its way to the node: a shell that says more waits, as it would for a full pipe. */
void expect_report(struct command *c) {
    if (c->child.reports >= 0 && !c->report_length) watch(EPOLL_CTL_ADD, c->child.reports, EPOLLIN, &c->reports);
}

void close_reports(struct command *c) {
    if (c->child.reports >= 0) close(c->child.reports);
    c->child.reports = -1;
}

/* Bytes that the shell itself wrote; 0 for another's, who came by the descriptor; -1 when nobody can write any more. A
 * process without CAP_SYS_ADMIN, and nobody inside has it, can't give itself out for another one. */
static ssize_t receive(struct command *c) {
    union {
        struct cmsghdr header;
        uint8_t room[CMSG_SPACE(sizeof(struct ucred))];
    } control;
    struct iovec part = {c->report, sizeof c->report};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t got = recvmsg(c->child.reports, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0) return errno == EAGAIN || errno == EINTR ? 0 : -1;
    if (got == 0) return -1;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (!header || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_CREDENTIALS) return 0;
    struct ucred writer;
    memcpy(&writer, CMSG_DATA(header), sizeof writer);
    return writer.pid == c->child.pid ? got : 0;
}

void take_report(struct command *c) {
    ssize_t got = receive(c);
    if (got < 0) close_reports(c); /* it became another program; its end will be told */
    if (got <= 0) return;
    c->report_length = (size_t)got;
    watch(EPOLL_CTL_DEL, c->child.reports, 0, NULL);
    mark_written(c);
    drain(c);
}

void tell_report(struct command *c) {
    uint8_t payload[12 + REPORT_MAX];
    uint32_t kills = oom_kills(&self.in);
    put_u32(payload, kills - c->before.oom_kills);
    put_u64(payload + 4, c->child.group ? cgroup_cpu_usec(c->child.group) : 0);
    memcpy(payload + 12, c->report, c->report_length);
    send_frame(FRAME_REPORT, c->id, payload, 12 + c->report_length);
    c->before.oom_kills = kills;
    c->report_length = 0;
    for (int i = 0; i < 2 && !c->ended; i++) {
        c->out[i].remaining = -1;
        watch_stream(&c->out[i], c->out[i].credit > 0);
    }
}

/* ---- what a command whose time is up has started ------------------------------------------------ */

/* The number that was given to a process last, in our PID namespace. (The last word of /proc/loadavg says it too, but that
 * file is covered by one that shows nothing of the machine.) */
static pid_t last_pid(void) {
    char text[32];
    int fd = open("/proc/sys/kernel/ns_last_pid", O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (length <= 0) return 0;
    text[length] = 0;
    return (pid_t)strtol(text, NULL, 10);
}

void mark_sent(struct command *c) {
    struct timespec now;
    if (c->child.reports < 0) return;
    clock_gettime(CLOCK_BOOTTIME, &now);
    uint64_t a_second = (uint64_t)sysconf(_SC_CLK_TCK);
    c->sent.ticks = (uint64_t)now.tv_sec * a_second + (uint64_t)now.tv_nsec * a_second / 1000000000u;
    c->sent.last_pid = last_pid();
}

static bool is_older(pid_t pid, const struct moment *than) {
    uint64_t start = stat_field(pid, STAT_START);
    return start < than->ticks || (start == than->ticks && pid <= than->last_pid);
}

/* A job of an earlier command stays, and so does what that has started since. */
static bool is_newer(pid_t pid, const struct command *c) {
    for (int depth = 0; pid > 1 && pid != c->child.pid && depth < 4096; depth++, pid = (pid_t)stat_field(pid, STAT_PARENT))
        if (is_older(pid, &c->sent)) return false;
    return true;
}

static bool kill_if_newer(pid_t pid, const struct command *c) {
    return pid > 1 && pid != c->child.pid && is_newer(pid, c) && !kill(pid, SIGKILL);
}

static size_t kill_newer_members(const struct command *c) {
    static char text[64 << 10];
    size_t length = 0, killed = 0;
    int fd = openat(c->child.group->dir, "cgroup.procs", O_RDONLY | O_CLOEXEC);
    for (ssize_t got; fd >= 0 && (got = read(fd, text + length, sizeof text - 1 - length)) > 0;) length += (size_t)got;
    if (fd >= 0) close(fd);
    text[length] = 0;
    for (char *at = text, *end; *at; at = *end ? end + 1 : end) killed += kill_if_newer((pid_t)strtol(at, &end, 10), c);
    return killed;
}

static size_t kill_newer_descendants(const struct command *c) {
    size_t killed = 0;
    for (pid_t pid = 2, missing = 0; pid < 1 << 22 && missing < 4096; pid++) {
        if (kill(pid, 0) && errno == ESRCH) missing++;
        else missing = 0;
        if (!missing && descends(pid, c->child.pid)) killed += kill_if_newer(pid, c);
    }
    return killed;
}

void kill_newer(const struct command *c) {
    enum { ROUNDS = 4 }; /* one that forks meanwhile may get away; the node asks again, and in the end for everything */
    for (int round = 0; round < ROUNDS; round++)
        if (!(c->child.group ? kill_newer_members(c) : kill_newer_descendants(c))) return;
}
