"""Streams of bytes from archives: parts of files, decompressed, held against their digest while they are read."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import zlib
from typing import Any, BinaryIO, cast

import zstandard

from shoal.errors import DigestMismatch, InvalidRequest, LimitExceeded
from shoal.types import MiB

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_BUFFER = 1 * MiB
_WINDOW_MAX = 128 * MiB
"""Memory that a zstd stream may ask for."""


class _Part(io.RawIOBase):
    """Some bytes of an open file, whose own position stays what it is."""

    def __init__(self, file: int, start: int, size: int) -> None:
        self._file = os.dup(file)
        self._at = start
        self._end = start + size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._end - self._at)
        done = os.preadv(self._file, [memoryview(buffer)[:wanted]], self._at) if wanted else 0
        self._at += done
        return done

    def close(self) -> None:
        if not self.closed:
            os.close(self._file)
        super().close()


def part(file: int, start: int, size: int) -> BinaryIO:
    """`size` bytes of an open file from `start` on."""
    return cast("BinaryIO", io.BufferedReader(_Part(file, start, size), _BUFFER))


class _Checked(io.RawIOBase):
    """Another stream, hashed as it goes by."""

    def __init__(self, source: BinaryIO, digest: str, what: str, most: int) -> None:
        self._source = source
        self._digest = digest.removeprefix("sha256:")
        self._what = what
        self._most = most
        self._size = 0
        self._hash = hashlib.sha256()
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = _read(self._source, len(buffer), self._what)
        self._size += len(data)
        if self._size > self._most:
            raise LimitExceeded(f"{self._what}, in bytes", self._most)
        if data:
            self._hash.update(data)
            buffer[: len(data)] = data
        elif len(buffer) and not self._ended:
            self._ended = True
            if self._hash.hexdigest() != self._digest:
                raise DigestMismatch(self._what, self._digest, self._hash.hexdigest())
        return len(data)

    def close(self) -> None:
        self._source.close()
        super().close()


def checked(source: BinaryIO, digest: str, what: str, most: int) -> BinaryIO:
    """The same bytes. Whoever reads to the end gets DigestMismatch if they are not those of the digest.

    LimitExceeded past `most` bytes. `what`: as messages call it. Closing it closes the source.
    """
    return cast("BinaryIO", io.BufferedReader(_Checked(source, digest, what, most), _BUFFER))


def is_compressed(source: BinaryIO) -> bool:
    """By its first bytes; the position stays."""
    start = source.tell()
    head = source.read(4)
    source.seek(start)
    return head.startswith((_GZIP, _ZSTD))


def decompressed(source: BinaryIO) -> BinaryIO:
    """The plain bytes of gzip, zstd or uncompressed data, by its first bytes. The source stays open."""
    buffered = source if isinstance(source, io.BufferedReader) else io.BufferedReader(cast("io.RawIOBase", source))
    head = buffered.peek(4)[:4]
    if head.startswith(_GZIP):
        return cast("BinaryIO", gzip.GzipFile(fileobj=buffered, mode="rb"))
    if head.startswith(_ZSTD):
        reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW_MAX)
        return cast("BinaryIO", reader.stream_reader(buffered, read_across_frames=True, closefd=False))
    return cast("BinaryIO", buffered)


def _read(source: BinaryIO, size: int, what: str) -> bytes:
    try:
        return source.read(size)
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise InvalidRequest("archive", f"{what} is damaged or cut off: {error}") from None
