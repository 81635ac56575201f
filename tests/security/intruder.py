"""Ways to attack a sandbox from inside, and to look at it from the host."""

from __future__ import annotations

import json
import os
import platform
import re
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.node.local import LocalNode
from shoal.sandbox.box import NamespaceBox
from shoal.sdk.embedded import engine
from shoal.types import MiB, Profile

SMALL = Profile(cpu=2, memory=192 * MiB, disk=64 * MiB, processes=64, inodes=4096, open_files=1024)
USERS = ("root", "user")

x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the attack is written for x86_64")

_PRELUDE = """
import ctypes, errno, json, os, resource, signal, socket, struct, sys, time
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

def call(number, *arguments):
    "The name of its errno, or 'ok'."
    ctypes.set_errno(0)
    plain = [a if not isinstance(a, int) else ctypes.c_long(a) for a in arguments]
    failed = _libc.syscall(ctypes.c_long(number), *plain) == -1
    return errno.errorcode.get(ctypes.get_errno(), str(ctypes.get_errno())) if failed else "ok"

def tried(action, *arguments, **options):
    "The same for a function of Python."
    try:
        action(*arguments, **options)
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error.errno))
    return "ok"

def answer(value):
    print(json.dumps(value))
"""


def python(box: shoal.Sandbox, code: str, user: str = "root", timeout: float = 20) -> Any:
    """What a Python program inside passes to `answer`. It has `call`, `tried` and the usual modules."""
    program = _PRELUDE + textwrap.dedent(code)
    result = box.commands.run(["python3", "-c", program], user=user, timeout=timeout, cwd="/")
    assert result.exit_code == 0, f"{result.exit_code} {result.signal} {result.limit}\n{result.stdout}\n{result.stderr}"
    return json.loads(result.stdout.splitlines()[-1])


def compiled(box: shoal.Sandbox, source: str) -> str:
    """A program inside made of this C, at a path that every user may execute."""
    name = f"/tmp/attack-{abs(hash(source))}"
    box.files.write(f"{name}.c", "#define _GNU_SOURCE\n" + textwrap.dedent(source))
    box.commands.run(["gcc", "-O1", "-w", "-o", name, f"{name}.c"], check=True, timeout=30)
    return name


def still_works(box: shoal.Sandbox) -> None:
    """Commands start and end, files are read and written, and by the clock of the caller, not only by its own."""

    def look() -> None:
        assert box.commands.run(["/bin/echo", "alive"], timeout=10).stdout == "alive\n"
        box.files.write("/tmp/alive", "yes")
        assert box.files.read("/tmp/alive") == "yes"

    within(15, look)


def within(seconds: float, action: Callable[[], object]) -> None:
    """Fails, instead of hanging, when a call does not come back."""
    failure: list[BaseException] = []

    def act() -> None:
        try:
            action()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"no answer within {seconds} s"
    if failure:
        raise failure[0]


# The host's side


def node() -> LocalNode:
    return engine().node


def init_pid(box: shoal.Sandbox) -> int:
    """Of the sandbox's PID 1, as the host counts."""
    live = node()._find(box.id).box
    assert isinstance(live, NamespaceBox)
    text = Path(f"/proc/self/fdinfo/{live._pidfd}").read_text()
    return int(text.partition("Pid:")[2].split()[0])


def host_pids(box: shoal.Sandbox) -> list[int]:
    """Of all its processes."""
    space = Path(f"/proc/{init_pid(box)}/ns/pid").readlink()
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and Path(f"/proc/{entry}/ns/pid").readlink() == space:
                found.append(int(entry))
        except OSError:
            continue
    return found


def host_ids(pid: int, kind: str = "Uid") -> list[int]:
    text = Path(f"/proc/{pid}/status").read_text()
    line = re.search(rf"^{kind}:(.*)$", text, re.MULTILINE)
    assert line is not None
    return [int(number) for number in line[1].split()]


def host_available() -> int:
    """Bytes of memory that the host can still give."""
    line = re.search(r"^MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert line is not None
    return int(line[1]) * 1024
