"""Locks that hold between processes, tasks and threads, and end with their holder, however it ended."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.25
"""Seconds between two looks at a lock that another one holds."""


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the lock `file`, waiting for it as long as it takes."""
    while (fd := _try(file, fcntl.LOCK_EX)) is None:
        pass
    with _held(file, fd):
        yield


@contextlib.asynccontextmanager
async def locked_async(file: Path) -> AsyncIterator[None]:
    """The same without blocking the event loop; a task that is cancelled stops waiting."""
    pause = _FIRST_PAUSE
    while (fd := _try(file, fcntl.LOCK_EX | fcntl.LOCK_NB)) is None:
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    with _held(file, fd):
        yield


def _try(file: Path, how: int) -> int | None:
    """The locked descriptor, or None if another one has it or it was deleted between opening and locking."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, how)
        if _is_still(file, fd):
            return fd
    except BlockingIOError:
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _is_still(file: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(fd))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _held(file: Path, fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        file.unlink()  # while it is ours: whoever waits for this inode sees that it is gone and tries again
        os.close(fd)


def hold_folder(folder: Path) -> int | None:
    """Be the only one to use a folder until the descriptor returned is closed; None if it is held or gone."""
    return _lock_folder(folder, fcntl.LOCK_EX)


def share_folder(folder: Path) -> int | None:
    """Mark a folder as in use, beside others, until the descriptor returned is closed; None if it is gone."""
    return _lock_folder(folder, fcntl.LOCK_SH)


def _lock_folder(folder: Path, how: int) -> int | None:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
        if _is_still(folder, fd):
            return fd
    except BlockingIOError:
        pass
    os.close(fd)
    return None
