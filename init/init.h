/* shoal-init: makes sandboxes (the spawner) and is PID 1 inside each of them.
 *
 * The policy is in Python. What arrives here is a plan, a flat list of operations, or a frame that asks
 * for one thing. Nothing that a sandbox wrote is parsed in this program. */
#ifndef SHOAL_INIT_H
#define SHOAL_INIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "frame.h"

/* ---- util.c ---------------------------------------------------------------------------------- */

/* Reads typed values out of a message. After the first value that does not fit, `bad` stays set. */
struct reader {
    const uint8_t *at, *end;
    bool bad;
};
int64_t read_int(struct reader *r);
const char *read_bytes(struct reader *r, size_t *length); /* in place, always followed by a NUL */
const char *read_text(struct reader *r);                  /* the same, and no NUL within */
size_t read_count(struct reader *r);                      /* of the texts that follow */
char **read_list(struct reader *r, size_t *count);        /* malloc'd array, NULL-terminated, of texts in place */

/* A byte queue that grows. Bytes between `start` and `end` are waiting. */
struct buffer {
    uint8_t *data;
    size_t start, end, capacity;
};
uint8_t *buffer_reserve(struct buffer *b, size_t more); /* room for `more` bytes at `end`; never NULL */
void buffer_consume(struct buffer *b, size_t count);
static inline size_t buffer_length(const struct buffer *b) { return b->end - b->start; }

void *allocate(size_t size);         /* zeroed; ends the process when there is no memory */
int write_all(int fd, const void *data, size_t length); /* for blocking descriptors; 0 or -1 */
int write_file(int dirfd, const char *path, const char *data, size_t length);
int remove_directories(int parent, const char *name); /* a tree of directories whose files need no removing */
uint64_t now_ns(void);
void close_from(int first);

/* ---- setup.c --------------------------------------------------------------------------------- */

enum { REGISTERS = 64, KEPT_MAX = 1 << 16, KEPT_BASE = 1000, REPLY_FDS_MAX = 32 };

/* What init needs from the plan once it is PID 1. */
struct inside {
    int channel;
    int commands_dir;      /* unified cgroup directory in which each command gets one of its own, or -1 */
    int join[8];           /* `tasks` or `cgroup.procs` files that a command writes itself into */
    size_t join_count;
    int oom_events;        /* memory.oom_control or memory.events, or -1 */
    int process_events;    /* pids.events, or -1 */
    int null;              /* the host's /dev/null: the one inside is the sandbox's to replace by a FIFO */
    int terminals;         /* the root of its devpts, for the same reason */
    int view;              /* the tree as it is without the access policy, for file operations; -1 is the tree of commands */
    uint64_t open_files;   /* RLIMIT_NOFILE of commands */
    uint64_t processes;    /* RLIMIT_NPROC of commands, counted in the sandbox's user namespace; 0 where a cgroup does it */
    const char *processors; /* the mask of those that it runs on, in the plan; NULL for all */
    size_t processors_length;
    pid_t letting_go;      /* takes the spawner's tree away; 0 when that is done */
};

/* One plan being carried out. */
struct setup {
    struct reader plan;
    int registers[REGISTERS]; /* 0 is none: a spawner's descriptors begin at 3 */
    int *kept;                /* those that outlive the plan, by the node's key; the same */
    int reply[REPLY_FDS_MAX];
    size_t reply_count;
    struct inside inside;
    unsigned step;         /* index of the operation being done */
    char detail[160];      /* what the kernel had to say about the failure */
    pid_t child;           /* PID 1 of the sandbox that the plan made, or 0 */
    int child_mounts;      /* its mount namespace */
};
void setup_init(struct setup *s, int *kept, const uint8_t *plan, size_t length, const int *fds, size_t count);
int setup_run(struct setup *s);         /* 0, or an errno; s->step then names the operation */

/* ---- spawner.c ------------------------------------------------------------------------------- */

/* users: the user namespace to join, or -1; cleanup: paths of directories to remove at the end */
int spawner_main(int socket, int users, char **cleanup);
int spawner_mounts(pid_t pid); /* the mount namespace of a sandbox that is not reaped yet, or -1 */
void spawner_forget(void); /* in a sandbox: gives back the pages that the spawner would otherwise have to copy */

/* ---- audit.c --------------------------------------------------------------------------------- */

/* listener: of a seccomp filter; init: pid of the sandbox's PID 1, whose own calls are not told. Ends with either side. */
int audit_main(int listener, int socket, uint32_t init);

/* ---- init.c ---------------------------------------------------------------------------------- */

_Noreturn void init_main(struct setup *s); /* in the new sandbox, just after clone: the rest of the plan, then PID 1 */

/* ---- access.c -------------------------------------------------------------------------------- */

int enter_domain(char **paths, size_t count); /* of Landlock; 0 or an errno */

/* ---- spawn.c --------------------------------------------------------------------------------- */

struct request {                        /* a SPAWN or FILE frame, decoded; pointers into the frame */
    uint32_t flags;
    uint32_t uid, gid;
    uint32_t window;                    /* bytes that may be sent on each stream before more is granted */
    uint16_t rows, cols;
    const char *cwd;
    char **argv, **envp;
    gid_t groups[64];
    size_t group_count;
    int operation;                      /* a file operation, or -1 for a program */
    int64_t number;                     /* its numeric argument */
};
enum { WITH_STDIN = 1, WITH_TTY = 2, REPORT_PID = 4, WITH_SESSION = 8 };
enum spawn_step { STEP_REQUEST = 1, STEP_PIPES, STEP_CLONE, STEP_CGROUP, STEP_TTY, STEP_IDENTITY, STEP_CWD, STEP_EXEC };

struct cgroup_slot {                    /* a command's own cgroup; reused once it is empty, unless `spent` */
    unsigned name;
    int dir, cpu_stat;
    uint64_t cpu_before;                /* microseconds used by earlier commands */
    bool taken;
    bool spent;                         /* cgroup.kill was used on it */
};
struct child {
    pid_t pid;
    int in, out, err;                   /* our ends; -1 where there is none */
    int reports;                        /* of a session: `in` once more, to read from; else -1 */
    int started;                        /* EOF when it has become the program, else spawn_step and errno */
    struct cgroup_slot *group;          /* NULL without cgroups */
};
bool request_decode(struct request *q, const struct frame *f, const uint8_t *payload, bool file);
void request_free(struct request *q);
int spawn(const struct inside *in, const struct request *q, struct child *c, enum spawn_step *step);
bool spawn_failed(struct child *c, enum spawn_step *step, int *error); /* asked when it is dead, or `started` is readable */
void kill_tree(const struct child *c, int signal);
enum { STAT_PARENT = 4, STAT_START = 22 };
uint64_t stat_field(pid_t pid, int field); /* of /proc/PID/stat, by its number in proc(5); 0 for a process that is gone */
bool descends(pid_t pid, pid_t from);
uint64_t cgroup_cpu_usec(struct cgroup_slot *g);
void cgroup_release(struct child *c);
uint32_t oom_kills(const struct inside *in);
uint32_t refused_processes(const struct inside *in);

/* ---- files.c --------------------------------------------------------------------------------- */

enum {
    FILE_READ = 1, FILE_WRITE, FILE_APPEND, FILE_LIST, FILE_STAT, FILE_MKDIR, FILE_REMOVE, FILE_RENAME, FILE_SYMLINK,
    FILE_PACK, FILE_UNPACK, FILE_WATCH,
};
_Noreturn void file_operation(const struct request *q); /* in a child of init: data on 0 and 1, errno as exit code */

#endif
