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
from shoal.image import tree
from shoal.types import Change

DEPTH_MAX: Final = 200
"""Each level takes frames of this interpreter and a descriptor of the node for every layer."""
_PATHS_MAX: Final = 64 << 20
"""A million long names at the bottom of 200 long folders would be 50 GB of text."""
Kind = Literal["added", "changed", "removed"]


class Trees(NamedTuple):
    """What a sandbox wrote, and its layers below that. Descriptors of directories, which stay the caller's."""

    upper: int
    """It holds `up<n>` for the n-th of `mounts`."""
    mounts: Sequence[str]
    lowers: Sequence[Sequence[int]]
    """The read-only layers of each mount, highest first."""


class Stamped(NamedTuple):
    """A change, and a number that is another one once the path has been changed again."""

    change: Change
    stamp: int


class Seen(NamedTuple):
    """A path that differs, while the walk stands at it. The descriptors are open until the next one is asked for."""

    stamped: Stamped
    name: str
    top: int
    """The directory it is in, of what was written."""
    below: Sequence[int]
    """The same in the layers that have it and are not hidden."""
    new: os.stat_result | None
    """None if it was removed."""
    old: os.stat_result | None
    """None if the layers have nothing there."""


Changes = Mapping[str, Stamped]
"""By path."""


def walk_changes(trees: Trees) -> Iterator[Seen]:
    """All paths that differ from the layers. LimitExceeded where there is more of them than can be held."""
    room = _PATHS_MAX
    for index, target in enumerate(trees.mounts):
        with ExitStack() as stack, suppress(FileNotFoundError):
            below = [open_directory(stack, ".", layer) for layer in trees.lowers[index]]
            top = open_directory(stack, f"up{index}", trees.upper)
            for seen in _walk(top, below, target.rstrip("/"), DEPTH_MAX):
                if (room := room - len(seen.stamped.change.path)) < 0:
                    raise LimitExceeded("characters in the paths of what changed", _PATHS_MAX)
                yield seen


def find_changes(trees: Trees) -> Changes:
    """All of them by path. LimitExceeded also where directories are nested too deep to be walked."""
    return {seen.stamped.change.path: seen.stamped for seen in walk_changes(trees)}


def changes_between(before: Changes, after: Changes) -> Iterator[Change]:
    """The paths that changed between two looks at one sandbox, in no order."""
    for path in before.keys() | after.keys():
        old, new = before.get(path), after.get(path)
        if old != new:
            kind = _kind_between(old and old.change.kind, new and new.change.kind)
            yield Change(path, kind, new.change.size if new is not None else 0)


def count_changes(before: Changes, after: Changes) -> dict[str, int]:
    """How many paths were added, changed and removed between two looks at one sandbox."""
    counts = {"added": 0, "changed": 0, "removed": 0}
    for change in changes_between(before, after):
        counts[change.kind] += 1
    return counts


def _kind_between(old: Kind | None, new: Kind | None) -> Kind:
    """From the kinds of a path against the layers at two times; None where it was as in the layers."""
    if old is None and new is not None:
        return new
    if old == "removed":
        return "added"
    return "removed" if new == "removed" or (old == "added" and new is None) else "changed"


def open_directory(stack: ExitStack, name: str, parent: int) -> int:
    """Closed with `stack`. NotADirectoryError for a link, too."""
    descriptor = tree.open_directory(name, parent)
    stack.callback(os.close, descriptor)
    return descriptor


def _walk(top: int, below: Sequence[int], path: str, depth: int) -> Iterator[Seen]:
    """`below`: the same directory in the layers that have it and are not hidden."""
    if not depth:
        raise LimitExceeded(f"levels of directories at {path[:200]}", DEPTH_MAX)
    with os.scandir(top) as entries:
        for entry in entries:
            with suppress(FileNotFoundError, NotADirectoryError):  # the sandbox goes on living
                yield from _compare(top, below, entry.name, f"{path}/{entry.name}", depth)


def _compare(top: int, below: Sequence[int], name: str, path: str, depth: int) -> Iterator[Seen]:
    info = os.stat(name, dir_fd=top, follow_symlinks=False)
    old = look_up(below, name)
    if tree.is_whiteout(info):
        yield Seen(Stamped(Change(path, "removed", 0), 0), name, top, below, None, old)
        return
    if stat.S_ISDIR(info.st_mode):
        yield from _compare_directory(top, below, name, path, info, old, depth)
        return
    if old is not None and stat.S_ISDIR(old.st_mode):
        yield from _removed_below(top, below, name, path, set())
    # The time of change is the kernel's own; nobody inside can set it back.
    change = Change(path, "added" if old is None else "changed", info.st_size)
    yield Seen(Stamped(change, info.st_ctime_ns), name, top, below, info, old)


def _compare_directory(
    top: int,
    below: Sequence[int],
    name: str,
    path: str,
    info: os.stat_result,
    old: os.stat_result | None,
    depth: int,
) -> Iterator[Seen]:
    # What is written in it changes its times too: of a directory only its mode counts (and its type).
    if old is None or old.st_mode != info.st_mode:
        change = Change(path, "added" if old is None else "changed", 0)
        yield Seen(Stamped(change, info.st_mode), name, top, below, info, old)
    with ExitStack() as stack:
        child = open_directory(stack, name, top)
        if tree.is_opaque(child) and old is not None and stat.S_ISDIR(old.st_mode):
            yield from _removed_below(top, below, name, path, set(os.listdir(child)))
        # Of an opaque directory too: a name that stands in both is a change and not an addition.
        visible = [] if old is None or not stat.S_ISDIR(old.st_mode) else descend(stack, below, name)
        yield from _walk(child, visible, path, depth - 1)


def look_up(below: Sequence[int], name: str) -> os.stat_result | None:
    """The entry as the layers show it, None where there is none or the highest says it is gone."""
    for layer in below:
        try:
            info = os.stat(name, dir_fd=layer, follow_symlinks=False)
        except FileNotFoundError:
            continue
        return None if tree.is_whiteout(info) else info
    return None


def descend(stack: ExitStack, below: Sequence[int], name: str) -> list[int]:
    """The directory of that name in each layer, down to one that hides those under it."""
    found = []
    for layer in below:
        try:
            descriptor = open_directory(stack, name, layer)
        except FileNotFoundError:
            continue
        except OSError:  # a file or a whiteout hides the rest
            break
        found.append(descriptor)
        if tree.is_opaque(descriptor):
            break
    return found


def _removed_below(top: int, below: Sequence[int], name: str, path: str, kept: set[str]) -> Iterator[Seen]:
    """What stood in a directory that was replaced as a whole; only its own entries, not what is deeper."""
    with ExitStack() as stack:
        layers = descend(stack, below, name)
        for entry in sorted(names_in(layers) - kept):
            if (old := look_up(layers, entry)) is not None:
                yield Seen(Stamped(Change(f"{path}/{entry}", "removed", 0), 0), entry, top, layers, None, old)


def names_in(layers: Sequence[int]) -> set[str]:
    """Of all entries that the layers have in one directory, whiteouts too."""
    return {name for layer in layers for name in os.listdir(layer)}
