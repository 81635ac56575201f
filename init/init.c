/* PID 1 of a sandbox: one loop that starts commands, moves their bytes, reaps, and never ends by an error of theirs. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "stream.h"

/* ---- frames from the node -------------------------------------------------------------------- */

static struct command *find(uint32_t id) {
    for (struct command *c = self.commands; c; c = c->next)
        if (c->id == id && !c->told) return c;
    return NULL;
}

static void adopt(uint32_t id, const struct child *child, const struct request *q, uint64_t started, struct counts before) {
    struct command *c = allocate(sizeof *c);
    uint32_t window = q->window;
    *c = (struct command){.id = id, .child = *child, .started = started, .before = before, .next = self.commands};
    c->input = (struct source){.kind = INPUT, .command = c};
    c->starting = (struct source){.kind = STARTED, .command = c};
    c->reports = (struct source){.kind = REPORTS, .command = c};
    c->report_pid = q->flags & REPORT_PID;
    c->ours = q->operation > 0;
    expect_report(c);
    if (c->report_pid) watch(EPOLL_CTL_ADD, c->child.started, EPOLLIN, &c->starting);
    for (int i = 0; i < 2; i++) {
        int fd = i ? child->err : child->out;
        c->out[i] = (struct stream){.fd = fd, .credit = window, .remaining = -1, .source = {OUTPUT, i + 1, c}};
        watch_stream(&c->out[i], window > 0);
    }
    self.commands = c;
    self.count++;
}

/* Until the spawner's tree is gone, "/.." leads into it: a sandbox for which that fails must not run anything. */
static void finish_letting_go(void) {
    int status;
    if (self.in.letting_go <= 0) return;
    pid_t pid = waitpid(self.in.letting_go, &status, 0);
    if (pid != self.in.letting_go || status) _exit(1);
    self.in.letting_go = 0;
}

static void start(const struct frame *f, const uint8_t *payload, bool file) {
    struct request q;
    struct child child;
    enum spawn_step step = STEP_REQUEST;
    finish_letting_go();
    uint64_t started = now_ns();
    struct counts before = {oom_kills(&self.in), refused_processes(&self.in)};
    int error = !request_decode(&q, f, payload, file) ? EBADMSG : self.count >= COMMANDS_MAX ? EAGAIN : 0;
    if (!error) error = spawn(&self.in, &q, &child, &step);
    if (error) {
        send_pair(FRAME_REFUSED, f->id, (uint32_t)error, step);
    } else {
        adopt(f->id, &child, &q, started, before);
    }
    request_free(&q);
}

/* It has become the program, or failed to. Closing the descriptor would not take it out of epoll while a child that was
 * forked since has yet to exec: an event would then point to a command that is no more. */
static void learn_start(struct command *c) {
    if (c->child.started < 0) return;
    if (c->report_pid) watch(EPOLL_CTL_DEL, c->child.started, 0, NULL);
    if (spawn_failed(&c->child, &c->refused_step, &c->refused) || !c->report_pid) return;
    uint8_t pid[4];
    put_u32(pid, (uint32_t)c->child.pid);
    send_frame(FRAME_STARTED, c->id, pid, sizeof pid);
}

static void take_input(struct command *c, const uint8_t *payload, size_t length) {
    if (c->child.in < 0) { /* it closed its stdin */
        if (length) send_taken(c, length);
        return;
    }
    if (!length) c->close_input = true;
    mark_sent(c);
    if (length) {
        memcpy(buffer_reserve(&c->pending, length), payload, length);
        c->pending.end += length;
    }
    feed(c);
}

/* Of a large input only the beginning is received here; the rest goes from the socket into the pipe page by page. Not for
 * commands: one could keep the pages in pipes of its own, where nobody accounts for them. */
static bool begin_inflow(const struct frame *f, const uint8_t *payload, size_t have) {
    struct command *c = f->kind == FRAME_INPUT ? find(f->id) : NULL;
    if (!c || !c->ours || c->child.in < 0) return false;
    if (have) take_input(c, payload, have);
    if (c->child.in >= 0) fcntl(c->child.in, F_SETPIPE_SZ, INFLOW_MAX);
    self.inflow = (struct inflow){f->id, f->length - have, 0};
    return true;
}

