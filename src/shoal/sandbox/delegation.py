"""Where on a unified hierarchy with controllers a node may make its groups, and how it gets there.

Version 2 lets only leaves have processes: a group that has some can't pass the memory controller on. To pass on only
cpu and pids would work, and would make the group a threaded one, below which no process can be started any more. So the
processes of the place are moved out of the way first, into its leaf `node`. That is done only in a place that is ours:

* a group that somebody delegated to us and marked so, as systemd does with `Delegate=yes`, or one above ours;
* the root of a container's cgroup namespace;
* the real root, where no such rule holds, as for container engines without systemd.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shoal.sandbox.cgroup import CONTROLLERS, Hierarchies

_LEAF: Final = "node"
_TRIES: Final = 20
_MARKS: Final = ("trusted.delegate", "user.delegate")


def take_place(found: Hierarchies) -> Hierarchies:
    """The hierarchies with the place for groups as `unified`; without version-2 controllers where there is none."""
    if found.unified is None:
        return found
    for place in _places(found.unified):
        with contextlib.suppress(OSError):
            # Not our own group's controllers: it may be a leaf that gets none.
            offered = frozenset((place / "cgroup.controllers").read_text().split()) - frozenset(found.v1)
            if offered.intersection(CONTROLLERS) and _vacate(place):
                home = place / _LEAF if place == found.unified and _is_ruled(place) else found.unified
                return Hierarchies(found.v1, place, offered, home)
    return Hierarchies(found.v1, found.unified, frozenset())


def _places(own: Path) -> Iterator[Path]:
    """The nearest first; each at most once."""
    tree = [own]
    while (tree[-1].parent / "cgroup.procs").exists():
        tree.append(tree[-1].parent)
    yield from (place for place in tree if _is_delegated(place))
    if not _is_delegated(tree[-1]):
        yield tree[-1]


def _is_delegated(place: Path) -> bool:
    for mark in _MARKS:
        with contextlib.suppress(OSError):
            if os.getxattr(place, mark) == b"1":
                return True
    return False


def _is_ruled(place: Path) -> bool:
    """Whether it must not have processes; the real root, which alone has no type, may."""
    return (place / "cgroup.type").exists()


def _vacate(place: Path) -> bool:
    """Whether the place can pass controllers on, now that no process is in it."""
    if not os.access(place / "cgroup.subtree_control", os.W_OK):
        return False
    if not _is_ruled(place):
        return True
    if (place / "cgroup.type").read_text() != "domain\n":
        return False
    for _ in range(_TRIES):  # what is moved may have forked just before
        members = (place / "cgroup.procs").read_text().split()
        if not members:
            return True
        (place / _LEAF).mkdir(exist_ok=True)
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                (place / _LEAF / "cgroup.procs").write_text(pid)
    return False
