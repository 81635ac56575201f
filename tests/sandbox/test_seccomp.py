"""The filter as a program, run here by a small interpreter of classic BPF: what it says to each call, without a kernel.

That the kernel obeys it is tested in tests/security.
"""

from __future__ import annotations

import ctypes.util
import errno
import platform
import struct

import pytest

from shoal.errors import Unsupported
from shoal.sandbox import seccomp
from shoal.sandbox.seccomp import compile_filter

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="system call numbers here are those of x86_64")

X86_64, I386 = 0xC000003E, 0x40000003
ALLOW, KILL = 0x7FFF0000, 0x80000000
CALLS = {
    "read": 0, "ioctl": 16, "socket": 41, "socketpair": 53, "clone": 56, "execve": 59, "kill": 62, "ptrace": 101,
    "setpriority": 141, "mount": 165, "sched_setscheduler": 144, "sched_setaffinity": 203, "keyctl": 250,
    "ioprio_set": 251, "move_pages": 279, "perf_event_open": 298, "prlimit64": 302, "open_by_handle_at": 304,
    "setns": 308,
    "sched_setattr": 314, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "open_tree": 428, "clone3": 435,
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
    data = struct.pack("<iIQ6Q", number, architecture, 0, *six)
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


@pytest.mark.parametrize("name", ["read", "ioctl", "clone", "clone3", "execve", "kill", "ptrace"])
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
    for family in (HIGH | 40, HIGH | 1, (1 << 64) - 1):
        assert call(program, name, family) == errno.EAFNOSUPPORT


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


def test_it_is_compiled_the_same_each_time() -> None:
    assert compile_filter() == compile_filter()


def test_it_is_short_enough_to_cost_nothing(program: Program) -> None:
    """Seats carry it in their plans, and every call of a sandbox walks it."""
    assert len(program) < 400


def test_without_the_library_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: "libnot-there.so.9")
    with pytest.raises(Unsupported, match="install libseccomp2"):
        seccomp.compile_filter()
