"""The socket by which a session's shell tells how a command ended: forging, robbing and stopping it from inside.

Root inside may do what it likes to its own shell. What must hold: a program cannot have the node take a status for the
shell's, no result counts for another command, nothing hangs, and the sandbox goes on.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import shoal

from .intruder import USERS, compiled, still_works, within, x86_64

pytestmark = pytest.mark.root


@pytest.fixture
def session(small: shoal.Sandbox) -> Iterator[shoal.Shell]:
    with small.shell() as shell:
        yield shell


# A program started by the session, whose parent is the shell. `marks` finds what the shell waits to say in its memory.
PRELUDE = """
import ctypes, errno, os, re, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
shell = os.getppid()
def sockets():
    found = []
    for name in os.listdir(f"/proc/{shell}/fd"):
        if os.readlink(f"/proc/{shell}/fd/{name}").startswith("socket:"): found.append(int(name))
    return found
def marks():
    found = set()
    with open(f"/proc/{shell}/maps") as maps, open(f"/proc/{shell}/mem", "rb", buffering=0) as memory:
        for line in maps:
            area, rights, *_ = line.split()
            if "rw" not in rights: continue
            first, last = (int(part, 16) for part in area.split("-"))
            try: memory.seek(first); data = memory.read(last - first)
            except (OSError, ValueError): continue
            found |= set(re.findall(rb"printf '.n%s %s %s.n' ([0-9a-f]{16})", data))
    return [mark.decode() for mark in found]
def stolen():
    "The shell's own socket, by the descriptor of another process."
    pidfd = libc.syscall(434, shell, 0)
    for number in sockets():
        got = libc.syscall(438, pidfd, number, 0)
        if got >= 0: return socket.socket(fileno=got)
    raise OSError(ctypes.get_errno(), "not stolen")
"""


def attack(session: shoal.Shell, code: str, after: str = "", timeout: float = 20) -> shoal.Result:
    text = f"python3 - <<'ATTACK'\n{PRELUDE}{code}\nATTACK\n{after}"
    results: list[shoal.Result] = []
    within(timeout + 15, lambda: results.append(session.run(text, timeout=timeout)))
    return results[0]


def goes_on(session: shoal.Shell) -> None:
    """Every command has its own output and its own code."""
    for number in range(1, 6):
        result = session.run(f"echo {number}; (exit {number})", timeout=10)
        assert (result.exit_code, result.stdout) == (number, f"{number}\n")


def test_programs_inherit_no_descriptor_of_it(session: shoal.Shell) -> None:
    for text in (
        "readlink /proc/self/fd/*",
        "(exec readlink /proc/self/fd/*)",
        "x=$(readlink /proc/self/fd/*); echo $x",
        "readlink /proc/self/fd/* | cat",
        "f() { readlink /proc/self/fd/*; }; f",
        "cat <(readlink /proc/self/fd/*)",
        "coproc { readlink /proc/self/fd/* > /tmp/co; }; wait; cat /tmp/co",
        "trap 'readlink /proc/self/fd/*' USR1; kill -USR1 $$; trap - USR1",
        "readlink /proc/self/fd/* & wait",
    ):
        result = session.run(text, timeout=10)
        assert "socket" not in result.stdout, text
        assert "pipe" in result.stdout, text


def test_the_socket_cannot_be_opened_by_proc(session: shoal.Shell) -> None:
    result = attack(
        session,
        """
assert sockets()
for number in sockets():
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_PATH):
        try: fd = os.open(f"/proc/{shell}/fd/{number}", flags)
        except OSError as error: print(errno.errorcode[error.errno])
        else:
            try: os.write(fd, b"x"); print("wrote")
            except OSError as error: print(errno.errorcode[error.errno])
""",
    )
    assert set(result.stdout.split()) <= {"ENXIO", "EBADF"}, result.stdout
    goes_on(session)


@x86_64
def test_a_status_that_a_program_writes_is_dropped(session: shoal.Shell) -> None:
    """It has the shell's own socket, knows the mark, and writes what the shell would, early and often."""
    result = attack(
        session,
        """
sock, found = stolen(), marks()
assert found
for mark in found:
    for _ in range(100): sock.send(f"{mark}\\n{mark} 0 hBs\\n".encode())
print("forged", len(found) > 0)
time.sleep(0.5)
sys.exit(7)
""",
        "echo after $?; (exit 9)",
    )
    assert (result.exit_code, result.stdout) == (9, "forged True\nafter 7\n")
    goes_on(session)


@x86_64
def test_a_program_that_is_left_behind_forges_for_later_commands(session: shoal.Shell) -> None:
    code = """
sock = stolen()
if os.fork(): os._exit(0)
end = time.monotonic() + 8
while time.monotonic() < end:
    for mark in marks():
        sock.send(f"{mark} 0 hBs\\n{mark} 0 hBs\\n".encode())
"""
    attack(session, code)
    for _ in range(3):
        goes_on(session)


