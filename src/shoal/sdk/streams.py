"""Between streams of bytes and what users take them as."""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator, Callable
from typing import Final, TypeVar

from shoal.errors import InvalidRequest
from shoal.node.interface import Output

Writer = Callable[[str], object]
_TEXT: Final = 64 << 10
"""Bytes that are made text at a time: memory for more is mapped anew each time, which takes longer than decoding."""
T = TypeVar("T")


class TextStreams:
    """Hands each stream on as text. A character that comes in pieces is held until it is whole."""

    def __init__(self, on_stdout: Writer | None, on_stderr: Writer | None) -> None:
        self._writers = (on_stdout, on_stderr)
        self._rests = [b"", b""]
        """The beginning of a character."""

    def write(self, piece: Output) -> None:
        self._pass(piece.stream - 1, piece.data)

    def finish(self) -> None:
        for index in range(len(self._writers)):
            self._pass(index, b"", final=True)

    def _pass(self, index: int, data: bytes, *, final: bool = False) -> None:
        writer = self._writers[index]
        if writer is None:
            return
        data = self._rests[index] + data
        view, at = memoryview(data), 0
        while at < len(data):
            text, used = codecs.utf_8_decode(view[at : at + _TEXT], "replace", final)
            at += used
            if not used:
                break
            writer(text)
        self._rests[index] = data[at:]


async def next_piece(stream: AsyncIterator[T]) -> T | None:
    """None at the end."""
    return await anext(stream, None)


async def close_stream(stream: AsyncIterator[T]) -> None:
    """Ends a generator that is not read to its end."""
    if (aclose := getattr(stream, "aclose", None)) is not None:
        await aclose()


def to_bytes(data: str | bytes | memoryview, field: str = "data") -> bytes:
    """Text as UTF-8."""
    if not isinstance(data, (str, bytes, bytearray, memoryview)):
        raise InvalidRequest(field, f"takes text or bytes, not {type(data).__name__}")
    try:
        return data.encode() if isinstance(data, str) else bytes(data)
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"cannot be UTF-8: {error}") from None
