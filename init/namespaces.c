/* The operations of a plan that make namespaces other than the sandbox's own: of users, and of the network. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/netlink.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rawclone.h"
#include "setup.h"

int write_maps(pid_t pid, const char *uids, const char *gids) {
    char path[48];
    snprintf(path, sizeof path, "/proc/%d/uid_map", pid);
    if (write_file(AT_FDCWD, path, uids, strlen(uids))) return errno;
    snprintf(path, sizeof path, "/proc/%d/gid_map", pid);
    if (write_file(AT_FDCWD, path, gids, strlen(gids)) == 0) return 0;
    if (errno != EPERM) return errno;
    /* An ordinary user may map his own group only after giving up setgroups. */
    char deny[48];
    snprintf(deny, sizeof deny, "/proc/%d/setgroups", pid);
    if (write_file(AT_FDCWD, deny, "deny", 4)) return errno;
    return write_file(AT_FDCWD, path, gids, strlen(gids)) ? errno : 0;
}

/* A user namespace of its own: a child that does nothing is mapped, its namespace is opened, it goes. */
int op_userns(struct setup *s) {
    int64_t out = read_int(&s->plan);
    const char *uids = read_text(&s->plan), *gids = read_text(&s->plan);
    if (s->plan.bad) return EBADMSG;
    pid_t pid = (pid_t)syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0);
    if (pid < 0) return errno;
    if (pid == 0)
        for (;;) pause();
    int error = write_maps(pid, uids, gids);
    char path[32];
    snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
    if (!error) error = store_fd(s, out, open(path, O_RDONLY | O_CLOEXEC));
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    return error;
}

struct netns {
    struct setup *setup;
    int64_t out;
    int owner, error;
};

_Noreturn static __attribute__((noinline)) void make_netns(struct netns *n) {
    if (n->owner != AT_FDCWD && setns(n->owner, CLONE_NEWUSER)) n->error = setup_fail(n->setup, errno, "setns");
    else if (unshare(CLONE_NEWNET)) n->error = setup_fail(n->setup, errno, "unshare");
    else n->error = store_fd(n->setup, n->out, open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC));
    if (!n->error) n->error = setup_run(n->setup);
    _exit(0);
}

/* A network namespace owned by a user namespace that no sandbox enters. The nested plan sets it up from inside, in
 * a child that shares memory and descriptors with us, so that what it opens and reports is simply here. */
int op_netns(struct setup *s) {
    struct netns n = {.setup = s, .out = read_int(&s->plan), .owner = read_fd(s)};
    size_t length;
    const uint8_t *nested = (const uint8_t *)read_bytes(&s->plan, &length);
    if (s->plan.bad) return EBADMSG;
    struct reader rest = s->plan;
    unsigned step = s->step;
    s->plan = (struct reader){nested, nested + length, false};
    pid_t pid = raw_vfork(CLONE_FILES);
    if (pid == 0) make_netns(&n);
    int error = pid < 0 ? errno : n.error;
    if (pid > 0) waitpid(pid, NULL, 0);
    s->plan = rest;
    s->step = step;
    return error;
}

int op_netlink(struct setup *s) {
    int protocol = (int)read_int(&s->plan);
    size_t length;
    const char *message = read_bytes(&s->plan, &length);
    int64_t acks = read_int(&s->plan);
    if (s->plan.bad) return EBADMSG;
    int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, protocol);
    if (fd < 0) return errno;
    struct sockaddr_nl kernel = {.nl_family = AF_NETLINK};
    int error = sendto(fd, message, length, 0, (struct sockaddr *)&kernel, sizeof kernel) < 0 ? errno : 0;
    _Alignas(8) char answer[16384];
    while (!error && acks > 0) {
        ssize_t got = recv(fd, answer, sizeof answer, 0);
        if (got < 0) error = errno;
        for (struct nlmsghdr *h = (void *)answer; got > 0 && NLMSG_OK(h, (size_t)got); h = NLMSG_NEXT(h, got)) {
            if (h->nlmsg_type != NLMSG_ERROR) continue;
            acks--;
            struct nlmsgerr *e = NLMSG_DATA(h);
            if (e->error && !error) {
                error = -e->error;
                snprintf(s->detail, sizeof s->detail, "message %u", e->msg.nlmsg_seq);
            }
        }
    }
    close(fd);
    return error;
}

int op_listen(struct setup *s) {
    int64_t out = read_int(&s->plan);
    int type = (int)read_int(&s->plan);
    const char *address = read_text(&s->plan);
    int port = (int)read_int(&s->plan), backlog = (int)read_int(&s->plan);
    if (s->plan.bad) return EBADMSG;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    if (inet_pton(AF_INET, address, &at.sin_addr) != 1) return setup_fail(s, EINVAL, address);
    int fd = socket(AF_INET, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return errno;
    if (bind(fd, (struct sockaddr *)&at, sizeof at) || (type == SOCK_STREAM && listen(fd, backlog))) {
        int error = errno;
        close(fd);
        return setup_fail(s, error, address);
    }
    return store_fd(s, out, fd);
}
