"""File operations of one sandbox. They run inside, by its init, as the caller's user; here their answers are parsed."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import stat
import struct
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Final, Literal, TypeVar

from shoal.errors import (
    FileExists,
    Interrupted,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    PermissionDenied,
    PlatformError,
    ShoalError,
)
from shoal.node.accounts import Account
from shoal.sandbox.channel import FileOperation, Flag, Process, Receiver, Request
from shoal.sandbox.frame import DATA_MAX
from shoal.sandbox.interface import Box
from shoal.types import FileInfo

_HEAD: Final = struct.Struct("<IIIQqI")
_COUNT: Final = struct.Struct("<I")
_CHUNK: Final = 4 << 20
_JOINED: Final = 64 << 10
"""Up to here a copy costs less than a frame more."""
READ_MAX: Final = 512 << 20
"""Bytes of a file that are held in memory where the caller names no limit: a hole of a terabyte is one call inside."""
_ANSWER_MAX: Final = 64 << 20
"""Bytes of a listing: some half a million entries."""
_GROWN: Final = 1 << 20
"""Bytes of an answer up to which memory is asked for piece by piece."""
_PLACE_MAX: Final = 4096
_LET_GO_SECONDS: Final = 5.0
"""For which a caller who has failed waits until what it had begun inside is taken away."""
_STILL_SECONDS: Final = 60.0
"""An operation that moves nothing for so long was stopped by a process of the sandbox."""

T = TypeVar("T")
Infos = list[FileInfo]
Kind = Literal["file", "directory", "symlink", "fifo", "socket", "device"]


class Files:
    """The files of a box, as one account sees them."""

    def __init__(self, box: Box, account: Account, cwd: str) -> None:
        self._box = box
        self._account = account
        self._cwd = cwd

    def start(
        self,
        operation: FileOperation,
        paths: list[str],
        number: int,
        flags: int,
        receive: Receiver,
        *,
        auto_credit: bool = True,
    ) -> Process:
        for path in paths:
            check_path(path)
        account = self._account
        request = Request(
            paths,
            [],
            self._cwd,
            account.uid,
            account.gid,
            account.groups,
            flags,
            operation=operation,
            number=number,
        )
        return self._box.start(request, receive, auto_credit=auto_credit)

    async def _call(self, operation: FileOperation, *paths: str, number: int = 0, limit: int = _ANSWER_MAX) -> bytes:
        answer = _Answer(paths[0], limit)
        process = self.start(operation, list(paths), number, Flag.NONE, answer.add)
        answer.on_excess = lambda: process.kill(9, tree=True)
        await _end(process, paths[0], answer)
        check_end(process.ended.result().status, answer.path)
        return answer.value()

    async def read(self, path: str, limit: int = READ_MAX) -> bytes:
        """LimitExceeded if there are more than `limit` bytes."""
        return await self._call(FileOperation.READ, path, limit=limit)

    def stream(self, path: str) -> AsyncGenerator[bytes, None]:
        """In pieces, no more of them on the way than the channel's window."""
        return self._pieces(FileOperation.READ, path)

    def pack(self, path: str) -> AsyncGenerator[bytes, None]:
        """A file or a tree as a tar stream, whose members are the sandbox's choice."""
        return self._pieces(FileOperation.PACK, path)

    async def _pieces(self, operation: FileOperation, path: str) -> AsyncGenerator[bytes, None]:
        arrived = _Arrived(path)
        process = self.start(operation, [path], 0, Flag.NONE, arrived.add, auto_credit=False)
        process.ended.add_done_callback(lambda _: arrived.end())
        try:
            while data := await _moving(process, path, arrived.take()):
                yield data
                process.grant(1, len(data))
            check_end((await process.ended).status, arrived.place())
        finally:
            process.kill(9, tree=False)

    async def write(self, path: str, data: bytes | AsyncIterator[bytes], mode: int | None = None) -> None:
        """Makes missing parents, replaces atomically, keeps an existing file's mode and owner."""
        await self._send(FileOperation.WRITE, path, _framed(data), -1 if mode is None else mode)

    async def append(self, path: str, data: bytes | AsyncIterator[bytes]) -> None:
        """Makes the file if it is missing. What has come when it fails half-way is there."""
        await self._send(FileOperation.APPEND, path, _framed(data), 0)

    async def unpack(self, path: str, data: AsyncIterator[bytes], *, owners: bool = False) -> None:
        """A tar stream to a file or a tree. `owners`: give the files to the users that it names."""
        await self._send(FileOperation.UNPACK, path, data, int(owners))

    async def _send(
        self, operation: FileOperation, path: str, data: AsyncIterator[bytes | memoryview], number: int
    ) -> None:
        arrived = _Arrived(path)
        process = self.start(operation, [path], number, Flag.STDIN, arrived.add)
        try:
            async for piece in data:
                await _moving(process, path, process.send_input(piece))
                if process.ended.done():  # it has failed; `check_end` says why
                    break
        except BaseException:
            process.close_input()  # before its end, what was sent is thrown away inside
            await asyncio.wait([process.ended], timeout=_LET_GO_SECONDS)
            raise
        process.close_input()
        await _end(process, path)
        check_end(process.ended.result().status, arrived.place())

    async def list(self, path: str, depth: int = 1) -> Infos:
        if not isinstance(depth, int) or not 0 < depth < 1 << 31:
            raise InvalidRequest("depth", f"takes 1 or more, not {depth!r}")
        base = path.rstrip("/") + "/"
        answer = await self._call(FileOperation.LIST, path, number=depth)
        return sorted(parse_entries(answer, base), key=lambda info: info.path)

    async def stat(self, path: str) -> FileInfo:
        (info,) = parse_entries(await self._call(FileOperation.STAT, path), "")
        return info

    async def exists(self, path: str) -> bool:
        try:
            await self.stat(path)
        except NotFound:
            return False
        return True

    async def make_dir(self, path: str, mode: int = 0o755) -> None:
        await self._call(FileOperation.MKDIR, path, number=mode)

    async def remove(self, path: str) -> None:
        await self._call(FileOperation.REMOVE, path)

    async def symlink(self, path: str, target: str) -> None:
        """A link at `path`, with missing parents; FileExists if something is there."""
        await self._call(FileOperation.SYMLINK, path, target)

    async def rename(self, old: str, new: str) -> None:
        await self._call(FileOperation.RENAME, old, new)


