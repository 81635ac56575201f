/* A vfork that can also share the descriptor table.
 *
 * The child runs on our stack and in our memory until it execs or exits, and we stand still meanwhile. The system
 * call must be inline: had it a frame of its own, the child would return through it and overwrite what we return
 * through later. Callers may not return from the function that called this, in the child. */
#ifndef SHOAL_RAWCLONE_H
#define SHOAL_RAWCLONE_H

#include <errno.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <sys/types.h>

static inline __attribute__((always_inline)) long raw_clone3(struct clone_args *args) {
    long result;
#if defined __x86_64__
    register long size __asm__("rsi") = sizeof *args;
    __asm__ volatile("syscall" : "=a"(result) : "a"(SYS_clone3), "D"(args), "r"(size) : "rcx", "r11", "memory");
#elif defined __aarch64__
    register long number __asm__("x8") = SYS_clone3;
    register long first __asm__("x0") = (long)args;
    register long second __asm__("x1") = sizeof *args;
    __asm__ volatile("svc 0" : "+r"(first) : "r"(number), "r"(second) : "memory");
    result = first;
#else
#error "raw_clone3 is written for x86_64 and aarch64"
#endif
    return result;
}

/* In the child 0, in the parent a pid or -1 and errno. What the child does must be in a function of its own that does not
 * return: the compiler does not know that we come back twice, and would share our stack slots with its variables. */
static inline __attribute__((always_inline)) pid_t raw_vfork(uint64_t flags) {
    struct clone_args args = {.flags = flags | CLONE_VM | CLONE_VFORK, .exit_signal = SIGCHLD};
    long result = raw_clone3(&args);
    if (result >= 0) return (pid_t)result;
    errno = (int)-result;
    return -1;
}

#endif
