/* What the shell of a session says on its socket, handed to the node unread and in its place among the output. */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "stream.h"

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
    put_u32(payload, kills - c->oom_before);
    put_u64(payload + 4, c->child.group ? cgroup_cpu_usec(c->child.group) : 0);
    memcpy(payload + 12, c->report, c->report_length);
    send_frame(FRAME_REPORT, c->id, payload, 12 + c->report_length);
    c->oom_before = kills;
    c->report_length = 0;
    c->reported = ticks_now();
    for (int i = 0; i < 2 && !c->ended; i++) {
        c->out[i].remaining = -1;
        watch_stream(&c->out[i], c->out[i].credit > 0);
    }
}