async def _framed(data: bytes | AsyncIterator[bytes]) -> AsyncIterator[bytes | memoryview]:
    """Each piece with its length before it, and a zero at the end: a caller who dies half-way publishes nothing."""
    if isinstance(data, bytes):
        for piece in _cut_up(data):
            yield piece
    else:
        async for more in data:
            for piece in _cut_up(more):
                yield piece
    yield _COUNT.pack(0)


def _cut_up(data: bytes) -> Iterator[bytes | memoryview]:
    view = memoryview(data)
    for start in range(0, len(view), _CHUNK):
        part = view[start : start + _CHUNK]
        # The length travels with the first bytes; the rest is not copied once more for it.
        yield _COUNT.pack(len(part)) + part[: DATA_MAX - _COUNT.size]
        yield part[DATA_MAX - _COUNT.size :]


async def _moving(process: Process, path: str, step: Coroutine[Any, Any, T]) -> T:
    """The step of an operation, unless it takes so long that it must have been stopped."""
    try:
        async with asyncio.timeout(_STILL_SECONDS):
            return await step
    except TimeoutError:
        raise _stopped(process, path) from None


def _stopped(process: Process, path: str) -> Interrupted:
    process.kill(9, tree=True)
    return Interrupted(f"{path}: a process of the sandbox has stopped the file operation")


class _Answer:
    """What an operation sends, as far as the caller takes it. The length is the sandbox's choice."""

    def __init__(self, path: str, limit: int) -> None:
        self.size = 0
        self.on_excess: Callable[[], None] = lambda: None
        self.path = path
        self._limit = limit
        self._data = io.BytesIO()
        self._room = _GROWN

    def add(self, _stream: int, data: bytes) -> None:
        fitted = self.size <= self._limit
        self.size += len(data)
        if self.size <= self._limit:
            self._grow()
            self._data.write(data)
        elif fitted:
            self._data = io.BytesIO()
            self.on_excess()

    def _grow(self) -> None:
        """Eightfold. Zeros that are not written to are no memory yet; a `realloc` would copy again and again."""
        if self.size <= self._room:
            return
        self._room = 8 * self.size
        larger = io.BytesIO(bytes(self._room))
        larger.write(self._data.getbuffer()[: self._data.tell()])
        self._data = larger

    def check(self) -> None:
        if self.size > self._limit:
            raise LimitExceeded(f"bytes of {self.path}", self._limit)

    def value(self) -> bytes:
        """Without a copy, hence not twice as much memory as the answer takes."""
        self._data.truncate(self.size)
        return self._data.getvalue()


