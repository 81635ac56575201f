"""Watches on files of a sandbox: its init's records of events, as they come."""

from __future__ import annotations

import asyncio
import os
import struct
from pathlib import Path
from typing import Final

from shoal.errors import LimitExceeded, NotFound, PlatformError
from shoal.node.files import Files, check_end
from shoal.sandbox.channel import FileOperation, Flag, Process
from shoal.types import EventKind, FileEvent

WATCHES_MAX: Final = 32
"""Of one sandbox at a time. Each is a process in it and one of its user's 128 inotify instances."""
_READY: Final = 1
_KINDS: Final[dict[int, EventKind]] = {
    2: "created", 3: "modified", 4: "closed", 5: "removed", 6: "renamed", 7: "attributes", 8: "overflow",
}  # fmt: skip
"""As `enum event` of init/watch.c has them."""
_NUMBERS: Final = struct.Struct("<II")
_LENGTH: Final = struct.Struct("<I")
_PATH_MAX: Final = 1 << 14
_READY_SECONDS: Final = 60.0
_EUSERS: Final = 87


class Watch:
    """One of a path. Events wait here only up to the channel's window, then inside, and then they are an overflow."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._data = bytearray()
        self._some = asyncio.Event()
        self._process: Process | None = None
        self._closed = False

    async def open(self, files: Files, *, recursive: bool) -> None:
        """Returns when what happens from now on is seen. NotFound if there is nothing at the path."""
        self._process = files.start(
            FileOperation.WATCH, [self._path], int(recursive), Flag.NONE, self._take, auto_credit=False
        )
        self._process.ended.add_done_callback(lambda _: self._some.set())
        try:
            async with asyncio.timeout(_READY_SECONDS):
                await self._wait()
        except BaseException:
            self.close()
            raise
        event = self._next()
        assert event is None, "the first record says that it is ready"

    def _take(self, stream: int, data: bytes) -> None:
        if stream == 1:
            self._data += data
            self._some.set()

    async def _wait(self) -> None:
        """Until a whole record is there. Raises what has ended the watch."""
        assert self._process is not None
        while not self._closed and _record_length(self._data) is None:
            if self._process.ended.done():
                self._raise(self._process)
            self._some.clear()
            await self._some.wait()

    def _raise(self, process: Process) -> None:
        status = process.ended.result().status
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _EUSERS:
            raise LimitExceeded(f"{self._path}: folders watched by one user", _watches_of_a_user())
        check_end(status, self._path)
        raise NotFound(f"{self._path}: what was watched is gone")

    async def events(self) -> list[FileEvent]:
        """Those that have come, at least one; none once it is closed.

        NotFound when what is watched has been removed or renamed, SandboxGone with the sandbox."""
        await self._wait()
        found: list[FileEvent] = []
        while not self._closed and _record_length(self._data) is not None:
            if (event := self._next()) is not None:
                found.append(event)
        return found

    def _next(self) -> FileEvent | None:
        """Cuts a record off. None for the one that says that the watch is ready."""
        length = _record_length(self._data)
        assert length is not None
        record = bytes(self._data[:length])
        del self._data[:length]
        assert self._process is not None
        self._process.grant(1, length)
        return parse_event(record, self._path)

    def close(self) -> None:
        """Ends it; whoever waits for events gets none."""
        self._closed = True
        self._some.set()
        if self._process is not None:
            self._process.kill(9, tree=True)


def _record_length(data: bytes | bytearray) -> int | None:
    """Of the first record; None while it is not whole. PlatformError for one that no kernel has paths for."""
    at = _NUMBERS.size
    for _ in range(2):
        if len(data) < at + _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(data, at)
        if length > _PATH_MAX:
            raise PlatformError(f"a watch told of a path of {length} bytes")
        at += _LENGTH.size + length
    return at if len(data) >= at else None


def parse_event(record: bytes, base: str) -> FileEvent | None:
    """A whole record. None for READY."""
    number, directory = _NUMBERS.unpack_from(record)
    at = _NUMBERS.size
    texts = []
    for _ in range(2):
        (length,) = _LENGTH.unpack_from(record, at)
        at += _LENGTH.size
        texts.append(os.fsdecode(record[at : at + length]))
        at += length
    if number == _READY:
        return None
    if number not in _KINDS:
        raise PlatformError(f"a watch told of an event {number}")
    kind = _KINDS[number]
    old = _join(base, texts[1]) if kind == "renamed" else None
    return FileEvent(kind=kind, path=_join(base, texts[0]), old=old, directory=bool(directory))


def _join(base: str, path: str) -> str:
    return f"{base.rstrip('/')}/{path}" if path else base


def _watches_of_a_user() -> int:
    return int(Path("/proc/sys/fs/inotify/max_user_watches").read_text())
