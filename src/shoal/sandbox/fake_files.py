"""File operations of the fake tier: what init/files.c does, on a folder of this machine, with the same answers."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import shutil
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shoal.errors import FileExists, InvalidRequest, ShoalError
from shoal.sandbox.channel import WINDOW, Exit, FileOperation, Process, Request
from shoal.sandbox.departure import depart
from shoal.sandbox.frame import DATA_MAX
from shoal.sandbox.landing import Bounds, Landing

_HEAD: Final = struct.Struct("<IIIQqI")
_COUNT: Final = struct.Struct("<I")
_LINKS_MAX: Final = 40
_NO_BOUND: Final = 1 << 62


def resolve(root: Path, path: str, *, follow: bool = True) -> Path:
    """Where the absolute `path` of a box is on this machine: links and ".." are followed and never leave `root`.

    `follow`: also a link at the end. OSError for links in a circle. It holds while nothing changes underneath."""
    waiting, done, links = path.split("/")[::-1], list[str](), 0
    while waiting:
        part = waiting.pop()
        if part == "..":
            done = done[:-1]
        if part in ("", ".", ".."):
            continue
        here = root.joinpath(*done, part)
        if not here.is_symlink() or not (follow or any(waiting)):
            done.append(part)
            continue
        if (links := links + 1) > _LINKS_MAX:
            raise _error(errno.ELOOP)
        target = str(here.readlink())
        done = [] if target.startswith("/") else done
        waiting += target.split("/")[::-1]
    return root.joinpath(*done)


class FileRun:
    """One file operation. Its answer goes out as far as there is credit; the errno is the exit code."""

    def __init__(self, root: Path, request: Request, process: Process) -> None:
        self._process = process
        self._credit = WINDOW
        self._answer: Iterator[bytes] = iter(())
        self._target: Target | Arrival | None = None
        later = asyncio.get_running_loop().call_soon  # the caller has its process first
        try:
            self._begin(root, request)
        except (OSError, ShoalError) as error:
            later(self._end, _number(error))
            return
        if self._target is None:
            later(self._pump)

    def _begin(self, root: Path, request: Request) -> None:
        operation = FileOperation(request.operation)
        given, *more = map(os.fsdecode, request.argv)
        path = os.path.join(request.cwd, given)
        if operation in (FileOperation.WRITE, FileOperation.APPEND):
            append = operation == FileOperation.APPEND
            self._target = Target(resolve(root, path), append=append, mode=request.number)
            return
        if operation == FileOperation.UNPACK:
            self._target = Arrival(resolve(root, path))
            return
        follow = operation in (FileOperation.READ, FileOperation.LIST, FileOperation.PACK)
        place = resolve(root, path, follow=follow)
        match operation:
            case FileOperation.READ:
                self._answer = _read(place)
            case FileOperation.PACK:
                self._answer = depart(place)
            case FileOperation.LIST:
                self._answer = _list(place, "", request.number)
            case FileOperation.STAT:
                self._answer = iter([_entry(given, place)])
            case FileOperation.MKDIR:
                _make_directory(resolve(root, path), request.number)
            case FileOperation.REMOVE:
                _remove(root, place)
            case FileOperation.RENAME:
                place.rename(resolve(root, os.path.join(request.cwd, more[0]), follow=False))
            case FileOperation.SYMLINK:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(more[0])
            case _:
                raise _error(errno.ENOSYS)

    def _pump(self) -> None:
        try:
            while self._credit > 0 and not self._process.ended.done():
                if (piece := next(self._answer, None)) is None:
                    self._end(0)
                    return
                self._credit -= len(piece)
                self._process.take_output(1, piece)
        except (OSError, ShoalError) as error:
            self._end(_number(error))

    def _end(self, error: int) -> None:
        self._finish((error & 0xFF) << 8)

    def _finish(self, status: int) -> None:
        self.close()
        if not self._process.ended.done():
            self._process.finish(Exit(status, 0, 0, 0, 0))

    def input(self, data: bytes) -> None:
        self._process.take_consumed(len(data))
        if self._target is None:
            return
        try:
            if self._target.add(data):
                self._target.publish()
                self._end(0)
        except (OSError, ShoalError) as error:
            self._end(_number(error))

    def close_input(self) -> None:
        """Before the end of what was announced: nothing is published."""
        if self._target is not None:
            self._end(errno.ECANCELED)

    def credit(self, _stream: int, count: int) -> None:
        self._credit += count
        asyncio.get_running_loop().call_soon(self._pump)

    def kill(self, signal: int) -> None:
        self._finish(signal)

    def close(self) -> None:
        if self._target is not None:
            self._target.close()
        self._target = None
        self._answer = iter(())


class Target:
    """A file being written: appended to, or written aside and renamed over, so that it is whole or not there."""

    def __init__(self, path: Path, *, append: bool, mode: int) -> None:
        """`mode`: -1 keeps that of an existing file."""
        self._path = path
        self._aside: Path | None = None
        self._buffer = bytearray()
        self._left = 0
        old = path.stat() if path.exists() else None
        if old is not None and not stat.S_ISREG(old.st_mode):
            raise _error(errno.EISDIR if stat.S_ISDIR(old.st_mode) else errno.EINVAL)
        if old is not None and not os.access(path, os.W_OK):
            raise _error(errno.EACCES)
        path.parent.mkdir(parents=True, exist_ok=True)
        if append:
            self._file = path.open("ab", buffering=0)
            return
        self._aside = path.parent / f".shoal-{secrets.token_hex(8)}"
        self._file = self._aside.open("xb", buffering=0)
        kept = 0o644 if old is None else stat.S_IMODE(old.st_mode)
        self._aside.chmod(kept if mode < 0 else mode)

    def add(self, data: bytes) -> bool:
        """Pieces, each with its length before it; True at the 0 that ends them."""
        self._buffer += data
        while True:
            if self._left:
                if not self._buffer:
                    return False
                done = self._file.write(self._buffer[: self._left])
                del self._buffer[:done]
                self._left -= done
            elif len(self._buffer) < _COUNT.size:
                return False
            else:
                (self._left,) = _COUNT.unpack_from(self._buffer)
                del self._buffer[: _COUNT.size]
                if not self._left:
                    return True

    def publish(self) -> None:
        if self._aside is not None:
            self._aside.replace(self._path)
            self._aside = None

    def close(self) -> None:
        """What was not published is removed."""
        self._file.close()
        if self._aside is not None:
            self._aside.unlink(missing_ok=True)
            self._aside = None


class Arrival:
    """A tree that comes as a tar stream."""

    def __init__(self, path: Path) -> None:
        self._steps = Landing(path, Bounds(_NO_BOUND, _NO_BOUND)).land()
        next(self._steps)

    def add(self, data: bytes) -> bool:
        """True once all of it is there."""
        try:
            self._steps.send(data)
        except StopIteration:
            return True
        return False

    def publish(self) -> None:
        """Each file was, when it was whole."""

    def close(self) -> None:
        self._steps.close()


def _read(path: Path) -> Iterator[bytes]:
    """O_NONBLOCK so that a FIFO without a writer is an error at once and not a wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise _error(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL)
        while piece := os.read(descriptor, DATA_MAX):
            yield piece
    finally:
        os.close(descriptor)