static ssize_t move_input(struct command *c) {
    if (!c || c->child.in < 0 || buffer_length(&c->pending)) return -1;
    ssize_t got = splice(self.in.channel, NULL, c->child.in, NULL, self.inflow.left, SPLICE_F_NONBLOCK | SPLICE_F_MOVE);
    if (got > 0) self.inflow.moved += (size_t)got;
    return got;
}

/* What can't be moved because the pipe is full, waits in memory within the window; what nobody reads any more is dropped. */
static ssize_t copy_input(struct command *c) {
    static uint8_t piece[FRAME_DATA_MAX];
    size_t most = self.inflow.left < sizeof piece ? self.inflow.left : sizeof piece;
    ssize_t got = recv(self.in.channel, piece, most, 0);
    if (got > 0 && c) take_input(c, piece, (size_t)got);
    return got;
}

static void continue_inflow(void) {
    struct command *c = find(self.inflow.id);
    ssize_t got = move_input(c);
    if (got <= 0) got = copy_input(c);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) node_is_gone();
    self.inflow.left -= (size_t)got;
    if (self.inflow.left || !self.inflow.moved) return;
    if (c) send_taken(c, self.inflow.moved);
    self.inflow.moved = 0;
}

static void take_signal(struct command *c, const uint8_t *payload, size_t length) {
    if (length != 8 || c->ended) return;
    int signal = (int)get_u32(payload);
    c->killed |= signal == SIGKILL;
    switch (get_u32(payload + 4)) {
    case 0: kill(-c->child.pid, signal); break;
    case 1: kill_tree(&c->child, signal); break;
    default:
        kill(c->child.pid, signal);
        kill_newer(c);
    }
}

static void take_credit(struct command *c, int stream, const uint8_t *payload, size_t length) {
    if (length != 4) return;
    if (stream < 1) {
        expect_report(c);
        return;
    }
    struct stream *s = &c->out[stream - 1];
    s->credit += get_u32(payload);
    watch_stream(s, s->credit > 0);
    if (c->ended || c->report_length) drain(c);
}

static void resize(const struct command *c, const uint8_t *payload, size_t length) {
    if (length != 8 || c->child.in < 0) return;
    struct winsize size = {.ws_row = (unsigned short)get_u32(payload), .ws_col = (unsigned short)get_u32(payload + 4)};
    ioctl(c->child.in, TIOCSWINSZ, &size);
}

static void narrow(const struct frame *f, const uint8_t *payload) {
    struct reader r = {payload, payload + f->length, false};
    size_t count;
    char **paths = read_list(&r, &count);
    if (r.bad || (count && enter_domain(paths, count))) node_is_gone(); /* it must not go on wider than was asked for */
    free(paths);
}

static void handle(const struct frame *f, const uint8_t *payload) {
    if (f->kind == FRAME_SPAWN || f->kind == FRAME_FILE) {
        start(f, payload, f->kind == FRAME_FILE);
        return;
    }
    if (f->kind == FRAME_NARROW) {
        narrow(f, payload);
        return;
    }
    struct command *c = find(f->id);
    if (!c) return; /* it has just ended; the node will learn that from its EXIT */
    switch (f->kind) {
    case FRAME_INPUT: take_input(c, payload, f->length); break;
    case FRAME_SIGNAL: take_signal(c, payload, f->length); break;
    case FRAME_CREDIT: take_credit(c, f->stream, payload, f->length); break;
    case FRAME_RESIZE: resize(c, payload, f->length); break;
    default: break;
    }
}

/* From now on file operations see the tree that came along: the one of commands is about to be narrowed. */
static void take_view(struct msghdr *message) {
    int fd;
    struct cmsghdr *header = CMSG_FIRSTHDR(message);
    if (!header || header->cmsg_type != SCM_RIGHTS || header->cmsg_len != CMSG_LEN(sizeof fd)) return;
    memcpy(&fd, CMSG_DATA(header), sizeof fd);
    if (self.in.view >= 0) close(self.in.view);
    self.in.view = fd;
}

static ssize_t receive_bytes(uint8_t *at, size_t length) {
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = {at, length};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t got = recvmsg(self.in.channel, &message, MSG_CMSG_CLOEXEC);
    if (got > 0 && message.msg_controllen) take_view(&message);
    return got;
}

