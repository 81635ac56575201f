"""What processes of one sandbox open and execute, as the kernel's fanotify tells it. Only for root.

Nothing waits for the reader: events queue up in the kernel, which drops what is too much and says so. Each event brings
a descriptor of the file, from which its path is read; nothing else is done with it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from shoal.errors import Unsupported
from shoal.sandbox.audit import AuditLog

_NONBLOCK, _CLOEXEC, _NOTIFY = 0x2, 0x1, 0x0
_MARK_ADD, _MARK_MOUNT, _MARK_FILESYSTEM = 0x1, 0x10, 0x100
_OPEN, _OPEN_EXEC, _OVERFLOW = 0x20, 0x1000, 0x4000
_EVENT: Final = struct.Struct("=IBBHQii")
"""struct fanotify_event_metadata"""
_BATCH: Final = 32 * _EVENT.size
"""Bytes read at once: what a turn of the loop is held up by stays near a millisecond."""
_PATH_MAX: Final = 4096
_QUEUE: Final = 16384
"""Events that the kernel holds for one group (fs.fanotify.max_queued_events)."""


class FileWatch:
    """Owns one fanotify group, whose events go to the log on the loop that made it."""

    def __init__(self, log: AuditLog) -> None:
        """Unsupported where this is refused: without root, or with too many watches on this machine."""
        self._log = log
        self._libc = ctypes.CDLL(None, use_errno=True)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOATIME
        self._group = int(self._libc.fanotify_init(_NOTIFY | _CLOEXEC | _NONBLOCK, flags))
        if self._group < 0:
            raise Unsupported(
                f"fanotify: {os.strerror(ctypes.get_errno())}; it takes root and fs.fanotify.max_user_groups"
            )
        asyncio.get_running_loop().add_reader(self._group, self._read)
        log.add_source(self.drain)

    def add(self, mount: int, *, whole: bool) -> None:
        """Begins with what is opened by this mount; with `whole` of its file system, by whatever mount."""
        kind = _MARK_FILESYSTEM if whole else _MARK_MOUNT
        path = f"/proc/self/fd/{mount}".encode()
        if self._libc.fanotify_mark(self._group, _MARK_ADD | kind, ctypes.c_uint64(_OPEN | _OPEN_EXEC), -1, path):
            raise Unsupported(f"fanotify: {os.strerror(ctypes.get_errno())}")

    def drain(self) -> None:
        """Reports what is queued by now, but no more than a queue holds: what is inside may go on opening."""
        for _ in range(_QUEUE // 32):
            if self._group < 0 or not self._read():
                return

    def _read(self) -> bool:
        """One batch; False if there was none."""
        try:
            data = os.read(self._group, _BATCH)
        except BlockingIOError:
            return False
        except OSError:  # the file can't be opened any more, or not by us: a lease, say
            self._log.add_gap(time.time(), 1)
            return True
        for at in range(0, len(data), _EVENT.size):
            _, _, _, _, mask, descriptor, pid = _EVENT.unpack_from(data, at)
            if mask & _OVERFLOW or descriptor < 0:
                self._log.add_gap(time.time(), 1)
                continue
            try:
                self._write_down(descriptor, mask, pid)
            finally:
                os.close(descriptor)
        return True

    def _write_down(self, descriptor: int, mask: int, pid: int) -> None:
        path = os.fsencode(Path(f"/proc/self/fd/{descriptor}").readlink())[:_PATH_MAX].decode("utf-8", "replace")
        inside, program = _process(pid)
        how = "execute" if mask & _OPEN_EXEC else "open"
        self._log.add(time.time(), "file", inside, program, f"{how} {path}", allowed=True)

    def forsake(self) -> None:
        """In a forked child of the node: the watch is the parent's."""
        os.close(self._group)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._group)
        os.close(self._group)
        self._group = -1


def _process(pid: int) -> tuple[int, str]:
    """Pid inside and name of a process. Another may have its number by now, so one of the host's is not shown."""
    lines: list[str] = []
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines()
    fields = dict(line.partition(":\t")[::2] for line in lines)
    numbers = fields.get("NSpid", "").split()
    return (int(numbers[-1]), fields.get("Name", "")) if len(numbers) > 1 else (0, "")
