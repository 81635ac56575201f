"""Jobs about processes that are in the way: a hostile neighbour, and children that outlive their command."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Final

from shoal import Sandbox
from shoal.bench.figures import Sample
from shoal.bench.job import Job, Place, milliseconds
from shoal.errors import SandboxGone

_HOSTILE: Final = (
    "bomb() { bomb | bomb & }; while :; do bomb; sleep 0.1; done",
    "while :; do tail /dev/zero; done",
    "yes",
)
_WARM_SECONDS: Final = 1.0
_AT_ONCE: Final = 8
_CHILD_SECONDS: Final = 0.2
_PATIENCE: Final = 30.0
_COUNT: Final = """
processes=0 zombies=0
for status in /proc/[0-9]*/status; do
    state=$(grep -s ^State: "$status") || continue
    processes=$((processes + 1))
    case $state in *Z*) zombies=$((zombies + 1));; esac
done
echo $processes $zombies
"""
_OWN: Final = 2
"""init and the shell that counts."""


@contextmanager
def neighbour(_: Place) -> Iterator[Job]:
    """`true` in one sandbox while another does its worst; its `yes` writes to the node all the time."""
    with (
        Sandbox.create() as box,
        ThreadPoolExecutor(len(_HOSTILE)) as threads,
        Sandbox.create(profile="small") as hostile,  # ended first, and with it what the threads wait for
    ):
        for command in _HOSTILE:
            threads.submit(_endure, hostile, command)
        time.sleep(_WARM_SECONDS)
        command = "box.commands.run(['true']) beside a sandbox with a fork bomb, a memory hog and yes"
        yield Job(command, lambda: milliseconds(lambda: box.commands.run(["true"], check=True)))


def _endure(box: Sandbox, command: str) -> None:
    with suppress(SandboxGone):
        while True:
            box.commands.run(command)


@contextmanager
def reap(place: Place) -> Iterator[Job]:
    """Each command leaves a child behind that ends after it. Counted inside, once all had time to end."""
    command = f"{place.cycles} x box.commands.run('sleep {_CHILD_SECONDS} & exit 0'); processes and zombies after that"
    yield Job(command, lambda: _reap(place.cycles))


def _reap(cycles: int) -> Sample:
    with Sandbox.create() as box, ThreadPoolExecutor(_AT_ONCE) as threads:
        list(threads.map(lambda _: _leave_behind(box), range(cycles)))
        end = time.monotonic() + _PATIENCE
        while (left := _count(box))["processes"] and time.monotonic() < end:
            time.sleep(_CHILD_SECONDS)
    return Sample(left["processes"], left)


def _leave_behind(box: Sandbox) -> None:
    box.commands.run(f"sleep {_CHILD_SECONDS} & exit 0", check=True)


def _count(box: Sandbox) -> dict[str, float]:
    """What is there beside init and those that count; zombies are among the processes."""
    processes, zombies = map(int, box.commands.run(_COUNT, check=True).stdout.split())
    return {"processes": float(processes - _OWN), "zombies": float(zombies)}
