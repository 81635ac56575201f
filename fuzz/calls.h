/* The system calls that carry out a plan, as stubs. Included before init's own files, whose calls it renames.
 *
 * Descriptors are numbers from FIRST; each is open or not, and using or closing one that is not is a finding. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/mount.h>
#include <linux/netlink.h>
#include <linux/openat2.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "init.h"

enum { FIRST = 100000, DESCRIPTORS = 1 << 16, NESTED_MAX = 32 };
static uint32_t luck; /* decides which calls fail */
static bool is_open[DESCRIPTORS];
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
    if (outcome() || opened == DESCRIPTORS) return -1;
    is_open[opened] = true;
    return FIRST + opened++;
}

static void check_fd(int fd) {
    if (fd != AT_FDCWD && (fd < FIRST || fd >= FIRST + opened || !is_open[fd - FIRST])) abort();
}

static int stub_close(int fd) {
    check_fd(fd);
    if (fd == AT_FDCWD) return -1;
    is_open[fd - FIRST] = false;
    return 0;
}

static int use(int fd) {
    check_fd(fd);
    return outcome();
}

static int use_at(int fd, const char *path, ...) {
    check_fd(fd);
    return strlen(path) < FRAME_PAYLOAD_MAX ? outcome() : -1;
}

static int open_at(int fd, const char *path, ...) { return use_at(fd, path) ? -1 : new_fd(); }

static ssize_t use_bytes(int fd, const void *from, size_t size) {
    static volatile uint8_t read_all;
    check_fd(fd);
    for (size_t i = 0; i < size; i++) read_all ^= ((const uint8_t *)from)[i];
    return outcome() ? -1 : (ssize_t)size;
}

static int stub_fstat(int fd, struct stat *found) {
    *found = (struct stat){.st_mode = S_IFCHR, .st_rdev = makedev(1, luck & 3)};
    return use(fd);
}

static ssize_t stub_sendmsg(int fd, const struct msghdr *message) {
    int passed;
    memcpy(&passed, CMSG_DATA(CMSG_FIRSTHDR(message)), sizeof passed);
    check_fd(passed);
    return use(fd) ? -1 : 1;
}

static long stub_clone3(struct clone_args *args) {
    if (outcome()) return -1;
    int pidfd = new_fd();
    if (pidfd < 0) return -1;
    *(int *)(uintptr_t)args->pidfd = pidfd;
    return 1234;
}

static long stub_syscall(long number, ...) {
    va_list arguments;
    va_start(arguments, number);
    long first = va_arg(arguments, long), second = va_arg(arguments, long);
    va_end(arguments);
    if (number == SYS_seccomp && second & SECCOMP_FILTER_FLAG_NEW_LISTENER) return new_fd();
    if (number == SYS_clone3) return stub_clone3((struct clone_args *)first);
    if (number == SYS_clone) return outcome() ? -1 : 1234;
    if (number == SYS_fsopen || number == SYS_landlock_create_ruleset) return new_fd();
    if (number == SYS_fsmount || number == SYS_open_tree || number == SYS_openat2) return use((int)first) ? -1 : new_fd();
    if (number == SYS_fsconfig || number == SYS_mount_setattr || number == SYS_move_mount) return use((int)first);
    if (number == SYS_landlock_add_rule || number == SYS_landlock_restrict_self) return use((int)first);
    return outcome();
}

static int stub_pipe(int ends[2]) {
    ends[0] = new_fd();
    if (ends[0] < 0) return -1;
    ends[1] = new_fd();
    if (ends[1] < 0) stub_close(ends[0]);
    return ends[1] < 0 ? -1 : 0;
}

static ssize_t stub_read(int fd, void *to, size_t size) {
    size_t length = use(fd) ? 0 : luck % (size + 1);
    memset(to, 'x', length);
    return (ssize_t)length;
}

static ssize_t stub_recv(int fd, char *to) {
    if (use(fd)) return -1;
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

/* Of a child that only shares our memory: it has done its work before we go on. */
static int stub_clone(int (*run)(void *), void *argument) {
    if (outcome() || depth == NESTED_MAX) return -1;
    if (!setjmp(child[depth++])) {
        run(argument);
        depth--;
    }
    return 1234;
}

#define syscall(...) stub_syscall(__VA_ARGS__)
#define close(fd) stub_close(fd)
#define open(path, flags) open_at(AT_FDCWD, path)
#define openat(...) open_at(__VA_ARGS__)
#define clone(run, stack, flags, argument) ((void)(stack), stub_clone(run, argument))
#define socket(...) new_fd()
#define fcntl(fd, command, ...) ((command) == F_SETFL ? use(fd) : use(fd) ? -1 : new_fd()) /* or F_DUPFD_CLOEXEC */
#define fstat(fd, found) stub_fstat(fd, found)
#define pipe2(ends, flags) stub_pipe(ends)
#define read(...) stub_read(__VA_ARGS__)
#define recv(fd, to, ...) stub_recv(fd, to)
#define write(...) use_bytes(__VA_ARGS__)
#define sendto(fd, from, size, ...) use_bytes(fd, from, size)
#define sendmsg(fd, message, flags) stub_sendmsg(fd, message)
#define bind(fd, ...) use(fd)
#define listen(fd, ...) use(fd)
#define fchdir(fd) use(fd)
#define mount(...) outcome()
#define chdir(path) use_at(AT_FDCWD, path)
#define setns(fd, flags) use(fd)
#define unshare(flags) outcome()
#define mkdirat(...) use_at(__VA_ARGS__)
#define fchownat(...) use_at(__VA_ARGS__)
#define unlinkat(...) use_at(__VA_ARGS__)
#define fdopendir(fd) (stub_close(fd), NULL)
#define sethostname(name, length) use_bytes(AT_FDCWD, name, length)
#define setrlimit(...) outcome()
#define prctl(...) outcome()
#define setfsuid(id) ((void)(id))
#define setfsgid(id) ((void)(id))
#define kill(...) ((void)outcome())
#define waitpid(...) ((void)outcome())
#define pause() abort()
#define _exit(code) stub_exit()
/* The child of a vfork goes first, in our memory; then we come back as the parent. */
#define SHOAL_RAWCLONE_H
#define raw_vfork(flags) (depth == NESTED_MAX ? -1 : setjmp(child[depth++]) ? 1234 : 0)
