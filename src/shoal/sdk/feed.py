"""What users give as the content of a file, on its way to the node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import Any, Final, Protocol, runtime_checkable

from shoal.errors import InvalidRequest

_CHUNK: Final = 1 << 20
_FULL: Final = 256 << 10
"""Small pieces are sent together: each takes a change of threads."""


@runtime_checkable
class BinaryFile(Protocol):
    """An open file that is read as bytes."""

    def read(self, size: int, /) -> bytes: ...


Content = str | bytes | Iterable[bytes] | BinaryFile
AsyncContent = Content | AsyncIterable[bytes]
"""Text is written as UTF-8."""


def pieces_of(content: object) -> Iterator[bytes]:
    """InvalidRequest unless it gives bytes."""
    if isinstance(content, BinaryFile):
        return iter(lambda: _checked(content.read(_CHUNK)), b"")
    if isinstance(content, Iterable):
        return _together(content)
    raise InvalidRequest(
        "data", f"takes text, bytes, an iterator of bytes or a binary file, not {type(content).__name__}"
    )


def _together(content: Iterable[object]) -> Iterator[bytes]:
    held = bytearray()
    for piece in content:
        held += _checked(piece)
        if len(held) >= _FULL:
            yield bytes(held)
            held.clear()
    yield bytes(held)


async def apieces_of(content: object) -> AsyncIterator[bytes]:
    """The same, from what may also be asynchronous. Files are read in a thread."""
    if isinstance(content, AsyncIterable):
        held = bytearray()
        async for piece in content:
            held += _checked(piece)
            if len(held) >= _FULL:
                yield bytes(held)
                held.clear()
        yield bytes(held)
        return
    pieces = pieces_of(content)
    threaded = isinstance(content, BinaryFile)
    while (found := await asyncio.to_thread(next, pieces, None) if threaded else next(pieces, None)) is not None:
        yield found


def _checked(piece: object) -> bytes:
    if not isinstance(piece, (bytes, bytearray, memoryview)):
        raise InvalidRequest("data", f"gave {type(piece).__name__} where bytes are needed; open files as binary")
    return bytes(piece)


Write = Callable[[AsyncIterator[bytes]], Coroutine[Any, Any, None]]
"""A call of the node that takes pieces."""


class Feed:
    """A write whose pieces come one by one from another thread. All of it runs on the node's loop."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._task: asyncio.Task[None] | None = None
        self._next: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)

    async def _pieces(self) -> AsyncIterator[bytes]:
        while piece := await self._next.get():
            yield piece

    async def send(self, piece: bytes) -> bool:
        """Waits for room. False once the write has failed: `finish` says why."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._write(self._pieces()))
        if piece:
            await self._put(piece)
        return not self._task.done()

    async def _put(self, piece: bytes) -> None:
        assert self._task is not None
        putting = asyncio.ensure_future(self._next.put(piece))
        await asyncio.wait([putting, self._task], return_when=asyncio.FIRST_COMPLETED)
        putting.cancel()

    async def finish(self) -> None:
        """The end of the file; raises what the write raises."""
        await self.send(b"")
        assert self._task is not None
        await self._put(b"")
        await self._task

    async def abandon(self) -> None:
        """No more will come: what was sent is thrown away."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
