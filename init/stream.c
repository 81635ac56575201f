/* The bytes of commands: their output to the node within the credit it granted, its input to them. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "stream.h"

struct pid1 self;

/* ---- frames to the node ---------------------------------------------------------------------- */

void watch(int operation, int fd, uint32_t events, struct source *source) {
    struct epoll_event event = {.events = events, .data.ptr = source};
    epoll_ctl(self.epoll, operation, fd, &event);
}

/* Embedded: a sandbox ends with its node. Everything in this PID namespace dies with us. */
_Noreturn void node_is_gone(void) { _exit(0); }

static void close_conduit(void) {
    if (self.conduit.out < 0) return;
    close(self.conduit.out);
    close(self.conduit.in);
    self.conduit = (struct conduit){-1, -1, 0, 0};
}

static bool output_waits(void) { return buffer_length(&self.output) || self.conduit.waiting; }

static ssize_t flush_buffer(void) {
    struct conduit *c = &self.conduit;
    size_t length = c->waiting ? c->before : buffer_length(&self.output);
    ssize_t done = send(self.in.channel, self.output.data + self.output.start, length, MSG_NOSIGNAL);
    if (done <= 0) return done;
    if (c->waiting) c->before -= (size_t)done;
    buffer_consume(&self.output, (size_t)done);
    return done;
}

/* Pages that can't be moved are copied after all, ahead of the frames that were made since. The sandbox chose the pages:
 * what of them can't even be read becomes zeros, for the header has promised so many bytes. */
static ssize_t take_back(void) {
    struct conduit *c = &self.conduit;
    size_t rest = buffer_length(&self.output);
    buffer_reserve(&self.output, c->waiting);
    uint8_t *at = self.output.data + self.output.start;
    memmove(at + c->waiting, at, rest);
    memset(at, 0, c->waiting);
    for (size_t have = 0; have < c->waiting;) {
        ssize_t got = read(c->out, at + have, c->waiting - have);
        if (got <= 0) break;
        have += (size_t)got;
    }
    self.output.end += c->waiting;
    close_conduit();
    return 1;
}

static ssize_t flush_conduit(void) {
    struct conduit *c = &self.conduit;
    ssize_t done = splice(c->out, NULL, self.in.channel, NULL, c->waiting, SPLICE_F_NONBLOCK | SPLICE_F_MOVE);
    if (done > 0) c->waiting -= (size_t)done;
    if (done < 0 && errno != EAGAIN && errno != EINTR && errno != EPIPE && errno != ECONNRESET) return take_back();
    return done;
}

void flush_output(void) {
    while (output_waits()) {
        ssize_t done = self.conduit.waiting && !self.conduit.before ? flush_conduit() : flush_buffer();
        if (done < 0 && errno == EINTR) continue;
        if (done < 0 && errno != EAGAIN) node_is_gone();
        if (done <= 0) break;
    }
    bool wanted = output_waits();
    if (wanted == self.channel_writable_watched) return;
    self.channel_writable_watched = wanted;
    watch(EPOLL_CTL_MOD, self.in.channel, EPOLLIN | (wanted ? EPOLLOUT : 0u), &self.channel_source);
}

/* More of it may be made of what commands write. */
static bool has_room(void) { return buffer_length(&self.output) <= BACKLOG_MAX && !self.conduit.waiting; }

static void seal_frame(uint8_t *at, enum frame_kind kind, int stream, uint32_t id, size_t length) {
    struct frame f = {(uint32_t)length, (uint8_t)kind, (uint8_t)stream, id, self.sent++};
    frame_encode(&f, at);
    self.output.end += FRAME_HEADER + length;
}

void send_frame(enum frame_kind kind, uint32_t id, const void *payload, size_t length) {
    uint8_t *at = buffer_reserve(&self.output, FRAME_HEADER + length);
    if (length) memcpy(at + FRAME_HEADER, payload, length);
    seal_frame(at, kind, 0, id, length);
}

void send_pair(enum frame_kind kind, uint32_t id, uint32_t first, uint32_t second) {
    uint8_t payload[8];
    put_u32(payload, first);
    put_u32(payload + 4, second);
    send_frame(kind, id, payload, sizeof payload);
}

/* ---- a command's output ---------------------------------------------------------------------- */

