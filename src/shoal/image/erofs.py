"""EROFS files: packing a tree into one, and mounting one from the file itself, without a loop device."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import subprocess
import tempfile
from pathlib import Path

from shoal.errors import PlatformError, SetupFailed, StorageFull
from shoal.image import tree
from shoal.image.tree import Limits
from shoal.types import GiB, MiB

_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432  # the same numbers on every architecture
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 0, 1, 6
_CLOEXEC = 1
_MOUNT_ATTR_RDONLY = 1
_UUID = "00000000-0000-0000-0000-000000000000"
_LATEST = "4102444800"
"""Later times of files become this one, the year 2100, and it stands in the superblock in place of today's.
(Option -T would give every file one time, and then no .pyc in the tree would hold.)"""


def pack(source: Path, target: Path, *, limits: Limits | None = None, timeout: float = 1800) -> None:
    """Write the tree at `source`, which nobody else may change meanwhile, to the file `target`.

    The same tree gives the same bytes. Whiteouts, kept attributes, owners and times stay. InvalidRequest if
    the tree is past `limits` (its apparent size is looked at first); StorageFull; PlatformError if mkfs.erofs
    fails or is too slow.
    """
    root = tree.open_directory(source)
    try:
        size = tree.measure(root, limits).bytes
    finally:
        os.close(root)
    _run_mkfs(source, target, most=2 * size + 1 * GiB, timeout=timeout)


def _run_mkfs(source: Path, target: Path, most: int, timeout: float) -> None:
    command = ["mkfs.erofs", "-zlz4hc,3", "-C65536", f"-U{_UUID}", "--quiet"]
    process = subprocess.Popen(
        [*command, str(target), str(source)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "SOURCE_DATE_EPOCH": _LATEST},
    )
    with process:
        try:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, most))
            output = process.communicate(timeout=timeout)[0].decode(errors="replace").strip()
        except subprocess.TimeoutExpired as error:
            raise PlatformError(f"mkfs.erofs took more than {timeout:g} s for {source}") from error
        finally:
            process.kill()
    if process.returncode == 0:
        return
    if os.strerror(errno.ENOSPC) in output or os.strerror(errno.EDQUOT) in output:
        raise StorageFull(f"no room to pack {source} as {target}")
    raise PlatformError(f"mkfs.erofs failed for {source} ({process.returncode}): {output[-2000:]}")


def attach(file: Path) -> int:
    """Mount an EROFS file nowhere: the O_PATH descriptor returned is its root, and the mount ends when that
    is closed.

    Needs root. SetupFailed names the step and errno: ENOTBLK where the file lies on a file system that can't
    be mounted from (tmpfs, overlayfs).
    """
    context = _call("fsopen", _FSOPEN, b"erofs", _CLOEXEC)
    try:
        _call("fsconfig source", _FSCONFIG, context, _FSCONFIG_SET_STRING, b"source", os.fsencode(file), 0)
        _call("fsconfig ro", _FSCONFIG, context, _FSCONFIG_SET_FLAG, b"ro", None, 0)
        _call("fsconfig create", _FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
        return _call("fsmount", _FSMOUNT, context, _CLOEXEC, _MOUNT_ATTR_RDONLY)
    finally:
        os.close(context)


def _call(step: str, number: int, *arguments: bytes | int | None) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result = int(libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise SetupFailed(f"erofs: {step}", ctypes.get_errno())
    return result


def mountable(folder: Path) -> bool:
    """Whether EROFS files in `folder` can be written and mounted, found by doing both with a tiny one."""
    if os.geteuid() != 0 or shutil.which("mkfs.erofs") is None:
        return False
    with tempfile.TemporaryDirectory(dir=folder, prefix="probe.") as probe:
        content = Path(probe, "content")
        content.mkdir()
        try:
            pack(content, Path(probe, "image"), limits=Limits(bytes=1 * MiB))
            os.close(attach(Path(probe, "image")))
        except (PlatformError, OSError):
            return False
        return True
