"""An agent's changes: taken out of its sandbox as data, and put into another.

Names, sizes and links are the sandbox's choice. Every path is only ever used inside a sandbox, and every size
is bounded.
"""

from __future__ import annotations

import contextlib

from msgspec import Struct

from shoal.errors import FileExists, LimitExceeded, NotFound, PlatformError
from shoal.rollouts.box import Box
from shoal.rollouts.preparation import WORKSPACE
from shoal.rollouts.trees import Entry, Patch, folders_of, is_graders
from shoal.types import Change, MiB


class ChangeBounds(Struct, frozen=True):
    """How much an agent may leave behind in the workspace."""

    entries: int = 20_000
    bytes: int = 64 * MiB


BOUNDS = ChangeBounds()


async def collect_changes(box: Box, exam: Patch, bounds: ChangeBounds = BOUNDS) -> Patch:
    """What the agent did to files that are not the grader's. Raises LimitExceeded."""
    written: dict[str, Entry] = {}
    removed: list[str] = []
    room = bounds.bytes
    ways = folders_of(exam.written)  # a link on the way of a test would lead it elsewhere
    for path, change in select_changes(await box.changes(), bounds):
        entry = None if change.kind == "removed" else await _take_entry(box, path, room, bounds)
        if entry is not None and (entry.folder or path not in ways):
            written[path] = entry
            room -= len(entry.data)
        elif change.kind != "added":
            removed.append(path)
    return Patch(written, tuple(removed))


def select_changes(changes: list[Change], bounds: ChangeBounds) -> list[tuple[str, Change]]:
    """The changes below the workspace that count, by relative path, parents first."""
    if len(changes) > 4 * bounds.entries:
        raise LimitExceeded("changed files", 4 * bounds.entries)
    prefix = f"{WORKSPACE}/"
    below = {change.path.removeprefix(prefix): change for change in changes if change.path.startswith(prefix)}
    chosen = [(path, below[path]) for path in sorted(below) if path and not _is_left_out(path)]
    if len(chosen) > bounds.entries:
        raise LimitExceeded("changed files in the workspace", bounds.entries)
    return chosen


def _is_left_out(path: str) -> bool:
    """Compiled files could stand in for the tests that are laid in; everything can be compiled again."""
    return is_graders(path) or "__pycache__" in path.split("/")


async def _take_entry(box: Box, path: str, room: int, bounds: ChangeBounds) -> Entry | None:
    """What is at a path now; None if it is gone or is neither file, link nor folder."""
    where = f"{WORKSPACE}/{path}"
    try:
        info = await box.files.stat(where)
        if info.kind == "symlink":
            return Entry(mode=0o777, link=info.link or "")
        if info.kind == "directory":
            return Entry(mode=info.mode & 0o777, folder=True)
        if info.kind != "file":
            return None
        data = await read_bounded(box, where, info.size, room, bounds.bytes)
        return Entry(info.mode & 0o777, data)
    except NotFound:
        return None


async def read_bounded(box: Box, path: str, size: int, room: int, limit: int) -> bytes:
    """The file at `path`, said to have `size` bytes. Raises LimitExceeded with `limit` past `room` bytes."""
    data: bytes = b"" if size > room else await box.files.read(path, format="bytes")
    if max(size, len(data)) > room:
        raise LimitExceeded(f"bytes of {path!r} and what came before it", limit)
    return data


async def apply_patch(box: Box, patch: Patch) -> None:
    """Puts a patch into the workspace of a sandbox, replacing whatever is in its way."""
    for path in reversed(patch.removed):
        await _remove(box, path)
    for path, entry in patch.written.items():
        await _put(box, path, entry)


async def _put(box: Box, path: str, entry: Entry) -> None:
    try:
        await _create(box, path, entry)
    except (FileExists, NotFound):
        await _clear_way(box, path)
        await _create(box, path, entry)


async def _clear_way(box: Box, path: str) -> None:
    """Takes away what stands at a path, and the first file on the way to it where a folder is needed."""
    for folder in sorted(folders_of([path])):
        with contextlib.suppress(NotFound):
            if (await box.files.stat(f"{WORKSPACE}/{folder}")).kind not in ("directory", "symlink"):
                return await _remove(box, folder)
    return await _remove(box, path)


async def _create(box: Box, path: str, entry: Entry) -> None:
    where = f"{WORKSPACE}/{path}"
    if entry.folder:
        await box.files.make_dir(where)
    elif entry.link is not None:
        await _remove(box, path)
        made = await box.commands.run(["ln", "-s", "--", entry.link, where], cwd="/")
        if not made.ok:
            raise PlatformError(f"{where}: the link could not be made: {made.stderr[-500:]}")
    else:
        await box.files.write(where, entry.data, mode=entry.mode)


async def _remove(box: Box, path: str) -> None:
    with contextlib.suppress(NotFound):
        await box.files.remove(f"{WORKSPACE}/{path}")
