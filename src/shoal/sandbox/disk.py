"""Writable layers on disk: a file system of exactly the profile's size in a sparse file, on any host file system.

The size and the number of files are then limits of the kernel's, without quotas. The file has no name any more once it
is attached to a loop device, which lets go of it with the last mount: nothing is left, whatever is killed when.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Final

from shoal.errors import PlatformError, StorageFull, Unsupported
from shoal.types import MiB

_LOOP_CTL_GET_FREE: Final = 0x4C82
_LOOP_CONFIGURE: Final = 0x4C0A
_AUTOCLEAR: Final = 4
_LEAST: Final = 16 * MiB
_TRIES: Final = 32
_OPTIONS: Final = "lazy_itable_init=1,nodiscard,assume_storage_prezeroed=1"


class DiskUpper:
    """A file system attached to a loop device. `close` once it is mounted, or not needed."""

    def __init__(self, device: str, descriptor: int) -> None:
        self.device = device
        self._descriptor = descriptor

    def close(self) -> None:
        os.close(self._descriptor)


def missing() -> str | None:
    """What this machine lacks for such layers, with the way out; None where it has all."""
    if os.geteuid() != 0:
        return "root, to mount a file system"
    if not os.access("/dev/loop-control", os.W_OK):
        return "loop devices (sudo modprobe loop; in a container: --device /dev/loop-control and loop devices)"
    if shutil.which("mke2fs", path=_path()) is None:
        return "mke2fs: install e2fsprogs"
    return None


def free(folder: Path) -> int:
    """Bytes that are left where the layers are to lie."""
    folder.mkdir(parents=True, exist_ok=True)
    usage = os.statvfs(folder)
    return usage.f_bavail * usage.f_frsize


async def make_upper(folder: Path, size: int, inodes: int) -> DiskUpper:
    """`folder`: on the disk it is to lie on. Unsupported without loop devices or mke2fs, StorageFull."""
    return await asyncio.to_thread(_make, folder, max(size, _LEAST), inodes)


def _make(folder: Path, size: int, inodes: int) -> DiskUpper:
    if (room := free(folder)) < _LEAST:
        raise StorageFull(f"{folder} has {room} bytes free, too few for a sandbox's files")
    path = folder / f"upper-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, size)
        _format(path, inodes)
        return _attach(descriptor, path)
    finally:
        path.unlink()
        os.close(descriptor)


def _format(path: Path, inodes: int) -> None:
    """Without a journal: the files of a sandbox are worth nothing after a crash. Takes some 15 ms."""
    command = ["mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-b", "4096", "-N", str(inodes)]
    try:
        subprocess.run(
            [*command, "-E", _OPTIONS, str(path)], check=True, capture_output=True, text=True, env={"PATH": _path()}
        )
    except FileNotFoundError as error:
        raise Unsupported("profile.upper: 'disk' needs mke2fs: install e2fsprogs, or use 'memory'") from error
    except subprocess.CalledProcessError as error:
        raise PlatformError(f"mke2fs: {error.stderr.strip()[:300]}") from error


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _attach(file: int, path: Path) -> DiskUpper:
    try:
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise Unsupported(f"profile.upper: 'disk' needs loop devices ({error.strerror}); use 'memory'") from error
    try:
        for _ in range(_TRIES):  # another may take the one that was free
            device = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
            loop = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(loop, _LOOP_CONFIGURE, _configuration(file))
            except OSError:
                os.close(loop)
                continue
            return DiskUpper(device, loop)
    finally:
        os.close(control)
    raise PlatformError(f"no loop device takes {path}")


def _configuration(file: int) -> bytes:
    """struct loop_config of linux/loop.h: fd, block size, struct loop_info64 with its flags, reserved."""
    info = struct.pack("<QQQQQIIII64s64s32s2Q", 0, 0, 0, 0, 0, 0, 0, 0, _AUTOCLEAR, b"", b"", b"", 0, 0)
    return struct.pack("<II", file, 4096) + info + bytes(64)
