/* What PID 1 keeps of its commands, and the movement of their bytes (stream.c). */
#ifndef SHOAL_STREAM_H
#define SHOAL_STREAM_H

#include <sys/resource.h>

#include "init.h"

/* Output is read from commands only while less than this waits for the node. */
enum { BACKLOG_MAX = 512 << 10, COMMANDS_MAX = 4096 };
/* A stream that once gave so much in one read is busy: its pages are moved, not copied, so many bytes at a time. */
enum { BUSY = 32 << 10, MOVED_MAX = 256 << 10, INFLOW_MAX = 1 << 20 };
/* Ended commands whose pipes are still held; a process inside could collect the pipes of all. */
enum { LINGERING_MAX = 256 };
enum { REPORT_MAX = 256 };

struct command;
struct source { /* what an epoll event points to */
    enum { CHANNEL, SIGNALS, INPUT, OUTPUT, STARTED, REPORTS } kind;
    int stream; /* 1 or 2, of OUTPUT */
    struct command *command;
};

struct stream {
    int fd;
    bool watched;
    bool busy;
    uint32_t credit;   /* bytes the node is ready to take */
    int64_t remaining; /* after the command's end, or a report: bytes that were in the pipe then; else -1 */
    struct source source;
};

struct counts { /* of the whole sandbox */
    uint32_t oom_kills, refused_processes;
};

struct moment { /* which process is older than another: by its start, and within one tick by its number */
    uint64_t ticks; /* since boot, as /proc counts them */
    pid_t last_pid;
};

struct command {
    uint32_t id;
    struct child child;
    struct stream out[2]; /* stdout, stderr */
    struct source input, starting, reports;
    bool ours; /* a file operation, whose input nobody but this program's own copy reads */
    bool report_pid; /* once it has become the program */
    struct buffer pending; /* for its stdin */
    bool close_input, input_watched;
    uint64_t started;
    struct counts before;
    uint32_t oom_kills, refused_processes; /* while it ran; the second only of one that failed */
    bool killed; /* by the node */
    uint8_t report[REPORT_MAX]; /* of a session's shell: to be sent after the output that came before it */
    size_t report_length;
    struct moment sent;         /* when its shell was last sent something: what is older it had started before */
    bool ended; /* reaped; its output may still be on the way */
    bool told;  /* EXIT was sent; kept only while background children hold its pipes */
    int refused; /* errno of what failed before it became the program */
    enum spawn_step refused_step;
    int status;
    struct rusage usage;
    uint64_t duration, cpu;
    struct command *next;
};

/* A pipe that nobody else has, in which the pages of one frame's output wait for the channel. */
struct conduit {
    int in, out;    /* -1 while there is none */
    size_t waiting; /* bytes in it */
    size_t before;  /* bytes of the output buffer that go first: they end with the frame's header */
};

/* The rest of an INPUT frame that is on its way from the channel into a pipe. */
struct inflow {
    uint32_t id;
    size_t left;
    size_t moved; /* of this frame; told at its end */
};

struct pid1 {
    struct inside in;
    struct conduit conduit;
    struct inflow inflow;
    int epoll, signals;
    struct source channel_source, signal_source;
    struct buffer input, output;
    uint32_t sent;
    bool channel_writable_watched, stalled;
    struct command *commands; /* the newest first */
    size_t count, lingering;
};
extern struct pid1 self; /* there is one of us */

void watch(int operation, int fd, uint32_t events, struct source *source); /* by epoll */
_Noreturn void node_is_gone(void);
void flush_output(void);                        /* as far as the socket takes it */
void send_frame(enum frame_kind kind, uint32_t id, const void *payload, size_t length);
void send_pair(enum frame_kind kind, uint32_t id, uint32_t first, uint32_t second);
void send_taken(const struct command *c, size_t length);
void watch_stream(struct stream *s, bool wanted);
void pump(struct stream *s);                    /* one read from a command's stream */
void drain(struct command *c);                  /* what is left of one that has ended; may free it */
void conclude(struct command *c);               /* tells its end when that is due; may free it */
void resume_streams(void);                      /* those that waited for room in the channel */
void limit_lingering(void);                     /* once a turn, when nobody holds a pointer to a command */
void feed(struct command *c);                   /* its stdin */
void close_input(struct command *c);
void mark_written(struct command *c);           /* what is in its pipes now is to be sent before what is told next */
bool drained(const struct stream *s);           /* all of that was sent */

/* ---- session.c ------------------------------------------------------------------------------- */

void expect_report(struct command *c);
void take_report(struct command *c);            /* what the shell said; may free the command */
void tell_report(struct command *c);
void close_reports(struct command *c);
void mark_sent(struct command *c);
void kill_newer(const struct command *c);       /* what it started since it was sent something, but not itself */

#endif
