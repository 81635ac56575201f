/* Starts one command inside the sandbox, in a cgroup of its own where there are any. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include "init.h"

/* ---- requests -------------------------------------------------------------------------------- */

bool request_decode(struct request *q, const struct frame *f, const uint8_t *payload, bool file) {
    struct reader r = {payload, payload + f->length, false};
    memset(q, 0, sizeof *q);
    q->flags = (uint32_t)read_int(&r);
    q->uid = (uint32_t)read_int(&r);
    q->gid = (uint32_t)read_int(&r);
    q->window = (uint32_t)read_int(&r);
    q->rows = (uint16_t)read_int(&r);
    q->cols = (uint16_t)read_int(&r);
    q->operation = (int)read_int(&r);
    q->number = read_int(&r);
    q->cwd = read_text(&r);
    int64_t groups = read_int(&r);
    if (groups < 0 || groups > 64) r.bad = true;
    for (; !r.bad && (int64_t)q->group_count < groups; q->group_count++) q->groups[q->group_count] = (gid_t)read_int(&r);
    size_t argc, envc;
    q->argv = read_list(&r, &argc);
    q->envp = read_list(&r, &envc);
    return !r.bad && argc > 0 && (q->operation > 0) == file;
}

void request_free(struct request *q) {
    free(q->argv);
    free(q->envp);
}

/* ---- cgroups --------------------------------------------------------------------------------- */

enum { GROUPS_MAX = 1024 };
static struct cgroup_slot *groups[GROUPS_MAX];
static size_t group_total;

static bool group_empty(const struct cgroup_slot *g) {
    char text[128];
    int fd = openat(g->dir, "cgroup.events", O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (length < 0) return false;
    text[length] = 0;
    return strstr(text, "populated 0") != NULL;
}

static struct cgroup_slot *make_group(int parent) {
    static unsigned next;
    errno = EAGAIN;
    if (group_total == GROUPS_MAX) return NULL;
    char name[16];
    snprintf(name, sizeof name, "%u", next);
    if (mkdirat(parent, name, 0755)) return NULL;
    int dir = openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir < 0) return NULL;
    struct cgroup_slot *g = allocate(sizeof *g);
    g->name = next++;
    g->dir = dir;
    g->cpu_stat = -1;
    return groups[group_total++] = g;
}

static void remove_group(int parent, size_t index) {
    struct cgroup_slot *g = groups[index];
    char name[16];
    snprintf(name, sizeof name, "%u", g->name);
    if (g->cpu_stat >= 0) close(g->cpu_stat);
    close(g->dir);
    unlinkat(parent, name, AT_REMOVEDIR);
    groups[index] = groups[--group_total];
    free(g);
}

/* A group whose command has ended but which still has background processes is not taken again until they are gone. One
 * that was killed is never taken again: since Linux 6.14 a child that is cloned into it is killed at birth, because the
 * kernel compares the kill counter of the parent's group with that of the child's. */
static struct cgroup_slot *take_group(int parent) {
    struct cgroup_slot *found = NULL;
    for (size_t i = group_total; i-- > 0;) {
        struct cgroup_slot *g = groups[i];
        if (g->taken || (found && !g->spent) || !group_empty(g)) continue;
        if (g->spent) remove_group(parent, i);
        else found = g;
    }
    if (!found) found = make_group(parent);
    if (found) found->taken = true;
    return found;
}

static uint64_t cpu_total(struct cgroup_slot *g) {
    char text[64] = {0};
    unsigned long long usec = 0;
    if (g->cpu_stat < 0) g->cpu_stat = openat(g->dir, "cpu.stat", O_RDONLY | O_CLOEXEC);
    if (g->cpu_stat >= 0 && pread(g->cpu_stat, text, sizeof text - 1, 0) > 0) sscanf(text, "usage_usec %llu", &usec);
    return usec;
}