void watch_stream(struct stream *s, bool wanted) {
    if (s->fd < 0 || s->watched == wanted) return;
    s->watched = wanted;
    watch(wanted ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, s->fd, EPOLLIN, &s->source);
}

static void close_stream(struct stream *s) {
    if (s->fd < 0) return;
    watch_stream(s, false);
    close(s->fd);
    s->fd = -1;
}

bool drained(const struct stream *s) { return s->fd < 0 || s->remaining == 0; }

void close_input(struct command *c) {
    if (c->child.in < 0) return;
    if (c->input_watched) watch(EPOLL_CTL_DEL, c->child.in, 0, NULL);
    c->input_watched = false;
    close(c->child.in);
    c->child.in = -1;
    free(c->pending.data);
    c->pending = (struct buffer){0};
}

void mark_written(struct command *c) {
    for (int i = 0; i < 2; i++) {
        int waiting = 0;
        if (c->out[i].fd >= 0 && ioctl(c->out[i].fd, FIONREAD, &waiting)) waiting = 0;
        c->out[i].remaining = waiting;
    }
}

static void forget(struct command *c) {
    struct command **at = &self.commands;
    while (*at != c) at = &(*at)->next;
    *at = c->next;
    self.count--;
    if (!self.count && !self.conduit.waiting) close_conduit();
    if (c->told) self.lingering--;
    close_reports(c);
    free(c->pending.data);
    free(c);
}

/* The oldest whose pipes somebody still holds: whoever writes to them gets SIGPIPE from now on. */
static void forget_oldest(void) {
    struct command *oldest = NULL;
    for (struct command *c = self.commands; c; c = c->next)
        if (c->told) oldest = c;
    for (int i = 0; i < 2; i++) close_stream(&oldest->out[i]);
    forget(oldest);
}

void limit_lingering(void) {
    while (self.lingering > LINGERING_MAX) forget_oldest();
}

static void send_exit(const struct command *c) {
    uint8_t payload[36];
    put_u32(payload, (uint32_t)c->status);
    put_u32(payload + 4, c->oom_kills);
    put_u64(payload + 8, c->duration);
    put_u64(payload + 16, c->cpu);
    put_u64(payload + 24, (uint64_t)c->usage.ru_maxrss * 1024);
    put_u32(payload + 32, c->refused_processes);
    send_frame(FRAME_EXIT, c->id, payload, sizeof payload);
}

static void mark_told(struct command *c) {
    c->told = true;
    self.lingering++;
    cgroup_release(&c->child);
}

/* Tells the node once the command is dead and what it had written is on its way. Background children may hold the pipes
 * for ever; they are read on and thrown away, so that writing does not kill them. */
void conclude(struct command *c) {
    if (c->report_length && drained(&c->out[0]) && drained(&c->out[1])) tell_report(c);
    if (!c->ended) return;
    if (!c->told && c->refused) {
        for (int i = 0; i < 2; i++) close_stream(&c->out[i]);
        send_pair(FRAME_REFUSED, c->id, (uint32_t)c->refused, c->refused_step);
        mark_told(c);
    } else if (!c->told && drained(&c->out[0]) && drained(&c->out[1])) {
        send_exit(c);
        mark_told(c);
        for (int i = 0; i < 2; i++) watch_stream(&c->out[i], true);
    }
    if (c->told && c->out[0].fd < 0 && c->out[1].fd < 0) forget(c);
}

static void discard(struct stream *s) {
    static char nothing[FRAME_DATA_MAX];
    ssize_t got = read(s->fd, nothing, sizeof nothing);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) close_stream(s);
}

/* A pipe of its own, since from the command's own pipe others could take bytes that a header has promised. */
static bool open_conduit(void) {
    struct conduit *c = &self.conduit;
    int ends[2];
    if (c->out >= 0) return true;
    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK)) return false;
    *c = (struct conduit){.out = ends[0], .in = ends[1]};
    fcntl(c->in, F_SETPIPE_SZ, MOVED_MAX); /* if it may not be so large, less is moved at a time */
    return true;
}

