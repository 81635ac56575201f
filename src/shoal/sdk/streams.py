"""Between streams of bytes and what users take them as."""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator, Callable

from shoal.errors import InvalidRequest
from shoal.node.interface import Output

Writer = Callable[[str], object]


class TextStreams:
    """Hands each stream on as text. A character that comes in pieces is held until it is whole."""

    def __init__(self, on_stdout: Writer | None, on_stderr: Writer | None) -> None:
        self._writers = (on_stdout, on_stderr)
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = (decoder("replace"), decoder("replace"))

    def write(self, piece: Output) -> None:
        self._pass(piece.stream - 1, self._decoders[piece.stream - 1].decode(piece.data))

    def finish(self) -> None:
        for index, decoder in enumerate(self._decoders):
            self._pass(index, decoder.decode(b"", final=True))

    def _pass(self, index: int, text: str) -> None:
        writer = self._writers[index]
        if writer is not None and text:
            writer(text)


async def next_piece(stream: AsyncIterator[bytes]) -> bytes | None:
    """None at the end."""
    return await anext(stream, None)


async def close_stream(stream: AsyncIterator[bytes]) -> None:
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
