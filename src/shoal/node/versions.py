"""What files were and are: contents from a sandbox's upper and layers, read by the host within bounds.

No link is followed and nothing but regular files is opened. What is swapped meanwhile is read as what it then is.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Final, NamedTuple

from shoal.errors import LimitExceeded
from shoal.image import tree
from shoal.node.changes import DEPTH_MAX, Changes, Seen, Stamped, Trees, descend, look_up, names_in, walk_changes
from shoal.types import MiB

FILE_MAX: Final = 1 * MiB
"""Bytes of one file whose content is looked at."""
_ENTRIES_MAX: Final = 500_000


class Version(NamedTuple):
    """A file or link at one time. Directories have none."""

    mode: int
    """With its type, as from stat(2)."""
    size: int
    data: bytes | None
    """Its content, or where a link points; None if that was not read: too large, no room, or neither file nor link."""


class Pair(NamedTuple):
    """One path in the layers and now."""

    old: Version | None
    new: Version | None


class Look(NamedTuple):
    """All that differs from the layers at one time. A removed directory stands in `pairs` with all that was in it."""

    changes: Changes
    pairs: Mapping[str, Pair]


class Room:
    """Bytes of content that may still be held."""

    def __init__(self, size: int) -> None:
        self._left = size

    def take(self, size: int) -> bool:
        """Whether there is room for so many; then there is that much less."""
        if size > self._left:
            return False
        self._left -= size
        return True


def look_at(trees: Trees, room: Room, *, old: bool) -> Look:
    """With `old`, the contents of the layers too. LimitExceeded past half a million entries."""
    changes: dict[str, Stamped] = {}
    pairs: dict[str, Pair] = {}
    for seen in walk_changes(trees):
        changes[seen.stamped.change.path] = seen.stamped
        for path, pair in _pairs(seen, room, old=old):
            pairs[path] = pair
            if len(pairs) > _ENTRIES_MAX:
                raise LimitExceeded("files that differ", _ENTRIES_MAX)
    return Look(changes, pairs)


def _pairs(seen: Seen, room: Room, *, old: bool) -> Iterator[tuple[str, Pair]]:
    path = seen.stamped.change.path
    if seen.new is None and seen.old is not None and stat.S_ISDIR(seen.old.st_mode):
        if old:
            for below, version in _versions_below(seen.below, seen.name, path, room, DEPTH_MAX):
                yield below, Pair(version, None)
        return
    before = _version_in_layers(seen.below, seen.name, seen.old, room) if old else None
    after = _version(seen.top, seen.name, seen.new, room) if seen.new is not None else None
    if before is not None or after is not None or not old:
        yield path, Pair(before, after)


def _versions_below(
    layers: Sequence[int], name: str, path: str, room: Room, depth: int
) -> Iterator[tuple[str, Version]]:
    """Of every file in a directory of the layers."""
    if not depth:
        raise LimitExceeded(f"levels of directories at {path[:200]}", DEPTH_MAX)
    with ExitStack() as stack:
        below = descend(stack, layers, name)
        for entry in sorted(names_in(below)):
            info = look_up(below, entry)
            if info is not None and stat.S_ISDIR(info.st_mode):
                yield from _versions_below(below, entry, f"{path}/{entry}", room, depth - 1)
            elif (version := _version_in_layers(below, entry, info, room)) is not None:
                yield f"{path}/{entry}", version


def _version_in_layers(layers: Sequence[int], name: str, info: os.stat_result | None, room: Room) -> Version | None:
    """From the highest layer that has it, which is the one that `look_up` found `info` in."""
    if info is None:
        return None
    for layer in layers:
        try:
            os.stat(name, dir_fd=layer, follow_symlinks=False)
        except FileNotFoundError:
            continue
        return _version(layer, name, info, room)
    return None


def _version(parent: int, name: str, info: os.stat_result, room: Room) -> Version | None:
    if stat.S_ISDIR(info.st_mode):
        return None
    data = None
    try:
        if stat.S_ISLNK(info.st_mode):
            data = os.fsencode(os.readlink(name, dir_fd=parent))
        elif stat.S_ISREG(info.st_mode) and info.st_size <= FILE_MAX and room.take(info.st_size):
            data = _read(parent, name, info.st_size)
    except OSError:  # it has become something else, or is leased
        data = None
    return Version(info.st_mode, info.st_size, data)


def _read(parent: int, name: str, size: int) -> bytes | None:
    """None if it is not, or not any more, a regular file of at most `size` bytes."""
    descriptor = os.open(name, tree.OPEN_FILE, dir_fd=parent)
    with open(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        pieces = []
        left = size + 1
        while left and (piece := file.read(left)):
            pieces.append(piece)
            left -= len(piece)
    return b"".join(pieces) if left else None
