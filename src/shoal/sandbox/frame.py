"""The wire between a node and an init, as init/frame.h defines it. Everything that an init sends is parsed here."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum, IntFlag
from typing import Final, NamedTuple

from shoal.errors import PlatformError
from shoal.sandbox.values import encode_int, encode_list, encode_text

HEADER: Final = struct.Struct("<IBBHII")
PAYLOAD_MAX: Final = 4 << 20
DATA_MAX: Final = 256 << 10
"""Bytes of input in one frame."""
RECEIVE: Final = 64 << 10
"""Bytes to ask for when anything may come. Below the size from which malloc maps and unmaps memory for each call."""
PIECE: Final = 256 << 10
"""Bytes of a large payload to ask for at a time."""
_EXIT: Final = struct.Struct("<iIQQQI")
_REPORT: Final = struct.Struct("<IQ")


class Kind(IntEnum):
    """What a frame says; values as in init/frame.h."""

    SPAWN = 1
    FILE = 2
    INPUT = 3
    SIGNAL = 4
    CREDIT = 5
    RESIZE = 6
    NARROW = 15
    READY = 16
    FAILED = 17
    STARTED = 18
    REFUSED = 19
    OUTPUT = 20
    EXIT = 21
    TAKEN = 22
    REPORT = 23


_KINDS: Final = frozenset(Kind)


class Flag(IntFlag):
    """How a command is started."""

    NONE = 0
    STDIN = 1
    TTY = 2
    REPORT_PID = 4
    """Say the pid as soon as it is known; else only the end is told, which saves a wake-up."""
    SESSION = 8
    """Its stdin is a socket, and what it itself says on it comes back as reports."""


class FileOperation(IntEnum):
    """What a file request does."""

    READ = 1
    WRITE = 2
    APPEND = 3
    LIST = 4
    STAT = 5
    MKDIR = 6
    REMOVE = 7
    RENAME = 8
    SYMLINK = 9
    PACK = 10
    UNPACK = 11
    WATCH = 12


class Frame(NamedTuple):
    kind: int
    stream: int
    id: int
    payload: bytes


class Exit(NamedTuple):
    """The end of a command, as init saw it."""

    status: int
    """As from wait(2)."""
    oom_kills: int
    duration_ns: int
    cpu_us: int
    peak_memory: int
    refused: int = 0
    """Processes that the limit refused to the sandbox meanwhile; counted where the command failed."""


def encode(kind: int, id: int, payload: bytes = b"", stream: int = 0, number: int = 0) -> bytes:
    return encode_header(kind, id, len(payload), stream, number) + payload


def encode_header(kind: int, id: int, length: int, stream: int = 0, number: int = 0) -> bytes:
    """What goes before a payload of that length."""
    return HEADER.pack(length, kind, stream, 0, id, number)


class Decoder:
    """Cuts a byte stream into frames and checks that none is missing.

    The payload of an OUTPUT frame is handed on as it comes, in as many frames as it takes: nothing of it waits here and
    nothing of it is copied where `wanted` is heeded.
    """

    def __init__(self) -> None:
        self._pending = b""
        self.number = 0
        """Frames that have begun."""
        self.left = 0
        """Bytes of an OUTPUT frame that are still to come."""
        self._stream = 0
        self._id = 0
        self.wanted = RECEIVE
        """How many bytes to receive next: what is left of a large payload, then the next header alone."""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes. PlatformError when the stream cannot be right; it is final."""
        if self.left:
            piece = data[: self.left]
            data = data[len(piece) :]
            self._continue(len(piece))
            yield Frame(Kind.OUTPUT, self._stream, self._id, piece)
            if not data:
                return
        if self._pending:
            data = self._pending + data
        at, end = 0, len(data)
        while end - at >= HEADER.size:
            length, kind, stream, zero, id, number = HEADER.unpack_from(data, at)
            if length > PAYLOAD_MAX or zero or stream > 2 or kind not in _KINDS or number != self.number:
                raise PlatformError(f"malformed frame from init: kind {kind}, length {length}, number {number}")
            start = at + HEADER.size
            whole = end - start >= length
            if not whole and kind != Kind.OUTPUT:
                break
            self.number = (number + 1) & 0xFFFFFFFF
            at = min(start + length, end)
            if not whole:
                self._begin(stream, id, length - (end - start))
            if at > start or whole:
                yield Frame(kind, stream, id, data[start:at])
        self._pending = data[at:]
        if not self.left:
            self.wanted = RECEIVE

    def _begin(self, stream: int, id: int, left: int) -> None:
        self._stream, self._id, self.left = stream, id, left
        self.wanted = min(left, PIECE)

    def _continue(self, length: int) -> None:
        self.left -= length
        self.wanted = min(self.left, PIECE) or HEADER.size


def decode_exit(payload: bytes) -> Exit:
    return Exit(*_EXIT.unpack(payload))


class Report(NamedTuple):
    """What the shell of a session said. All output that came before it has been handed over."""

    oom_kills: int
    """Since its last report, as the next one."""
    cpu_us: int
    text: bytes


def decode_report(payload: bytes) -> Report:
    oom_kills, cpu_us = _REPORT.unpack_from(payload)
    return Report(oom_kills, cpu_us, payload[_REPORT.size :])


class Request(NamedTuple):
    """A program or a file operation, before it is started."""

    argv: Sequence[str | bytes]
    """The program and its arguments; for a file operation its path (and second path)."""
    env: Sequence[str] | bytes
    """NAME=value; or all of them as `encode_list` made them, for an environment that is used again and again."""
    cwd: str
    uid: int = 0
    gid: int = 0
    groups: Sequence[int] = ()
    flags: int = 0
    rows: int = 0
    cols: int = 0
    operation: int = -1
    number: int = 0
    """Mode or depth of a file operation; -1 where there is none."""

    def wire(self, window: int) -> bytes:
        """`window`: bytes that may come on each stream before more is granted."""
        numbers = (self.flags, self.uid, self.gid, window, self.rows, self.cols, self.operation, self.number)
        groups = (len(self.groups), *self.groups)
        return b"".join(
            (
                *map(encode_int, numbers),
                encode_text(self.cwd),
                *map(encode_int, groups),
                encode_list(self.argv),
                self.env if isinstance(self.env, bytes) else encode_list(self.env),
            )
        )