/* Read once, at the end: each reading makes the kernel add up what the processors know. What background processes of an
 * earlier command have used since its end counts for this one; there are none as a rule, or the group were not taken. */
uint64_t cgroup_cpu_usec(struct cgroup_slot *g) {
    uint64_t total = cpu_total(g), used = total - g->cpu_before;
    g->cpu_before = total;
    return used;
}

void cgroup_release(struct child *c) {
    if (!c->group) return;
    c->group->taken = false;
    c->group = NULL;
}

static uint32_t count_in(int file, const char *word) {
    char text[512];
    ssize_t length = file < 0 ? -1 : pread(file, text, sizeof text - 1, 0);
    if (length <= 0) return 0;
    text[length] = 0;
    const char *at = strstr(text, word);
    return at ? (uint32_t)strtoul(at + strlen(word), NULL, 10) : 0;
}

/* The same word in memory.oom_control and memory.events. */
uint32_t oom_kills(const struct inside *in) { return count_in(in->oom_events, "oom_kill "); }

uint32_t refused_processes(const struct inside *in) { return count_in(in->process_events, "max "); }

/* ---- killing --------------------------------------------------------------------------------- */

uint64_t stat_field(pid_t pid, int field) {
    char path[32], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (length <= 0) return 0;
    text[length] = 0;
    const char *at = strrchr(text, ')'); /* the name before it may hold anything */
    for (int skipped = 2; at && skipped < field; skipped++) at = strchr(at + 1, ' ');
    return at ? strtoull(at, NULL, 10) : 0;
}

static pid_t parent_of(pid_t pid) { return (pid_t)stat_field(pid, STAT_PARENT); }

bool descends(pid_t pid, pid_t from) {
    for (int depth = 0; pid > 1 && depth < 4096; depth++, pid = parent_of(pid))
        if (pid == from) return true;
    return false;
}

/* Without a cgroup: everything that still descends from the command. The command itself goes last, for as long as it is
 * there its children's ancestry can be read. What was orphaned before is not found; `doctor` says so. */
static void kill_descendants(pid_t root, int signal) {
    kill(-root, signal);
    for (pid_t pid = 2, seen = 0; pid < 1 << 22 && seen < 1 << 16; pid++) {
        if (kill(pid, 0) && errno == ESRCH) {
            if (++seen > 4096) break; /* pids in a sandbox are dense */
            continue;
        }
        seen = 0;
        if (pid != root && descends(pid, root)) kill(pid, signal);
    }
    kill(root, signal);
}

void kill_tree(const struct child *c, int signal) {
    if (!c->group) {
        kill_descendants(c->pid, signal);
    } else if (signal == SIGKILL && !write_file(c->group->dir, "cgroup.kill", "1", 1)) {
        c->group->spent = true;
    } else {
        kill(-c->pid, signal);
    }
}

/* ---- starting -------------------------------------------------------------------------------- */

struct ends {
    int in, out, err;
};

static void close_ends(const struct ends *e) {
    if (e->in >= 0) close(e->in);
    if (e->out >= 0 && e->out != e->in) close(e->out);
    if (e->err >= 0 && e->err != e->out) close(e->err);
}

static int open_pipe(int *read_end, int *write_end) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC)) return -1;
    *read_end = ends[0];
    *write_end = ends[1];
    return 0;
}

/* The shell of a session reads what to do from a socket, and says on it how that ended: unlike a pipe it can't be opened
 * by way of /proc, and the kernel tells who wrote. */
static int open_session(struct child *c, struct ends *theirs) {
    int ends[2], on = 1;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends)) return -1;
    c->in = ends[0];
    theirs->in = ends[1];
    c->reports = fcntl(c->in, F_DUPFD_CLOEXEC, 3); /* epoll takes a descriptor once */
    return c->reports < 0 ? -1 : setsockopt(c->in, SOL_SOCKET, SO_PASSCRED, &on, sizeof on);
}

