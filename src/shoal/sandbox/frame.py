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
DATA_MAX: Final = 64 << 10
_EXIT: Final = struct.Struct("<iIQQQ")


class Kind(IntEnum):
    """What a frame says; values as in init/frame.h."""

    SPAWN = 1
    FILE = 2
    INPUT = 3
    SIGNAL = 4
    CREDIT = 5
    RESIZE = 6
    READY = 16
    FAILED = 17
    STARTED = 18
    REFUSED = 19
    OUTPUT = 20
    EXIT = 21
    TAKEN = 22


_KINDS: Final = frozenset(Kind)


class Flag(IntFlag):
    """How a command is started."""

    NONE = 0
    STDIN = 1
    TTY = 2
    REPORT_PID = 4
    """Say the pid as soon as it is known; else only the end is told, which saves a wake-up."""


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


def encode(kind: int, id: int, payload: bytes = b"", stream: int = 0, number: int = 0) -> bytes:
    return HEADER.pack(len(payload), kind, stream, 0, id, number) + payload


class Decoder:
    """Cuts a byte stream into frames and checks that none is missing."""

    def __init__(self) -> None:
        self._pending = b""
        self._number = 0

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes. PlatformError when the stream cannot be right; it is final."""
        if self._pending:
            data = self._pending + data
        at, end = 0, len(data)
        while end - at >= HEADER.size:
            length, kind, stream, zero, id, number = HEADER.unpack_from(data, at)
            if length > PAYLOAD_MAX or zero or stream > 2 or kind not in _KINDS or number != self._number:
                raise PlatformError(f"malformed frame from init: kind {kind}, length {length}, number {number}")
            start = at + HEADER.size
            if end - start < length:
                break
            self._number = (number + 1) & 0xFFFFFFFF
            at = start + length
            yield Frame(kind, stream, id, data[start:at])
        self._pending = data[at:]


def decode_exit(payload: bytes) -> Exit:
    return Exit(*_EXIT.unpack(payload))


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