static void receive(void) {
    enum { STEP = 4096 };
    if (self.inflow.left) {
        continue_inflow();
        return;
    }
    struct frame f;
    size_t wanted = STEP;
    if (frame_decode(&f, self.input.data + self.input.start, buffer_length(&self.input)) == FRAME_PARTIAL &&
        buffer_length(&self.input) >= FRAME_HEADER)
        wanted = FRAME_HEADER + f.length - buffer_length(&self.input);
    uint8_t *at = buffer_reserve(&self.input, wanted);
    ssize_t got = receive_bytes(at, wanted);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) node_is_gone();
    self.input.end += (size_t)got;
    for (;;) {
        const uint8_t *data = self.input.data + self.input.start;
        enum frame_status status = frame_decode(&f, data, buffer_length(&self.input));
        if (status == FRAME_MALFORMED) node_is_gone();
        size_t have = buffer_length(&self.input);
        if (status == FRAME_PARTIAL && have >= FRAME_HEADER && begin_inflow(&f, data + FRAME_HEADER, have - FRAME_HEADER))
            buffer_consume(&self.input, have);
        if (status == FRAME_PARTIAL) return;
        handle(&f, data + FRAME_HEADER);
        buffer_consume(&self.input, FRAME_HEADER + f.length);
    }
}

/* ---- deaths ---------------------------------------------------------------------------------- */

/* The kernel counts OOM kills for the whole sandbox. One of them was of this command, if it or, by a shell's word, its
 * child died of SIGKILL and not by the node: that one is not counted for those that run beside it. A kill which nobody
 * can be told to have suffered counts for all that ran then. */
static void claim_oom_kills(struct command *c) {
    uint32_t total = oom_kills(&self.in);
    c->oom_kills = total - c->before.oom_kills;
    bool killed = WIFSIGNALED(c->status) ? WTERMSIG(c->status) == SIGKILL : WEXITSTATUS(c->status) == 128 + SIGKILL;
    if (!c->oom_kills || !killed || c->killed) return;
    for (struct command *other = self.commands; other; other = other->next)
        if (!other->ended && other->before.oom_kills < total) other->before.oom_kills++;
}

static void command_ended(struct command *c, int status, const struct rusage *usage) {
    learn_start(c);
    c->ended = true;
    c->status = status;
    c->usage = *usage;
    c->duration = now_ns() - c->started;
    struct timeval u = usage->ru_utime, k = usage->ru_stime;
    c->cpu = c->child.group ? cgroup_cpu_usec(c->child.group) : (uint64_t)(u.tv_sec + k.tv_sec) * 1000000u + (uint64_t)(u.tv_usec + k.tv_usec);
    claim_oom_kills(c);
    c->refused_processes = status ? refused_processes(&self.in) - c->before.refused_processes : 0;
    close_input(c);
    close_reports(c);
    mark_written(c);
    /* A terminal whose last user has gone may still hold a line that FIONREAD does not count: read to its end. */
    if (c->out[0].fd >= 0 && isatty(c->out[0].fd)) c->out[0].remaining = INT32_MAX;
    drain(c);
}

static void reap(void) {
    struct signalfd_siginfo info;
    while (read(self.signals, &info, sizeof info) > 0) {}
    finish_letting_go();
    int status;
    struct rusage usage;
    for (pid_t pid; (pid = wait4(-1, &status, WNOHANG, &usage)) > 0;) {
        struct command *c = self.commands;
        while (c && !(c->child.pid == pid && !c->ended)) c = c->next;
        if (c) command_ended(c, status, &usage);
    }
}

/* ---- the loop -------------------------------------------------------------------------------- */

static void dispatch(struct source *source, uint32_t events) {
    switch (source->kind) {
    case CHANNEL:
        if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive();
        break;
    case SIGNALS: reap(); break;
    case INPUT: feed(source->command); break;
    case STARTED: learn_start(source->command); break;
    case REPORTS: take_report(source->command); break;
    case OUTPUT:
        pump(&source->command->out[source->stream - 1]);
        conclude(source->command); /* may free it */
        break;
    }
}

