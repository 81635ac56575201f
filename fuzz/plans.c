/* Plans, with every system call a stub: no operation may read past its plan or close what is not open.
 *
 * The first four bytes decide which calls fail. Descriptors are numbers from FIRST; each is open or not. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/netlink.h>
#include <linux/sched.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "init.h"

enum { FIRST = 100000, OPEN_MAX_HERE = 1 << 16, NESTED_MAX = 32 };
static uint32_t luck;
static bool is_open[OPEN_MAX_HERE];
static int opened;
static jmp_buf child[NESTED_MAX];
static int depth;

/* 0, or one time in eight -1 and an errno. */
static int outcome(void) {
    luck = luck * 1664525 + 1013904223;
    if (luck >> 29) return 0;
    errno = EPERM;
    return -1;
}

static int new_fd(void) {
    if (outcome() || opened == OPEN_MAX_HERE) return -1;
    is_open[opened] = true;
    return FIRST + opened++;
}

static int stub_close(int fd) {
    if (fd < FIRST || fd >= FIRST + opened || !is_open[fd - FIRST]) abort();
    is_open[fd - FIRST] = false;
    return 0;
}

static long stub_syscall(long number, ...) {
    if (number == SYS_clone) return outcome() ? -1 : 1234;
    if (number == SYS_clone3) {
        va_list arguments;
        va_start(arguments, number);
        struct clone_args *args = va_arg(arguments, struct clone_args *);
        va_end(arguments);
        if (outcome()) return -1;
        int pidfd = new_fd();
        if (pidfd < 0) return -1;
        *(int *)(uintptr_t)args->pidfd = pidfd;
        return 1234;
    }
    bool opens = number == SYS_fsopen || number == SYS_fsmount || number == SYS_open_tree || number == SYS_openat2;
    return opens ? new_fd() : outcome();
}

static int stub_pipe(int ends[2]) {
    ends[0] = new_fd();
    if (ends[0] >= 0) ends[1] = new_fd();
    if (ends[0] >= 0 && ends[1] < 0) stub_close(ends[0]);
    return ends[0] < 0 || ends[1] < 0 ? -1 : 0;
}

/* A message of the kernel's, as long as said. */
static ssize_t stub_read(char *to, size_t size) {
    size_t length = outcome() ? 0 : luck % (size + 1);
    memset(to, 'x', length);
    return (ssize_t)length;
}

static ssize_t stub_recv(char *to) {
    if (outcome()) return -1;
    struct nlmsghdr header = {.nlmsg_len = NLMSG_LENGTH(sizeof(struct nlmsgerr)), .nlmsg_type = NLMSG_ERROR};
    struct nlmsgerr answer = {.error = outcome() ? -EINVAL : 0};
    memcpy(to, &header, sizeof header);
    memcpy(to + NLMSG_HDRLEN, &answer, sizeof answer);
    return (ssize_t)header.nlmsg_len;
}

_Noreturn static void stub_exit(void) {
    if (!depth) abort();
    longjmp(child[--depth], 1);
}

_Noreturn void init_main(struct setup *s) { /* clone3 here never comes back in the child */
    (void)s;
    abort();
}

#define syscall(...) stub_syscall(__VA_ARGS__)
#define close(fd) stub_close(fd)
#define open(...) new_fd()
#define openat(...) new_fd()
#define socket(...) new_fd()
#define fcntl(fd, ...) ((fd) < FIRST ? -1 : new_fd())
#define pipe2(ends, flags) stub_pipe(ends)
#define read(fd, to, size) stub_read((char *)(to), size)
#define recv(fd, to, ...) stub_recv(to)
#define write(fd, from, size) (outcome() ? -1 : (ssize_t)(size))
#define sendto(...) outcome()
#define bind(...) outcome()
#define listen(...) outcome()
#define chdir(path) outcome()
#define fchdir(fd) outcome()
#define setns(...) outcome()
#define unshare(flags) outcome()
#define mkdirat(...) outcome()
#define fchownat(...) outcome()
#define unlinkat(...) outcome()
#define fdopendir(fd) (outcome() ? NULL : NULL)
#define sethostname(...) outcome()
#define setrlimit(...) outcome()
#define prctl(...) outcome()
#define setfsuid(id) ((void)outcome())
#define setfsgid(id) ((void)outcome())
#define kill(...) ((void)outcome())
#define waitpid(...) ((void)outcome())
#define pause() abort()
#define _exit(code) stub_exit()
/* The child of a vfork goes first, in our memory; then we come back as the parent. */
#define SHOAL_RAWCLONE_H
#define raw_vfork(flags) (depth == NESTED_MAX ? -1 : setjmp(child[depth++]) ? 1234 : 0)

#include "../init/setup.c"
#include "../init/util.c"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length) {
    static int kept[KEPT_MAX];
    static struct setup s;
    if (length < 4) return 0;
    memset(kept, -1, sizeof kept);
    luck = get_u32(data);
    opened = depth = 0;
    size_t count = length - 4;
    uint8_t *plan = malloc(count ? count : 1); /* of the exact size, so that one byte more is noticed */
    memcpy(plan, data + 4, count);
    int fds[] = {new_fd(), new_fd()};
    setup_init(&s, kept, plan, count, fds, 2);
    setup_run(&s);
    if (depth || s.reply_count > REPLY_FDS_MAX || strnlen(s.detail, sizeof s.detail) == sizeof s.detail) abort();
    setup_close(&s);
    for (size_t i = 0; i < s.reply_count; i++) stub_close(s.reply[i]);
    for (size_t i = 0; i < KEPT_MAX; i++)
        if (kept[i] >= 0) stub_close(kept[i]);
    free(plan);
    return 0;
}
