"""What a sandbox changed, read from the writable layers of its overlay mounts, from outside.

The trees are hostile: they are walked by descriptor, no link is followed, and the upper may change under the walk.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Final, Literal, NamedTuple

from shoal.errors import LimitExceeded
from shoal.types import Change

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DEPTH_MAX: Final = 200
"""Each level takes frames of this interpreter and a descriptor of the node for every layer."""
_PATHS_MAX: Final = 64 << 20
"""A million long names at the bottom of 200 long folders would be 50 GB of text."""
Kind = Literal["added", "changed", "removed"]
_OPAQUE: Final = "user.overlay.opaque"


class Stamped(NamedTuple):
    """A change, and a number that is another one once the path has been changed again."""

    change: Change
    stamp: int


Changes = Mapping[str, Stamped]
"""By path."""


def find_changes(upper: int, mounts: Sequence[str], lowers: Sequence[Sequence[int]]) -> Changes:
    """All paths that differ from the layers. LimitExceeded where directories are nested too deep to be walked.

    `upper` holds `up<n>` for the n-th of `mounts`, whose read-only layers are `lowers[n]`, highest first: directory
    descriptors that stay the caller's.
    """
    found: dict[str, Stamped] = {}
    room = _PATHS_MAX
    for index, target in enumerate(mounts):
        with ExitStack() as stack, suppress(FileNotFoundError):
            below = [_open(stack, ".", layer) for layer in lowers[index]]
            top = _open(stack, f"up{index}", upper)
            for entry in _walk(top, below, target.rstrip("/"), _DEPTH_MAX):
                found[entry.change.path] = entry
                if (room := room - len(entry.change.path)) < 0:
                    raise LimitExceeded("characters in the paths of what changed", _PATHS_MAX)
    return found


def count_changes(before: Changes, after: Changes) -> dict[str, int]:
    """How many paths were added, changed and removed between two looks at one sandbox."""
    counts = {"added": 0, "changed": 0, "removed": 0}
    for path in before.keys() | after.keys():
        old, new = before.get(path), after.get(path)
        if old != new:
            counts[_kind_between(old and old.change.kind, new and new.change.kind)] += 1
    return counts


def _kind_between(old: Kind | None, new: Kind | None) -> Kind:
    """From the kinds of a path against the layers at two times; None where it was as in the layers."""
    if old is None and new is not None:
        return new
    if old == "removed":
        return "added"
    return "removed" if new == "removed" or (old == "added" and new is None) else "changed"


def _open(stack: ExitStack, name: str, parent: int) -> int:
    descriptor = os.open(name, _DIRECTORY, dir_fd=parent)
    stack.callback(os.close, descriptor)
    return descriptor


def _walk(top: int, below: Sequence[int], path: str, depth: int) -> Iterator[Stamped]:
    """`below`: the same directory in the layers that have it and are not hidden."""
    if not depth:
        raise LimitExceeded(f"levels of directories at {path[:200]}", _DEPTH_MAX)
    with os.scandir(top) as entries:
        for entry in entries:
            with suppress(FileNotFoundError, NotADirectoryError):  # the sandbox goes on living
                yield from _compare(top, below, entry.name, f"{path}/{entry.name}", depth)


def _compare(top: int, below: Sequence[int], name: str, path: str, depth: int) -> Iterator[Stamped]:
    info = os.stat(name, dir_fd=top, follow_symlinks=False)
    if _is_whiteout(info):
        yield Stamped(Change(path, "removed", 0), 0)
        return
    old = _lookup(below, name)
    if stat.S_ISDIR(info.st_mode):
        yield from _compare_directory(top, below, name, path, info, old, depth)
        return
    if old is not None and stat.S_ISDIR(old.st_mode):
        yield from _removed_below(below, name, path, set())
    # The time of change is the kernel's own; nobody inside can set it back.
    yield Stamped(Change(path, "added" if old is None else "changed", info.st_size), info.st_ctime_ns)


def _compare_directory(
    top: int,
    below: Sequence[int],
    name: str,
    path: str,
    info: os.stat_result,
    old: os.stat_result | None,
    depth: int,
) -> Iterator[Stamped]:
    # What is written in it changes its times too: of a directory only its mode counts (and its type).
    if old is None or old.st_mode != info.st_mode:
        yield Stamped(Change(path, "added" if old is None else "changed", 0), info.st_mode)
    with ExitStack() as stack:
        child = _open(stack, name, top)
        if _is_opaque(child) and old is not None and stat.S_ISDIR(old.st_mode):
            yield from _removed_below(below, name, path, set(os.listdir(child)))
        # Of an opaque directory too: a name that stands in both is a change and not an addition.
        visible = [] if old is None or not stat.S_ISDIR(old.st_mode) else _descend(stack, below, name)
        yield from _walk(child, visible, path, depth - 1)


def _lookup(below: Sequence[int], name: str) -> os.stat_result | None:
    """The entry as the layers show it, None where there is none or the highest says it is gone."""
    for layer in below:
        try:
            info = os.stat(name, dir_fd=layer, follow_symlinks=False)
        except FileNotFoundError:
            continue
        return None if _is_whiteout(info) else info
    return None


def _descend(stack: ExitStack, below: Sequence[int], name: str) -> list[int]:
    """The directory of that name in each layer, down to one that hides those under it."""
    found = []
    for layer in below:
        try:
            descriptor = _open(stack, name, layer)
        except FileNotFoundError:
            continue
        except OSError:  # a file or a whiteout hides the rest
            break
        found.append(descriptor)
        if _is_opaque(descriptor):
            break
    return found


def _removed_below(below: Sequence[int], name: str, path: str, kept: set[str]) -> Iterator[Stamped]:
    """What stood in a directory that was replaced as a whole; only its own entries, not what is deeper."""
    with ExitStack() as stack:
        layers = _descend(stack, below, name)
        names = {entry for layer in layers for entry in os.listdir(layer)}
        for entry in sorted(names - kept):
            if _lookup(layers, entry) is not None:
                yield Stamped(Change(f"{path}/{entry}", "removed", 0), 0)


def _is_whiteout(info: os.stat_result) -> bool:
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def _is_opaque(descriptor: int) -> bool:
    try:
        return os.getxattr(descriptor, _OPAQUE) == b"y"
    except (OSError, AttributeError):  # no such mark; or a system without such calls, which has no overlays either
        return False
