"""Trees between this machine and a sandbox. What comes from a sandbox is hostile: its names never leave the target."""

from __future__ import annotations

import asyncio
import os
import secrets
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

from shoal.errors import FileExists, InvalidRequest, LimitExceeded, NotFound, PlatformError
from shoal.node.interface import Node
from shoal.types import FileInfo

_CHUNK: Final = 4 << 20
_GATHERED: Final = 1 << 20
_DEPTH: Final = 200
"""Levels of directories: a deeper tree could not be removed again by `shutil.rmtree` of whoever asked for it."""
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


async def upload(node: Node, sandbox: str, local: Path, remote: str) -> None:
    """A file or a tree to the path `remote`; links stay links. NotFound if there is nothing at `local`."""
    try:
        info = await asyncio.to_thread(local.stat)
    except FileNotFoundError as error:
        raise NotFound(f"local: there is no {local}") from error
    if not stat.S_ISDIR(info.st_mode):
        await _upload_file(node, sandbox, local, remote, info)
        return
    await node.make_dir(sandbox, remote, stat.S_IMODE(info.st_mode))
    for path in await asyncio.to_thread(lambda: list(_walk(local))):
        target = f"{remote.rstrip('/')}/{path.relative_to(local)}"
        info = path.lstat()
        if stat.S_ISLNK(info.st_mode):
            await _upload_link(node, sandbox, path, target)
        elif stat.S_ISDIR(info.st_mode):
            await node.make_dir(sandbox, target, stat.S_IMODE(info.st_mode))
        elif stat.S_ISREG(info.st_mode):
            await _upload_file(node, sandbox, path, target, info)


def _walk(root: Path) -> Iterator[Path]:
    """Parents before children; no link is followed."""
    for folder, folders, files in os.walk(root):
        yield from (Path(folder, name) for name in sorted((*folders, *files)))


async def _upload_link(node: Node, sandbox: str, local: Path, remote: str) -> None:
    """Replaces what is there, as a file would, but not a directory."""
    target = str(local.readlink())
    try:
        await node.symlink_file(sandbox, remote, target)
    except FileExists:
        if (await node.stat_file(sandbox, remote)).kind == "directory":
            raise
        await node.remove_file(sandbox, remote)
        await node.symlink_file(sandbox, remote, target)


async def _upload_file(node: Node, sandbox: str, local: Path, remote: str, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise InvalidRequest("local", f"{local} is neither a file nor a directory")
    if info.st_size <= _CHUNK:
        data: bytes | AsyncIterator[bytes] = await asyncio.to_thread(local.read_bytes)
    else:
        data = _read(local)
    await node.write_file(sandbox, remote, data, stat.S_IMODE(info.st_mode))


async def _read(local: Path) -> AsyncIterator[bytes]:
    with local.open("rb") as file:
        while piece := await asyncio.to_thread(file.read, _CHUNK):
            yield piece


class _Room:
    """Bytes that may still be taken from a sandbox. A file may be a hole of a terabyte, or grow while it is read."""

    def __init__(self, limit: int) -> None:
        self._limit = self._left = limit

    def take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise LimitExceeded("bytes to download", self._limit)


async def download(node: Node, sandbox: str, remote: str, local: Path, limit: int) -> None:
    """A file or a tree to the path `local`. Set-uid bits are dropped, FIFOs, sockets and devices left out.

    LimitExceeded past `limit` bytes in all."""
    room = _Room(limit)
    info = await node.stat_file(sandbox, remote)
    if info.kind == "file":
        await _download_file(node, sandbox, remote, info, _open_parent(local), local.name, room)
        return
    if info.kind != "directory":
        raise InvalidRequest("remote", f"{remote} is a {info.kind}")
    local.mkdir(parents=True, exist_ok=True)
    root = os.open(local, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        base = remote.rstrip("/") + "/"
        entries = await node.list_files(sandbox, remote, _DEPTH + 1)
        if any(entry.path.removeprefix(base).count("/") == _DEPTH for entry in entries):
            raise LimitExceeded(f"levels of directories in {remote}", _DEPTH)
        for entry in entries:
            await _download_entry(node, sandbox, base, entry, root, room)
    finally:
        os.close(root)


def _open_parent(local: Path) -> int:
    local.parent.mkdir(parents=True, exist_ok=True)
    return os.open(local.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


async def _download_entry(node: Node, sandbox: str, base: str, entry: FileInfo, root: int, room: _Room) -> None:
    *folders, name = entry.path.removeprefix(base).split("/")
    if any(part in ("", ".", "..") for part in (*folders, name)):
        raise PlatformError(f"a sandbox named a file {entry.path!r}")
    parent = _descend(root, folders)
    match entry.kind:
        case "file":
            await _download_file(node, sandbox, entry.path, entry, parent, name, room)
            return
        case "directory":
            _make_directory(parent, name, entry.mode & 0o777)
        case "symlink" if entry.link:  # none: it has become something else meanwhile
            _make_link(parent, name, entry.link)
    os.close(parent)


def _descend(root: int, folders: list[str]) -> int:
    """The directory, step by step: a link on the way is an error and is not followed."""
    here = os.dup(root)
    for folder in folders:
        try:
            below = os.open(folder, _DIRECTORY, dir_fd=here)
        except OSError as error:
            raise FileExists(f"local: {folder} is in the way: {error.strerror}") from error
        finally:
            os.close(here)
        here = below
    return here


def _make_directory(parent: int, name: str, mode: int) -> None:
    try:
        os.mkdir(name, mode | 0o700, dir_fd=parent)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise FileExists(f"local: {name} is in the way of a directory") from None


def _make_link(parent: int, name: str, target: str) -> None:
    aside = f".shoal-{secrets.token_hex(8)}"
    os.symlink(target, aside, dir_fd=parent)
    os.replace(aside, name, src_dir_fd=parent, dst_dir_fd=parent)


async def _download_file(
    node: Node, sandbox: str, remote: str, info: FileInfo, parent: int, name: str, room: _Room
) -> None:
    """Closes `parent`. The file appears whole or not at all."""
    aside = f".shoal-{secrets.token_hex(8)}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(aside, flags, info.mode & 0o777, dir_fd=parent)
        try:
            with open(descriptor, "wb") as file:
                async for pieces in _gather(node.stream_file(sandbox, remote), room):
                    await asyncio.to_thread(file.writelines, pieces)
            os.replace(aside, name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            os.unlink(aside, dir_fd=parent)
            raise
    finally:
        os.close(parent)


async def _gather(stream: AsyncIterator[bytes], room: _Room) -> AsyncIterator[list[bytes]]:
    """Pieces by the MiB: to hand one to a thread costs as much as to write it."""
    pieces: list[bytes] = []
    size = 0
    async for piece in stream:
        room.take(len(piece))
        pieces.append(piece)
        size += len(piece)
        if size >= _GATHERED:
            yield pieces
            pieces, size = [], 0
    yield pieces
