"""A file or tree of this machine as a tar stream, for a sandbox. It is the caller's own and may change meanwhile."""

from __future__ import annotations

import os
import stat
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Final

from shoal.errors import InvalidRequest
from shoal.sandbox.tar import DIRECTORY, END, FIFO, FILE, HARD_LINK, SYMLINK, Member, padding, write_map, write_member

_CHUNK: Final = 1 << 20
_BATCH: Final = 256 << 10
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_PIECES_MAX: Final = 1 << 16


def depart(local: Path) -> Generator[bytes, None, None]:
    """The whole stream, in pieces of about a megabyte at most. A link at `local` itself is followed.

    NotADirectoryError and the like as they come; InvalidRequest for what is neither file nor directory."""
    return _batched(_Departure(local).pieces())


def _batched(pieces: Iterator[bytes]) -> Generator[bytes, None, None]:
    """Small ones together."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= _BATCH:
            yield b"".join(held) if len(held) > 1 else piece
            held, size = [], 0
    yield b"".join(held)


class _Departure:
    def __init__(self, local: Path) -> None:
        self._local = local
        self._first: dict[tuple[int, int], str] = {}
        """Names of files that have several."""

    def pieces(self) -> Iterator[bytes]:
        info = os.stat(self._local)
        if stat.S_ISDIR(info.st_mode):
            yield from self._tree()
        elif stat.S_ISREG(info.st_mode):
            yield from self._file(os.path.realpath(self._local), ".")
        else:
            raise InvalidRequest("local", f"{self._local} is neither a file nor a directory")
        yield END

    def _tree(self) -> Iterator[bytes]:
        """Each folder before and after what is in it. No recursion: trees may be deep."""
        top = os.fspath(self._local)
        yield self._directory(top, ".")
        ways = [(top, ".", iter(sorted(os.listdir(top))))]
        while ways:
            folder, path, names = ways[-1]
            name = next(names, None)
            if name is None:
                yield self._directory(folder, path)
                ways.pop()
                continue
            below, relative = f"{folder}/{name}", name if path == "." else f"{path}/{name}"
            try:
                info = os.lstat(below)
                if stat.S_ISDIR(info.st_mode):
                    ways.append((below, relative, iter(sorted(os.listdir(below)))))
                    yield self._directory(below, relative)
                else:
                    yield from self._entry(below, relative, info)
            except FileNotFoundError:
                continue  # it has gone since its folder was listed

    def _directory(self, local: str, path: str) -> bytes:
        return write_member(_member(path, DIRECTORY, os.stat(local)))

    def _entry(self, local: str, path: str, info: os.stat_result) -> Iterator[bytes]:
        """Sockets and devices are left out."""
        if stat.S_ISLNK(info.st_mode):
            yield write_member(_member(path, SYMLINK, info, link=str(Path(local).readlink())))
        elif stat.S_ISFIFO(info.st_mode):
            yield write_member(_member(path, FIFO, info))
        elif stat.S_ISREG(info.st_mode):
            yield from self._file(local, path)

    def _file(self, local: str, path: str) -> Iterator[bytes]:
        descriptor = os.open(local, _FILE)
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                return
            identity = (info.st_dev, info.st_ino)
            if info.st_nlink > 1 and (first := self._first.setdefault(identity, path)) != path:
                yield write_member(_member(path, HARD_LINK, info, link=first))
                return
            yield from _contents(descriptor, _member(path, FILE, info), info)
        finally:
            os.close(descriptor)


def _member(path: str, kind: bytes, info: os.stat_result, *, link: str = "") -> Member:
    mode = stat.S_IMODE(info.st_mode)
    return Member(path, kind, mode, info.st_uid, info.st_gid, mtime_ns=info.st_mtime_ns, link=link)


def _contents(descriptor: int, member: Member, info: os.stat_result) -> Iterator[bytes]:
    pieces = _find_pieces(descriptor, info)
    if pieces is None:
        yield write_member(member._replace(size=info.st_size))
        yield from _read(descriptor, 0, info.st_size, member.path)
        yield bytes(padding(info.st_size))
        return
    text = write_map(pieces)
    size = len(text) + sum(length for _, length in pieces)
    yield write_member(member._replace(size=size, real_size=info.st_size))
    yield text
    for start, length in pieces:
        yield from _read(descriptor, start, length, member.path)
    yield bytes(padding(size))


def _find_pieces(descriptor: int, info: os.stat_result) -> list[tuple[int, int]] | None:
    """Where there are no holes. None if there is no hole at all, or the file system does not say."""
    if info.st_blocks * 512 >= info.st_size:
        return None
    pieces: list[tuple[int, int]] = []
    at = 0
    while at < info.st_size:
        try:
            start = os.lseek(descriptor, at, os.SEEK_DATA)
            end = min(os.lseek(descriptor, start, os.SEEK_HOLE), info.st_size)
        except OSError:  # ENXIO: a hole to the end
            break
        if start >= end:
            break
        if len(pieces) == _PIECES_MAX - 2:
            end = info.st_size
        pieces.append((start, end - start))
        at = end
    if pieces == [(0, info.st_size)]:
        return None
    return [*pieces, (info.st_size, 0)]


def _read(descriptor: int, at: int, length: int, path: str) -> Iterator[bytes]:
    while length:
        piece = os.pread(descriptor, min(length, _CHUNK), at)
        if not piece:
            raise InvalidRequest("local", f"{path} was cut while it was read")
        yield piece
        at, length = at + len(piece), length - len(piece)
