"""With pure version 2, as most machines have it now: every limit is a file of the one tree.

`make test-cgroup2` runs this in a guest; on a machine with version 1 it has nothing to look at.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import residue
import shoal
from shoal.node import facts
from shoal.types import MiB

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(facts.cgroup_mode() != "v2", reason="cgroup version 1 is in use here, see `shoal doctor`"),
]

PROFILE = shoal.Profile(cpu=0.5, memory=64 * MiB, disk=16 * MiB, inodes=1024, processes=9)


@pytest.fixture
def small(shoal_home: object) -> Iterator[shoal.Sandbox]:
    with shoal.Sandbox.create(profile=PROFILE) as box:
        yield box


def command_group(box: shoal.Sandbox) -> Path:
    """Of a command that runs while the block does."""
    mark = f"61.{time.monotonic_ns() % 10**6}"
    handle = box.commands.run(["sleep", mark], background=True)
    found = residue.settled(lambda: not _pids(mark)) or _pids(mark)
    assert found
    (pid,) = _pids(mark)
    path = Path(f"/proc/{pid}/cgroup").read_text().strip().removeprefix("0::/")
    handle.kill()
    handle.wait()
    return Path("/sys/fs/cgroup", path)


def _pids(mark: str) -> list[int]:
    found = []
    for process in residue.processes():
        try:
            if mark in Path(f"/proc/{process.pid}/cmdline").read_text() and process.name == "sleep":
                found.append(process.pid)
        except OSError:
            continue
    return found


def test_every_limit_is_on_the_unified_tree(small: shoal.Sandbox) -> None:
    assert small.info().unenforced == ()
    command = command_group(small)
    commands, box = command.parent, command.parent.parent
    assert commands.name == "cmd"
    assert (commands / "memory.max").read_text().strip() == str((64 + 16 + 1) * MiB)
    assert (commands / "memory.swap.max").read_text().strip() == "0"
    assert (commands / "pids.max").read_text().strip() == "9"
    assert (box / "cpu.max").read_text() == "50000 100000\n"
    assert (box / "cpu.weight").read_text() == "100\n"
    assert not (command / "memory.max").exists(), "a command's group takes no controller's memory of its own"


def test_init_is_outside_of_what_its_commands_may_take(small: shoal.Sandbox) -> None:
    box = command_group(small).parent.parent
    assert (box / "init" / "cgroup.procs").read_text().split()
    assert (box / "init" / "memory.max").read_text() == "max\n"
    assert not (box / "cgroup.procs").read_text()


def test_a_command_that_was_killed_spoils_its_group_for_no_other(small: shoal.Sandbox) -> None:
    for _ in range(5):
        assert small.commands.run("(setsid sleep 60 &); sleep 60", timeout=0.3).limit == "timeout"
        assert small.commands.run("exit 3").exit_code == 3


def test_cpu_time_of_a_command_is_its_own(small: shoal.Sandbox) -> None:
    busy = small.commands.run("timeout 1 sh -c 'while :; do :; done'", timeout=30)
    idle = small.commands.run("true")
    assert busy.cpu_seconds > 0.2
    assert idle.cpu_seconds < busy.cpu_seconds


def test_nothing_inside_tells_of_the_groups_outside(small: shoal.Sandbox) -> None:
    shown = small.commands.run("cat /proc/self/cgroup /proc/1/cgroup").stdout
    assert len(shown.splitlines()) == 2
    for word in ("shoal", "slice", "service", "..", str(os.getpid())):
        assert word not in shown