def _list(path: Path, prefix: str, depth: int) -> Iterator[bytes]:
    for name in os.listdir(path):
        place = path / name
        try:
            yield _entry(prefix + name, place)
        except FileNotFoundError:  # commands go on meanwhile
            continue
        if depth > 1 and place.is_dir() and not place.is_symlink():
            yield from _list(place, f"{prefix}{name}/", depth - 1)


def _entry(shown: str, path: Path) -> bytes:
    info = path.lstat()
    name = os.fsencode(shown)
    link = os.fsencode(path.readlink()) if stat.S_ISLNK(info.st_mode) else b""
    head = (info.st_mode, info.st_uid, info.st_gid, info.st_size, info.st_mtime_ns, len(name))
    return _HEAD.pack(*head) + name + _COUNT.pack(len(link)) + link


def _make_directory(path: Path, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode)
    except FileExistsError:
        if not path.is_dir():
            raise _error(errno.ENOTDIR) from None
    else:
        path.chmod(mode)


def _remove(root: Path, path: Path) -> None:
    if path == root:
        raise _error(errno.EBUSY)
    if stat.S_ISDIR(path.lstat().st_mode):
        shutil.rmtree(path)
    else:
        path.unlink()


def _number(error: OSError | ShoalError) -> int:
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    return {FileExists: errno.EEXIST, InvalidRequest: errno.EINVAL}.get(type(error), errno.EIO)


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
