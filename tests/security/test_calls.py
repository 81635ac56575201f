"""The filter of system calls as programs meet it: what goes on, what falls back, and what is done in name only."""

from __future__ import annotations

import errno

import pytest

import shoal

from .intruder import USERS, compiled, python, x86_64

pytestmark = [pytest.mark.root, x86_64]


@pytest.mark.parametrize("user", USERS)
def test_calls_of_a_kernel_to_come_are_absent(calm: shoal.Sandbox, user: str) -> None:
    code = "answer([call(number, 1, 2, 3) for number in (470, 499, 512, 600, 4095, 400, 1 << 20)])"
    assert set(python(calm, code, user)) == {"ENOSYS"}


def test_a_libc_that_falls_back_does(small: shoal.Sandbox) -> None:
    """As one would that knows a call of tomorrow, and those of today have to work."""
    source = """
    #include <errno.h>
    #include <fcntl.h>
    #include <linux/openat2.h>
    #include <linux/sched.h>
    #include <pthread.h>
    #include <signal.h>
    #include <stdio.h>
    #include <sys/stat.h>
    #include <sys/syscall.h>
    #include <sys/wait.h>
    #include <unistd.h>
    static void *run(void *x) { *(int *)x = 1; return 0; }
    int main() {
        int opened = syscall(999, AT_FDCWD, "/etc/passwd");
        if (opened < 0 && errno == ENOSYS) opened = open("/etc/passwd", O_RDONLY);
        struct open_how how = {.flags = O_RDONLY, .resolve = RESOLVE_NO_MAGICLINKS};
        struct statx x;
        struct clone_args args = {.exit_signal = SIGCHLD};
        int second = syscall(SYS_openat2, AT_FDCWD, "/etc/passwd", &how, sizeof how), threaded = 0, status;
        int seen = statx(AT_FDCWD, "/etc/passwd", 0, STATX_ALL, &x);
        int accessible = syscall(439, AT_FDCWD, "/etc/passwd", 4, 0x200);
        pthread_t thread;
        pthread_create(&thread, 0, run, &threaded);
        pthread_join(thread, 0);
        int child = syscall(SYS_clone3, &args, sizeof args);
        if (!child) _exit(7);
        waitpid(child, &status, 0);
        printf("%d %d %d %d %d %d", opened > 2, second > 2, seen, accessible, threaded, WEXITSTATUS(status));
    }
    """
    for user in USERS:
        assert small.commands.run([compiled(small, source)], user=user).stdout == "1 1 0 0 1 7"


def test_debuggers_work_within(small: shoal.Sandbox) -> None:
    """A tracer that skips a call puts -1 in its place, which must not kill."""
    source = """
    #include <errno.h>
    #include <stdio.h>
    #include <sys/ptrace.h>
    #include <sys/syscall.h>
    #include <sys/user.h>
    #include <sys/wait.h>
    #include <unistd.h>
    int main() {
        int child = fork(), status;
        if (!child) {
            ptrace(PTRACE_TRACEME);
            raise(19);
            _exit(syscall(SYS_getppid) == 4321 ? 42 : 1);
        }
        waitpid(child, &status, 0);
        for (int entered = 0; ptrace(PTRACE_SYSCALL, child, 0, 0), waitpid(child, &status, 0), WIFSTOPPED(status); ) {
            struct user_regs_struct r;
            ptrace(PTRACE_GETREGS, child, 0, &r);
            if (entered) { r.rax = 4321; entered = 0; }
            else if (r.orig_rax == SYS_getppid && r.rax == -ENOSYS) { r.orig_rax = -1; entered = 1; }
            else continue;
            ptrace(PTRACE_SETREGS, child, 0, &r);
        }
        return WEXITSTATUS(status);
    }
    """
    result = small.commands.run([compiled(small, "#include <signal.h>\n" + source)], timeout=10)
    assert (result.exit_code, result.signal) == (42, None)


def test_sync_is_done_in_name_only(calm: shoal.Sandbox) -> None:
    """It would write out the host's file systems and wait for them; a second of dirty data a call, on a busy disk."""
    assert python(calm, "answer([call(162) for _ in range(50)])") == ["ok"] * 50
    assert calm.commands.run("sync && echo done").stdout == "done\n"


@pytest.mark.parametrize("user", USERS)
def test_no_module_is_loaded_by_asking(calm: shoal.Sandbox, user: str) -> None:
    """For a protocol, a line discipline or a layer over TCP the kernel would fetch code that is seldom tried."""
    code = """
    import fcntl, pty
    found = {}
    for family in (2, 10):
        for kind in (1, 2, 3, 5, 6):
            for protocol in (2, 33, 46, 50, 115, 132, 136, 255, 256, 262):
                found[f"{family} {kind} {protocol}"] = call(41, family, kind, protocol)
    _, terminal = pty.openpty()
    lines = {tried(fcntl.ioctl, terminal, 0x5423, struct.pack("i", number)) for number in range(2, 32)}
    typed = tried(fcntl.ioctl, terminal, 0x5412, b"x")
    ulp = tried(socket.socket().setsockopt, 6, 31, b"tls")
    answer([sorted(set(found.values())), sorted(lines), typed, ulp])
    """
    protocols, lines, typed, ulp = python(calm, code, user)
    assert protocols == ["EPROTONOSUPPORT"]
    assert lines == ["EPERM"]
    assert (typed, ulp) == ("EPERM", errno.errorcode[errno.ENOENT])


def test_nobodys_pages_become_one(calm: shoal.Sandbox) -> None:
    code = """
    import mmap
    answer([tried(mmap.mmap(-1, 1 << 16).madvise, 12), call(157, 67, 1, 0, 0, 0)])
    """
    assert python(calm, code) == ["EINVAL", "EINVAL"]