/* A terminal whose line editing knows characters of several bytes. */
static void edit_utf8(int terminal) {
    struct termios settings;
    if (tcgetattr(terminal, &settings)) return;
    settings.c_iflag |= IUTF8;
    tcsetattr(terminal, TCSANOW, &settings);
}

static int open_terminal(const struct inside *in, const struct request *q, struct child *c, struct ends *theirs) {
    int master = openat(in->terminals, "ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    if (master < 0) return -1;
    int unlock = 0;
    struct winsize size = {.ws_row = q->rows, .ws_col = q->cols};
    if (ioctl(master, TIOCSPTLCK, &unlock) || ioctl(master, TIOCSWINSZ, &size)) return -1;
    int terminal = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (terminal < 0) return -1;
    if (fchown(terminal, q->uid, (gid_t)-1)) { /* an unmapped uid; the descriptor works all the same */ }
    edit_utf8(terminal);
    *theirs = (struct ends){terminal, terminal, terminal};
    c->in = master;
    c->out = fcntl(master, F_DUPFD_CLOEXEC, 3);
    return 0;
}

static int open_pipes(const struct inside *in, const struct request *q, struct child *c, struct ends *theirs) {
    if (q->flags & WITH_TTY) return open_terminal(in, q, c, theirs);
    if (q->flags & WITH_SESSION) {
        if (open_session(c, theirs)) return -1;
    } else if (q->flags & WITH_STDIN) {
        if (open_pipe(&theirs->in, &c->in)) return -1;
    } else if ((theirs->in = fcntl(in->null, F_DUPFD_CLOEXEC, 3)) < 0) {
        return -1;
    }
    if (open_pipe(&c->out, &theirs->out)) return -1;
    if (open_pipe(&c->err, &theirs->err)) return -1;
    int ours[] = {c->in, c->out, c->err};
    for (int i = 0; i < 3; i++)
        if (ours[i] >= 0) fcntl(ours[i], F_SETFL, O_NONBLOCK);
    return 0;
}

static const char *variable(char **envp, const char *name) {
    size_t length = strlen(name);
    for (; *envp; envp++)
        if (!strncmp(*envp, name, length) && (*envp)[length] == '=') return *envp + length + 1;
    return NULL;
}

/* execvp with the command's own PATH. EACCES is kept while later folders are tried, as shells do. */
static int execute(const struct request *q) {
    const char *file = q->argv[0], *path = variable(q->envp, "PATH");
    if (strchr(file, '/') || !path) {
        execve(file, q->argv, q->envp);
        return errno;
    }
    int error = ENOENT;
    char full[4096];
    for (const char *end; *path; path = *end ? end + 1 : end) {
        end = strchrnul(path, ':');
        int length = snprintf(full, sizeof full, "%.*s/%s", (int)(end - path), end == path ? "." : path, file);
        if (length < 0 || (size_t)length >= sizeof full) continue;
        if (access(full, F_OK) && (errno == ENOENT || errno == ENOTDIR)) continue; /* far cheaper than to try */
        execve(full, q->argv, q->envp);
        if (errno != ENOENT && errno != ENOTDIR) error = errno;
        if (error == E2BIG || error == ENOMEM) break;
    }
    return error;
}

static int take_identity(const struct request *q) {
    if (syscall(SYS_setgroups, q->group_count, q->groups) && (q->group_count || errno != EPERM)) return errno;
    if (syscall(SYS_setresgid, q->gid, q->gid, q->gid)) return errno;
    return syscall(SYS_setresuid, q->uid, q->uid, q->uid) ? errno : 0;
}

static int become(const struct inside *in, const struct request *q, const struct ends *e, enum spawn_step *step) {
    *step = STEP_CGROUP;
    for (size_t i = 0; i < in->join_count; i++)
        if (write_all(in->join[i], "0", 1)) return errno;
    *step = STEP_TTY;
    setsid();
    if ((q->flags & WITH_TTY) && ioctl(e->in, TIOCSCTTY, 0)) return errno;
    if (dup2(e->in, 0) < 0 || dup2(e->out, 1) < 0 || dup2(e->err, 2) < 0) return errno;
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    *step = STEP_IDENTITY;
    if (in->open_files && q->operation <= 0) { /* file operations are ours, and one at a time */
        struct rlimit files = {in->open_files, in->open_files};
        if (setrlimit(RLIMIT_NOFILE, &files)) return errno;
    }
    if (in->processes) {
        struct rlimit processes = {in->processes, in->processes};
        if (setrlimit(RLIMIT_NPROC, &processes)) return errno;
    }
    umask(022);
    /* The access policy is for what runs in the sandbox, not for its owner's file operations. */
    if (q->operation > 0 && in->view >= 0 && (fchdir(in->view) || chroot("."))) return errno;
    int error = take_identity(q);
    if (error) return error;
    *step = STEP_CWD;
    return *q->cwd && chdir(q->cwd) ? errno : 0;
}

/* Never returns. A program is executed; a file operation is done by this true copy of us, which is not dumpable and so
 * can't be looked into from inside. */
_Noreturn static void run_child(const struct inside *in, const struct request *q, const struct ends *e, int report) {
    uint8_t failure[8];
    enum spawn_step step = STEP_CLONE;
    int error = become(in, q, e, &step);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); /* again: changing credentials has its own idea of it */
    if (!error && q->operation > 0) {
        close_from(3);
        file_operation(q);
    }
    if (!error) {
        step = STEP_EXEC;
        error = execute(q);
    }
    put_u32(failure, step);
    put_u32(failure + 4, (uint32_t)error);
    if (write_all(report, failure, sizeof failure)) { /* init will say that it exited with 127 */ }
    _exit(127);
}

