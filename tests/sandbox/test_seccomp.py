"""The filter as a program, run here by a small interpreter of classic BPF: what it says to each call, without a kernel.

That the kernel obeys it is tested in tests/security.
"""

from __future__ import annotations

import ctypes.util
import errno
import platform
import struct

import pytest

from shoal.errors import InvalidRequest, Unsupported
from shoal.sandbox import seccomp
from shoal.sandbox.seccomp import compile_filter, responses

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="system call numbers here are those of x86_64")

X86_64, I386 = 0xC000003E, 0x40000003
ALLOW, KILL = 0x7FFF0000, 0x80000000
CALLS = {
    "read": 0, "ioctl": 16, "socket": 41, "socketpair": 53, "clone": 56, "execve": 59, "kill": 62, "ptrace": 101,
    "setpriority": 141, "mount": 165, "sched_setscheduler": 144, "sched_setaffinity": 203, "keyctl": 250,
    "ioprio_set": 251, "move_pages": 279, "perf_event_open": 298, "prlimit64": 302, "open_by_handle_at": 304,
    "setns": 308,
    "sched_setattr": 314, "mmap": 9, "setsockopt": 54, "shmget": 29, "prctl": 157, "sync": 162, "fadvise64": 221,
    "fcntl": 72, "madvise": 28,
    "seccomp": 317, "memfd_create": 319, "openat2": 437, "faccessat2": 439, "statx": 332,
    "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "open_tree": 428, "clone3": 435,
}  # fmt: skip
HIGH = 1 << 32
"""Bits that the kernel ignores in an `int`."""


@pytest.fixture(scope="module")
def program() -> list[tuple[int, int, int, int]]:
    return list(struct.iter_unpack("<HBBI", compile_filter()))


Program = list[tuple[int, int, int, int]]


def run(program: Program, number: int, *arguments: int, architecture: int = X86_64) -> int:
    """The action for a call."""
    six = (*arguments, *(0,) * (6 - len(arguments)))
    data = struct.pack("<IIQ6Q", number, architecture, 0, *six)
    accumulator, at = 0, 0
    while True:
        code, true, false, value = program[at]
        at += 1
        match code:
            case 0x20:  # ld [k]
                (accumulator,) = struct.unpack_from("<I", data, value)
            case 0x54:  # and #k
                accumulator &= value
            case 0x05:  # ja
                at += value
            case 0x15 | 0x25 | 0x35 | 0x45:  # jeq, jgt, jge, jset
                taken = {0x15: accumulator == value, 0x25: accumulator > value, 0x35: accumulator >= value}
                at += true if taken.get(code, bool(accumulator & value)) else false
            case 0x06:  # ret
                return value
            case _:
                pytest.fail(f"an instruction of code {code:#x}")


def call(program: Program, name: str, *arguments: int) -> int | None:
    """The errno that it is refused with; None where it is allowed."""
    action = run(program, CALLS[name], *arguments)
    if action == ALLOW:
        return None
    assert action & 0xFFFF0000 == 0x50000, hex(action)
    return action & 0xFFFF


@pytest.mark.parametrize(
    "name", ["read", "ioctl", "clone", "clone3", "execve", "kill", "ptrace", "openat2", "faccessat2", "statx"]
)
def test_ordinary_calls_pass(program: Program, name: str) -> None:
    assert call(program, name) is None


@pytest.mark.parametrize(
    "name", ["bpf", "keyctl", "perf_event_open", "userfaultfd", "io_uring_setup", "open_by_handle_at", "setns", "mount"]
)
def test_dangerous_calls_are_refused(program: Program, name: str) -> None:
    assert call(program, name) == errno.EPERM


@pytest.mark.parametrize("architecture", [I386, 0xC00000B7, 0])
@pytest.mark.parametrize("number", [0, 20, 102, 359])
def test_other_architectures_are_killed(program: Program, architecture: int, number: int) -> None:
    assert run(program, number, architecture=architecture) == KILL


@pytest.mark.parametrize("number", [0, 59, 302])
def test_the_x32_calls_are_killed_or_refused(program: Program, number: int) -> None:
    assert run(program, 0x40000000 | number, 1) != ALLOW


@pytest.mark.parametrize("name", ["socket", "socketpair"])
def test_families(program: Program, name: str) -> None:
    allowed = {family for family in range(1 << 10) if call(program, name, family) is None}
    assert allowed == {1, 2, 10, 16}
    for family in (HIGH | 40, (1 << 64) - 1):
        assert call(program, name, family) == errno.EAFNOSUPPORT
    assert call(program, name, HIGH | 1) is None, "to the kernel it is AF_UNIX"


def test_netlink_protocols(program: Program) -> None:
    allowed = {protocol for protocol in range(64) if call(program, "socket", 16, 3, protocol) is None}
    assert allowed == {0, 4}
    assert call(program, "socket", 16, 3, HIGH | 16) == errno.EPROTONOSUPPORT
    assert call(program, "socket", 1, 1, 16) is None


ON_INIT = ["prlimit64", "sched_setscheduler", "sched_setaffinity", "sched_setattr", "move_pages"]