@x86_64
def test_credentials_cannot_be_forged(session: shoal.Shell) -> None:
    """SCM_CREDENTIALS with the shell's pid needs CAP_SYS_ADMIN, and descriptors that are sent along go nowhere."""
    result = attack(
        session,
        """
sock = stolen()
for pid in (shell, 1):
    try: sock.sendmsg([b"x 0 h\\n"], [(socket.SOL_SOCKET, 2, struct.pack("iII", pid, 0, 0))])
    except OSError as error: print(errno.errorcode[error.errno])
    else: print("sent")
for _ in range(50):
    sock.sendmsg([b"x\\n"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("3i", 0, 1, 2))])
""",
    )
    assert result.stdout == "EPERM\nEPERM\n"
    goes_on(session)


@x86_64
def test_the_next_command_stolen_from_the_socket(session: shoal.Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell never gets it: that is said within a bound, and not by silence for ever."""
    from shoal.node import shells

    monkeypatch.setattr(shells, "_BEGIN_SECONDS", 2.0)
    attack(
        session,
        """
sock = stolen()
if os.fork(): os._exit(0)
os.setsid()
while sock.recv(65536): pass
""",
    )

    def run() -> None:
        for _ in range(3):  # the shell may win the first
            session.run("echo x")

    def refused() -> None:
        with pytest.raises(shoal.SessionClosed):
            run()

    within(30, refused)


@pytest.mark.parametrize("code", ["os.kill(shell, signal.SIGSTOP)", "os.kill(shell, signal.SIGKILL)"])
def test_the_shell_stopped_or_killed_by_its_program(small: shoal.Sandbox, session: shoal.Shell, code: str) -> None:
    result = attack(session, f"{code}\ntime.sleep(30)", timeout=2)
    assert (result.exit_code, result.signal) == (None, 9)
    assert session.closed
    with pytest.raises(shoal.SessionClosed):
        session.run("true")
    still_works(small)


TRACER = """
#include <stdio.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>
/* Attaches to the shell, lets it go on, and changes the exit status that it is about to write. */
int main(int argc, char **argv) {
    pid_t shell = atoi(argv[1]);
    int status;
    if (ptrace(PTRACE_ATTACH, shell, 0, 0)) { perror("attach"); return 3; }
    waitpid(shell, &status, 0);
    for (int i = 0; i < atoi(argv[2]); i++) {
        ptrace(PTRACE_SYSCALL, shell, 0, 0);
        if (waitpid(shell, &status, 0) < 0 || WIFEXITED(status) || WIFSIGNALED(status)) return 0;
    }
    if (argc > 3) { ptrace(PTRACE_KILL, shell, 0, 0); return 0; }
    ptrace(PTRACE_DETACH, shell, 0, 0);
    return 0;
}
"""


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("end", ["", "kill"])
def test_the_shell_traced_by_its_own_user(small: shoal.Sandbox, user: str, end: str) -> None:
    """It may be slowed, and it may be killed: then its own command says so. Results are never another's."""
    tracer = compiled(small, TRACER)
    with small.shell(user=user) as session:
        session.run(f"{tracer} $$ 40 {end} >/dev/null 2>&1 &", timeout=10)

        def run() -> None:
            for number in range(30):
                result = session.run(f"echo {number}; (exit {number})", timeout=10)
                if result.signal is not None or session.closed:
                    break
                assert (result.exit_code, result.stdout) == (number, f"{number}\n")

        def tolerate() -> None:
            try:
                run()
            except shoal.SessionClosed:
                assert end

        within(60, tolerate)
    still_works(small)


def test_a_shell_that_says_much_about_nothing(small: shoal.Sandbox, session: shoal.Shell) -> None:
    """The shell itself floods its socket: nothing is believed, and the node's memory does not grow with it."""
    flood = (
        "i=0; while [ $i -lt 30000 ]; do printf 'deadbeefdeadbeef 0 hBs\\nx' >&10; i=$((i+1)); done; echo end; (exit 4)"
    )
    result = session.run(flood, timeout=60)
    assert (result.exit_code, result.stdout) == (4, "end\n")
    goes_on(session)
    endless = session.run("while :; do printf %5000s >&10; done", timeout=1)
    assert endless.limit == "timeout"
    goes_on(session)
    still_works(small)


def test_a_shell_that_answers_for_itself_early(session: shoal.Shell) -> None:
    """It ends its own command with another code than it has. What is still to come of it counts for no later one."""
    find = f"python3 - <<'FIND' > /tmp/marks\n{PRELUDE}print(*marks())\nFIND\n"
    forge = "for m in $(< /tmp/marks); do printf '\\n%s 3 hBs\\n' $m >&10; done; sleep 0.3; echo late; (exit 8)"
    text = find + forge
    assert session.run(text, timeout=20).exit_code == 3
    for number in range(3):
        result = session.run(f"echo {number}; (exit {number})", timeout=10)
        assert result.exit_code == number
        assert result.stdout.endswith(f"{number}\n")


@pytest.mark.parametrize("path", ["/dev/null", "/dev/stdin"])
def test_devices_that_are_something_else(small: shoal.Sandbox, session: shoal.Shell, path: str) -> None:
    """A FIFO holds up whoever opens it: the command has a limit, the session an end."""
    small.commands.run(f"rm {path}; mkfifo {path}", check=True)
    within(30, lambda: session.run("echo x", timeout=1))
    still_works(small)


def test_a_fork_bomb_in_a_session(small: shoal.Sandbox, session: shoal.Shell) -> None:
    within(40, lambda: session.run(":(){ :|:& };:; sleep 60", timeout=3))
    still_works(small)
