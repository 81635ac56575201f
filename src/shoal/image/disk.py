"""The file system that holds Shoal's data: its room, and writes that survive a crash whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import StorageFull
from shoal.image import tree

_WAY_OUT = "remove layers that are no longer needed, free space, or keep the store on another file system"


def check_room(folder: Path, need_bytes: int, need_inodes: int) -> None:
    """StorageFull, with the numbers, unless that much is free."""
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if free < need_bytes:
        raise StorageFull(f"{folder}: {free:,} bytes free, {need_bytes:,} needed; {_WAY_OUT}")
    # btrfs and others make inodes as they go and report none at all.
    if found.f_files and found.f_favail < need_inodes:
        raise StorageFull(f"{folder}: {found.f_favail:,} inodes free, {need_inodes:,} needed; {_WAY_OUT}")


@contextlib.contextmanager
def reporting_full(folder: Path) -> Iterator[None]:
    """Turn ENOSPC and EDQUOT into StorageFull."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        found = os.statvfs(folder)
        free = f"{found.f_bavail * found.f_frsize:,} bytes and {found.f_favail:,} inodes free"
        raise StorageFull(f"{folder}: {error.strerror} while building ({free}); {_WAY_OUT}") from error


def replace_file(file: Path, content: bytes, tmp: Path) -> None:
    """Write a file whole or not at all: aside in `tmp` (same file system), flushed, renamed over `file`."""
    with tempfile.NamedTemporaryFile(dir=tmp, delete=False) as aside:
        aside.write(content)
        aside.flush()
        os.fsync(aside.fileno())
    Path(aside.name).rename(file)


def write_flushed(file: Path, content: bytes) -> None:
    """A new file, on the disk with its name when this returns."""
    with file.open("xb") as new:
        new.write(content)
        new.flush()
        os.fsync(new.fileno())
    flush_folder(file.parent)


def flush_folder(folder: Path) -> None:
    """Write out a folder's own entries."""
    fd = tree.open_directory(folder)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def digest(file: Path) -> str:
    """sha256 of a file's bytes, as 64 hex digits."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def flush(folder: Path) -> None:
    """Write out the whole file system that holds `folder`: one call, where a tree has thousands of files."""
    fd = tree.open_directory(folder)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(folder))
    finally:
        os.close(fd)