@pytest.mark.parametrize("name", ON_INIT)
@pytest.mark.parametrize("high", [0, HIGH, 0xDEADBEEF << 32])
def test_init_is_out_of_reach(program: Program, name: str, high: int) -> None:
    """The kernel looks at the low half of a pid only."""
    assert call(program, name, high | 1, 9) == errno.EPERM
    assert call(program, name, 0, 9) is None
    assert call(program, name, 2, 9) is None


@pytest.mark.parametrize(("name", "user"), [("setpriority", 2), ("ioprio_set", 3)])
@pytest.mark.parametrize("high", [0, HIGH])
def test_priorities_of_init_neither_by_pid_nor_by_user(program: Program, name: str, user: int, high: int) -> None:
    """Init has the uid of root inside."""
    assert call(program, name, 0 if name == "setpriority" else 1, high | 1) == errno.EPERM
    assert call(program, name, high | user, 0) == errno.EPERM
    assert call(program, name, 0, 0, 5) is None


def test_protocols_of_the_internet(program: Program) -> None:
    """Any other number makes the kernel load a module."""
    for family in (2, 10):
        allowed = {protocol for protocol in range(300) if call(program, "socket", family, 1, protocol) is None}
        assert allowed == {0, 1, 6, 17, 58}
    assert call(program, "socket", 2, 1, HIGH | 132) == errno.EPROTONOSUPPORT


@pytest.mark.parametrize("number", [600, 470, 1000, 0x3FFFFFFF, 335, 400])
def test_what_it_does_not_know_is_absent(program: Program, number: int) -> None:
    """So that a libc falls back; a signal would end a program that only asks."""
    assert run(program, number) == 0x50000 | errno.ENOSYS


def test_a_call_that_a_tracer_skips_passes(program: Program) -> None:
    assert run(program, 0xFFFFFFFF) == ALLOW


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("mmap", (0, 4096, 3, 0x40022, -1 & 0xFFFFFFFF), errno.ENOMEM),
        ("memfd_create", (0, 5), errno.ENOSYS),
        ("shmget", (1, 1 << 21, 0o4600), errno.EPERM),
        ("setsockopt", (3, 1, 26), errno.ENOPROTOOPT),
        ("setsockopt", (3, HIGH | 1, HIGH | 51), errno.ENOPROTOOPT),
        ("setsockopt", (3, 6, 31), errno.ENOENT),
        ("setsockopt", (3, 41, 32), errno.ENOPROTOOPT),
        ("setsockopt", (3, 41, 26), None),
        ("prctl", (22, 2), errno.EINVAL),
        ("prctl", (67, 1), errno.EINVAL),
        ("madvise", (0, 4096, 12), errno.EINVAL),
        ("madvise", (0, 4096, 4), None),
        ("seccomp", (1, 0), errno.EINVAL),
        ("ioctl", (0, 0x5412), errno.EPERM),
        ("ioctl", (0, HIGH | 0x5423), errno.EPERM),
        ("fcntl", (3, 1024, 1), errno.EINVAL),
        ("fcntl", (3, HIGH | 1026, 1), errno.EINVAL),
        ("fcntl", (3, 1030, 1), None),
        ("fadvise64", (3, 0, 0, 4), 0),
        ("sync", (), 0),
        ("mmap", (0, 4096, 3, 0x22), None),
        ("memfd_create", (0, 1), None),
        ("shmget", (1, 1 << 21, 0o600), None),
        ("setsockopt", (3, 1, 2), None),
        ("setsockopt", (3, 6, 1), None),
        ("prctl", (22, 1), None),
        ("prctl", (38, 1), None),
        ("seccomp", (2, 0), None),
        ("ioctl", (0, 0x5401), None),
        ("fadvise64", (3, 0, 0, 3), None),
    ],
)
def test_rules_on_arguments(program: Program, name: str, arguments: tuple[int, ...], error: int | None) -> None:
    assert call(program, name, *arguments) == error


def test_an_audited_call_asks_the_listener_and_keeps_its_rules() -> None:
    audited = list(struct.iter_unpack("<HBBI", compile_filter(("socket", "mount", "execve"))))
    assert run(audited, CALLS["execve"]) == run(audited, CALLS["mount"]) == 0x7FC00000
    assert run(audited, CALLS["socket"], 2, 1, 6) == 0x7FC00000
    assert call(audited, "socket", 40, 1, 0) == errno.EAFNOSUPPORT
    assert run(audited, CALLS["read"]) == ALLOW
    assert {name: said.error for name, said in responses(("mount", "execve", "sync")).items()} == {
        "mount": errno.EPERM,
        "execve": None,
        "sync": 0,
    }


def test_what_is_no_call_cannot_be_audited() -> None:
    with pytest.raises(InvalidRequest, match="frobnicate"):
        responses(("frobnicate",))


def test_it_is_compiled_the_same_each_time() -> None:
    first = compile_filter()
    compile_filter.cache_clear()
    assert compile_filter() == first


def test_it_is_short_enough_to_cost_nothing(program: Program) -> None:
    """Seats carry it in their plans, and every call of a sandbox walks it."""
    assert len(program) < 400


def test_without_the_library_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: "libnot-there.so.9")
    seccomp._numbers.cache_clear()
    compile_filter.cache_clear()
    with pytest.raises(Unsupported, match="install libseccomp2"):
        seccomp.compile_filter()