/* As read(2) into a frame that is sealed. */
static ssize_t move_output(struct stream *s, size_t most) {
    ssize_t got = splice(s->fd, NULL, self.conduit.in, NULL, most, SPLICE_F_NONBLOCK | SPLICE_F_MOVE);
    if (got <= 0) return got;
    struct frame f = {(uint32_t)got, FRAME_OUTPUT, (uint8_t)s->source.stream, s->source.command->id, self.sent++};
    frame_encode(&f, buffer_reserve(&self.output, FRAME_HEADER));
    self.output.end += FRAME_HEADER;
    self.conduit.before = buffer_length(&self.output);
    self.conduit.waiting = (size_t)got;
    return got;
}

static ssize_t copy_output(struct stream *s, size_t most) {
    if (most > FRAME_DATA_MAX) most = FRAME_DATA_MAX;
    uint8_t *at = buffer_reserve(&self.output, FRAME_HEADER + most);
    ssize_t got = read(s->fd, at + FRAME_HEADER, most);
    if (got > 0) seal_frame(at, FRAME_OUTPUT, s->source.stream, s->source.command->id, (size_t)got);
    if (got >= BUSY && !s->busy) {
        s->busy = true;
        fcntl(s->fd, F_SETPIPE_SZ, MOVED_MAX);
    }
    return got;
}

static size_t readable(const struct stream *s) {
    size_t most = MOVED_MAX;
    if (s->credit < most) most = s->credit;
    if (s->remaining >= 0 && (uint64_t)s->remaining < most) most = (size_t)s->remaining;
    return most;
}

void pump(struct stream *s) {
    struct command *c = s->source.command;
    if (s->fd < 0) return;
    if (c->told) {
        discard(s);
        return;
    }
    size_t most = readable(s);
    if (!most || !has_room()) {
        self.stalled |= most > 0;
        watch_stream(s, false);
        return;
    }
    ssize_t got = s->busy && open_conduit() ? move_output(s, most) : copy_output(s, most);
    if (got > 0) {
        s->credit -= (uint32_t)got;
        if (s->remaining > 0) s->remaining -= got;
    } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
        close_stream(s); /* EIO is the end of a terminal */
    } else if (s->remaining > 0) {
        s->remaining = 0; /* somebody else took it */
    }
}

/* Reads what is left of a command that has ended or reported, as far as the node has room for it. */
void drain(struct command *c) {
    for (int i = 0; i < 2; i++) {
        struct stream *s = &c->out[i];
        while (!c->told && !drained(s) && s->credit && has_room()) pump(s);
        self.stalled |= !drained(s) && !has_room();
    }
    conclude(c);
}

/* Streams that waited for room in the channel may go on. */
void resume_streams(void) {
    if (!self.stalled || self.conduit.waiting || buffer_length(&self.output) > BACKLOG_MAX / 2) return;
    self.stalled = false;
    for (struct command *c = self.commands, *next; c; c = next) {
        next = c->next;
        for (int i = 0; i < 2; i++) watch_stream(&c->out[i], c->out[i].credit > 0 || c->told);
        /* What was in the pipe may be gone by now, and then nothing would ever wake us for it. */
        if ((c->ended && !c->told) || c->report_length) drain(c);
    }
}

/* ---- a command's input ----------------------------------------------------------------------- */

void send_taken(const struct command *c, size_t length) {
    uint8_t count[4];
    put_u32(count, (uint32_t)length);
    send_frame(FRAME_TAKEN, c->id, count, sizeof count);
}

void feed(struct command *c) {
    size_t taken = 0;
    while (c->child.in >= 0 && buffer_length(&c->pending)) {
        ssize_t done = write(c->child.in, c->pending.data + c->pending.start, buffer_length(&c->pending));
        if (done < 0 && errno == EINTR) continue;
        if (done < 0 && errno == EAGAIN) break;
        if (done < 0) { /* it closed its stdin: what is sent is taken and lost, as in any pipe */
            taken += buffer_length(&c->pending);
            close_input(c);
            break;
        }
        buffer_consume(&c->pending, (size_t)done);
        taken += (size_t)done;
    }
    if (taken) send_taken(c, taken);
    if (c->child.in < 0) return;
    bool waiting = buffer_length(&c->pending) > 0;
    if (!waiting && c->close_input) {
        close_input(c);
        return;
    }
    if (waiting != c->input_watched) watch(waiting ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, c->child.in, EPOLLOUT, &c->input);
    c->input_watched = waiting;
}