/* A fork and not a vfork: the sandbox can hold the child up before its exec, by SIGSTOP or by a lease on the program, and
 * init must not stand still meanwhile. */
static int start_child(const struct inside *in, const struct request *q, const struct ends *e, struct child *c) {
    int report;
    if (open_pipe(&c->started, &report)) return errno;
    fcntl(c->started, F_SETFL, O_NONBLOCK);
    struct clone_args args = {.exit_signal = SIGCHLD};
    if (c->group) {
        args.flags = CLONE_INTO_CGROUP;
        args.cgroup = (uint64_t)c->group->dir;
    }
    c->pid = (pid_t)syscall(SYS_clone3, &args, sizeof args);
    if (c->pid == 0) run_child(in, q, e, report);
    int error = c->pid < 0 ? errno : 0;
    close(report);
    return error;
}

bool spawn_failed(struct child *c, enum spawn_step *step, int *error) {
    uint8_t failure[8];
    ssize_t got = c->started < 0 ? 0 : read(c->started, failure, sizeof failure);
    if (c->started >= 0) close(c->started);
    c->started = -1;
    if (got != sizeof failure) return false;
    *step = (enum spawn_step)get_u32(failure);
    *error = (int)get_u32(failure + 4);
    return true;
}

int spawn(const struct inside *in, const struct request *q, struct child *c, enum spawn_step *step) {
    *c = (struct child){.pid = -1, .in = -1, .out = -1, .err = -1, .reports = -1, .started = -1};
    struct ends theirs = {-1, -1, -1};
    *step = STEP_PIPES;
    int error = open_pipes(in, q, c, &theirs) ? errno : 0;
    if (!error && in->commands_dir >= 0) {
        c->group = take_group(in->commands_dir);
        if (!c->group) error = errno;
    }
    if (!error) {
        *step = STEP_CLONE;
        error = start_child(in, q, &theirs, c);
    }
    close_ends(&theirs);
    if (!error) return 0;
    close_ends(&(struct ends){c->in, c->out, c->err});
    if (c->reports >= 0) close(c->reports);
    if (c->started >= 0) close(c->started);
    cgroup_release(c);
    return error;
}
