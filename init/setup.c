/* Carries out a plan. Each operation is one small function and one entry in sandbox/plan.py. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "setup.h"

int setup_fail(struct setup *s, int error, const char *detail) {
    if (detail) snprintf(s->detail, sizeof s->detail, "%s", detail);
    return error;
}

/* ---- descriptors: -1 is none, below KEPT_BASE a register of this plan, above it a kept one ---- */

static int *place(struct setup *s, int64_t reference) {
    if (reference >= 0 && reference < REGISTERS) return &s->registers[reference];
    if (s->kept && reference >= KEPT_BASE && reference < KEPT_BASE + KEPT_MAX) return &s->kept[reference - KEPT_BASE];
    return NULL;
}

int read_fd(struct setup *s) {
    int64_t reference = read_int(&s->plan);
    int *at = place(s, reference);
    if (reference == -1) return AT_FDCWD;
    if (!at || *at <= 0) {
        s->plan.bad = true;
        return -1;
    }
    return *at;
}

int store_fd(struct setup *s, int64_t reference, int fd) {
    int *at = place(s, reference);
    if (fd < 0) return errno;
    if (!at) {
        close(fd);
        return EBADMSG;
    }
    if (*at > 0) close(*at);
    *at = fd;
    return 0;
}

/* ---- files ----------------------------------------------------------------------------------- */

int op_mkdir(struct setup *s) {
    int at = read_fd(s);
    const char *path = read_text(&s->plan);
    mode_t mode = (mode_t)read_int(&s->plan);
    if (s->plan.bad) return EBADMSG;
    return mkdirat(at, path, mode) ? setup_fail(s, errno, path) : 0; /* our umask is 0 */
}

int op_open(struct setup *s) {
    int64_t out = read_int(&s->plan);
    int at = read_fd(s);
    const char *path = read_text(&s->plan);
    int flags = (int)read_int(&s->plan);
    if (s->plan.bad) return EBADMSG;
    int fd = openat(at, path, flags | O_CLOEXEC | O_NOFOLLOW);
    return fd < 0 ? setup_fail(s, errno, path) : store_fd(s, out, fd);
}

int op_write(struct setup *s) {
    int at = read_fd(s);
    const char *path = read_text(&s->plan);
    size_t length;
    const char *data = read_bytes(&s->plan, &length);
    if (s->plan.bad) return EBADMSG;
    return write_file(at, path, data, length) ? setup_fail(s, errno, path) : 0;
}

int op_chown(struct setup *s) {
    int at = read_fd(s);
    const char *path = read_text(&s->plan);
    uid_t owner = (uid_t)read_int(&s->plan);
    if (s->plan.bad) return EBADMSG;
    return fchownat(at, path, owner, owner, AT_SYMLINK_NOFOLLOW) ? setup_fail(s, errno, path) : 0;
}

/* Of a cgroup, whose files go with its directories. */
int op_remove_tree(struct setup *s) {
    int at = read_fd(s);
    const char *name = read_text(&s->plan);
    if (s->plan.bad) return EBADMSG;
    return remove_directories(at, name) && errno != ENOENT ? setup_fail(s, errno, name) : 0;
}

int op_keep(struct setup *s) {
    int fd = read_fd(s);
    int64_t key = read_int(&s->plan);
    if (s->plan.bad || key < KEPT_BASE) return EBADMSG;
    return store_fd(s, key, fcntl(fd, F_DUPFD_CLOEXEC, 3));
}

int op_drop(struct setup *s) {
    int *at = place(s, read_int(&s->plan));
    if (!at) return EBADMSG;
    if (*at > 0) close(*at);
    *at = 0;
    return 0;
}

int op_send(struct setup *s) {
    int fd = read_fd(s);
    if (s->plan.bad || s->reply_count == REPLY_FDS_MAX) return EBADMSG;
    fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (fd < 0) return errno;
    s->reply[s->reply_count++] = fd;
    return 0;
}

/* In the order of sandbox/plan.py; the index is the code on the wire. */
static int (*const operations[])(struct setup *) = {
    op_mount,    op_overlay, op_clone_tree, op_idmap,   op_attributes, op_attach,  op_pivot,        op_enter, op_mkdir, op_open,
    op_write, op_chown, op_remove_tree, op_keep,    op_drop,       op_send,    op_userns,     op_netns,   op_netlink,      op_listen, op_clone,
    op_identity, op_join,    op_unshare,    op_hostname,   op_rlimit,  op_commands,   op_capabilities, op_seccomp,
    op_affinity, op_bind,
    op_seccomp_audited,
    op_restrict, op_hide,    op_clone_all,  op_visit,   op_view,
    op_no_memory_files, op_landlock,
};

void setup_init(struct setup *s, int *kept, const uint8_t *plan, size_t length, const int *fds, size_t count) {
    memset(s, 0, sizeof *s);
    s->plan = (struct reader){plan, plan + length, false};
    s->kept = kept;
    s->inside = (struct inside){.channel = -1, .commands_dir = -1, .oom_events = -1, .process_events = -1, .null = -1, .terminals = -1, .view = -1};
    for (size_t i = 0; i < REGISTERS; i++) s->registers[i] = i < count ? fds[i] : 0;
}

int setup_run(struct setup *s) {
    for (; s->plan.at < s->plan.end; s->step++) {
        uint8_t code = *s->plan.at++;
        if (code >= sizeof operations / sizeof *operations) return setup_fail(s, EBADMSG, "unknown operation");
        int error = operations[code](s);
        if (error == EBADMSG && s->plan.bad) return setup_fail(s, error, "malformed arguments");
        if (error) return error;
    }
    return 0;
}
