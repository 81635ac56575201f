"""What sandboxes leave traces in: processes, namespaces, mounts, cgroups and files of one node."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from shoal.bench.memory import descendants

_CGROUPS: Final = Path("/sys/fs/cgroup")


class Footprint(Struct, frozen=True):
    """What a node with live sandboxes consists of, to be looked for when it has ended."""

    processes: frozenset[tuple[int, str]]
    """(pid, start time), since pids come again."""
    namespaces: frozenset[str]
    """As "net:[4026532000]"."""


class Surroundings(Struct, frozen=True):
    """What can be listed at any time."""

    mounts: frozenset[str]
    cgroups: frozenset[str]
    files: frozenset[str]
    descriptors: int
    """Open in the node's process. A socket made in a network namespace keeps that alive."""


def footprint(node: int) -> Footprint:
    """Of the processes below the process `node`, and of their namespaces, as far as they are not its own."""
    pids = descendants(node)
    processes = frozenset((pid, start) for pid in pids if (start := _start(pid)))
    return Footprint(processes, frozenset(_namespaces(pids)) - frozenset(_namespaces([node])))


def remaining(before: Footprint, node: int) -> tuple[int, int]:
    """How many of its processes still run, and how many of its namespaces these or the node's own process hold.

    Only theirs: numbers of namespaces come again at once, and elsewhere the same number is another namespace.
    """
    alive = [pid for pid, start in before.processes if _start(pid) == start]
    held = frozenset(_namespaces([*alive, node])) | frozenset(_opened([*alive, node]))
    return len(alive), len(before.namespaces & held)


def surroundings(own: Path, shared: Path, node: int) -> Surroundings:
    """Files and mounts below a folder of this node's own; of what it shares with others, what bears its pid."""
    name = f"shoal-{node}-"
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return Surroundings(
        mounts=frozenset(line for line in mounts if str(own) in line or name in line),
        cgroups=frozenset(str(path) for path in _CGROUPS.glob(f"**/{name}*")),
        files=frozenset((*_below(own), *(path for path in _below(shared) if name in path))),
        descriptors=sum(1 for _ in _opened([node])),
    )


def _below(place: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(place):
        yield from (os.path.join(folder, name) for name in (*folders, *files))


def _start(pid: int) -> str:
    """ "" if it is gone or a zombie, which holds nothing."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    return ""


def _namespaces(pids: Iterable[int]) -> Iterator[str]:
    for pid in pids:
        with suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/ns"):
                with suppress(OSError):
                    yield str(Path(f"/proc/{pid}/ns/{name}").readlink())


def _opened(pids: Iterable[int]) -> Iterator[str]:
    """What their descriptors lead to; among it namespaces that no process is in."""
    for pid in pids:
        with suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    yield str(Path(f"/proc/{pid}/fd/{name}").readlink())