_Noreturn static void loop(void) {
    for (;;) {
        /* One event a turn: handling one may free the command that the next would point to. */
        struct epoll_event event;
        if (epoll_wait(self.epoll, &event, 1, -1) == 1) dispatch(event.data.ptr, event.events);
        flush_output();
        resume_streams();
        limit_lingering();
    }
}

static void prepare_loop(const struct inside *in) {
    self.in = *in;
    self.conduit.in = self.conduit.out = -1;
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    self.signals = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    self.epoll = epoll_create1(EPOLL_CLOEXEC);
    if (self.signals < 0 || self.epoll < 0) _exit(1);
    self.channel_source.kind = CHANNEL;
    self.signal_source.kind = SIGNALS;
    fcntl(self.in.channel, F_SETFL, O_NONBLOCK);
    watch(EPOLL_CTL_ADD, self.in.channel, EPOLLIN, &self.channel_source);
    watch(EPOLL_CTL_ADD, self.signals, EPOLLIN, &self.signal_source);
}

/* Without the loop's buffers: an idle sandbox should not have touched any. */
static void report_ready(int channel) {
    struct frame f = {0, FRAME_READY, 0, 0, self.sent++};
    uint8_t header[FRAME_HEADER];
    frame_encode(&f, header);
    if (write_all(channel, header, sizeof header)) node_is_gone();
}

static void report_failure(const struct setup *s, int error) {
    uint8_t payload[8 + sizeof s->detail];
    size_t detail = strlen(s->detail);
    put_u32(payload, s->step);
    put_u32(payload + 4, (uint32_t)error);
    memcpy(payload + 8, s->detail, detail);
    struct frame f = {(uint32_t)(8 + detail), FRAME_FAILED, 0, 0, 0};
    uint8_t header[FRAME_HEADER];
    frame_encode(&f, header);
    if (!write_all(s->inside.channel, header, sizeof header)) write_all(s->inside.channel, payload, 8 + detail);
}

/* Moves the descriptors that PID 1 needs out of the way and closes the spawner's, which we have copies of. */
static void keep_only(struct inside *in) {
    int *wanted[7 + 8] = {&in->channel, &in->commands_dir, &in->oom_events, &in->process_events, &in->null, &in->terminals, &in->view};
    size_t count = 7;
    for (size_t i = 0; i < in->join_count; i++) wanted[count++] = &in->join[i];
    enum { ASIDE = 64 }; /* above those that we end with */
    for (size_t i = 0; i < count; i++)
        if (*wanted[i] >= 0) *wanted[i] = fcntl(*wanted[i], F_DUPFD_CLOEXEC, ASIDE);
    int next = 0;
    while (next < 3) dup3(in->channel, next++, O_CLOEXEC); /* a command's pipes must not get these numbers */
    for (size_t i = 0; i < count; i++)
        if (*wanted[i] >= 0) *wanted[i] = dup3(*wanted[i], next++, O_CLOEXEC);
    close_from(next);
}

_Noreturn void init_main(struct setup *s) {
    prctl(PR_SET_NAME, "shoal-init");
    const struct inside *planned = &s->inside;
    /* No limit, which the quota is: where the kernel refuses, since a processor has gone, all of them will do. */
    if (planned->processors) syscall(SYS_sched_setaffinity, 0, planned->processors_length, planned->processors);
    int error = setup_run(s);
    /* After the last change of credentials, which would undo it. From here on nobody inside can trace us or look into
     * our memory, descriptors or root: we never exec, so our memory belongs to the host's user namespace. */
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    if (error) {
        report_failure(s, error);
        _exit(1);
    }
    struct inside in = s->inside;
    keep_only(&in);
    report_ready(in.channel);
    prepare_loop(&in);
    spawner_forget();
    loop();
}

int main(int argc, char **argv) {
    if (argc == 5 && !strcmp(argv[1], "audit")) return audit_main(atoi(argv[2]), atoi(argv[3]), (uint32_t)atoi(argv[4]));
    if (argc < 4 || strcmp(argv[1], "spawner")) {
        fputs("This is a part of Shoal; it is started by it and not by hand.\n", stderr);
        return 2;
    }
    return spawner_main(atoi(argv[2]), atoi(argv[3]), argv + 4);
}