class _Arrived:
    """What an operation has sent and nobody has taken: data on stream 1, on 2 the path that an error is about."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._pieces: deque[bytes] = deque()
        self._some = asyncio.Event()
        self._ended = False
        self._place = b""

    def add(self, stream: int, data: bytes) -> None:
        if stream == 1:
            self._pieces.append(data)
            self._some.set()
        else:
            self._place = (self._place + data)[:_PLACE_MAX]

    def end(self) -> None:
        self._ended = True
        self._some.set()

    async def take(self) -> bytes:
        """All there is, once there is some; empty at the end."""
        if not self._pieces and not self._ended:
            self._some.clear()
            await self._some.wait()
        data = self._pieces.popleft() if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        return data

    def place(self) -> str:
        """Where in the tree an error was met."""
        place = self._place.decode("utf-8", "replace")
        return f"{self._path}: {place}" if place and place != self._path else self._path


async def _end(process: Process, path: str, answer: _Answer | None = None) -> None:
    """Waits for the end of an operation for as long as it moves."""
    seen = -1
    while not process.ended.done():
        size = answer.size if answer else 0
        if seen == size:
            raise _stopped(process, path)
        seen = size
        await asyncio.wait([process.ended], timeout=_STILL_SECONDS)
    if answer is not None:
        answer.check()


def check_end(status: int, path: str) -> None:
    """The typed error for how an operation on `path` ended; nothing if it went well."""
    if os.WIFSIGNALED(status):
        # Nothing else reaches it: the node's own kills raise before this is asked.
        signal = os.WTERMSIG(status)
        raise Interrupted(
            f"{path}: signal {signal} ended the file operation: the sandbox's memory limit or a process of it"
        )
    if error := os.WEXITSTATUS(status):
        raise file_error(path, error)


def file_error(path: str, error: int) -> ShoalError:
    """The typed error for an errno of a file operation."""
    text = f"{path}: {os.strerror(error)}"
    match error:
        case errno.ENOENT | errno.ENOTDIR:
            return NotFound(text)
        case errno.EACCES | errno.EPERM | errno.EROFS | errno.ETXTBSY | errno.EFBIG:
            return PermissionDenied(text)
        case errno.EISDIR | errno.EEXIST | errno.ENOTEMPTY:
            return FileExists(text)
        case errno.EINVAL | errno.ENXIO:
            return InvalidRequest("path", f"{path} is not a regular file")
        case errno.EXDEV:
            return PermissionDenied(
                f"{path}: a directory of a layer cannot be renamed, nor anything onto another mount; copy it"
            )
        case errno.EOVERFLOW:
            return InvalidRequest("owners", f"{path}: its owner has a number that the sandbox has no user for")
        case errno.ESTALE:
            return Interrupted(f"{path}: it was cut while it was read")
        case errno.EAGAIN | errno.ENOMEM:
            return Interrupted(f"{text}: a lease or a limit of the sandbox is in the way")
        case errno.ENAMETOOLONG | errno.ELOOP | errno.EBUSY:
            return InvalidRequest("path", text)
        case errno.ENOSPC | errno.EDQUOT:
            return PermissionDenied(f"{text}: the sandbox's disk or inode limit is reached")
    return PlatformError(text)


def check_path(path: object) -> None:
    """InvalidRequest unless it is a path the kernel can be given."""
    if not isinstance(path, str) or not path:
        raise InvalidRequest("path", f"takes text that is not empty, not {path!r}")
    if "\0" in path:
        raise InvalidRequest("path", "has a NUL byte")
    try:
        length = len(os.fsencode(path))
    except UnicodeEncodeError:
        raise InvalidRequest("path", f"{path!r} has a surrogate that stands for no byte") from None
    if length > 4095:
        raise InvalidRequest("path", "is longer than 4095 bytes")


def parse_entries(data: bytes, base: str) -> Infos:
    """The records of a LIST or STAT answer. PlatformError if they are cut."""
    found = []
    at = 0
    while at < len(data):
        head, at = _cut(data, at, _HEAD.size)
        mode, uid, gid, size, mtime_ns, length = _HEAD.unpack(head)
        path, at = _cut(data, at, length)
        count, at = _cut(data, at, _COUNT.size)
        link, at = _cut(data, at, _COUNT.unpack(count)[0])
        name = os.fsdecode(path)
        found.append(
            FileInfo(
                name=name.rstrip("/").rpartition("/")[2] or "/",
                path=base + name,
                kind=_kind(mode),
                size=size,
                mode=stat.S_IMODE(mode),
                uid=uid,
                gid=gid,
                mtime=mtime_ns / 1e9,
                link=os.fsdecode(link) if stat.S_ISLNK(mode) else None,
            )
        )
    return found


def _cut(data: bytes, at: int, length: int) -> tuple[bytes, int]:
    end = at + length
    if end > len(data):
        raise PlatformError("a file listing was cut")
    return data[at:end], end


def _kind(mode: int) -> Kind:
    kinds: dict[int, Kind] = {
        stat.S_IFREG: "file",
        stat.S_IFDIR: "directory",
        stat.S_IFLNK: "symlink",
        stat.S_IFIFO: "fifo",
        stat.S_IFSOCK: "socket",
    }
    return kinds.get(stat.S_IFMT(mode), "device")
