"""Small read-only trees that sandboxes need and no image brings: /sys, and the places where mounts go."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

_SYS_FILES: Final = (
    "devices/system/cpu/online",
    "devices/system/cpu/possible",
    "devices/system/cpu/present",
    "devices/system/cpu/kernel_max",
    "devices/system/cpu/cpu*/topology/*",
    "devices/system/cpu/cpu*/cache/index*/*",
    "devices/system/node/online",
    "devices/system/node/possible",
    "devices/system/node/node*/cpulist",
    "devices/system/node/node*/cpumap",
    "kernel/mm/transparent_hugepage/enabled",
    "kernel/mm/transparent_hugepage/hpage_pmd_size",
)
"""What programs read to size themselves (libc, OpenMP, JVM, allocators). Nothing that tells one host from another."""
_SYS_FOLDERS: Final = (
    "block",
    "bus",
    "class/net",
    "dev",
    "devices/system",
    "firmware",
    "fs/cgroup",
    "kernel",
    "module",
    "power",
)

BASE_FOLDERS: Final = ("proc", "sys", "dev/pts", "dev/shm", "dev/mqueue")
DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")


class Trees:
    """A folder of such trees by content, shared by the nodes of this machine; empty again after a reboot."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def sys(self, source: Path = Path("/sys")) -> Path:
        """A copy of the harmless part of /sys."""
        contents = {}
        for pattern in _SYS_FILES:
            for path in sorted(source.glob(pattern)):
                with contextlib.suppress(OSError):
                    contents[str(path.relative_to(source))] = path.read_bytes()
        return self._publish("sys", [*_SYS_FOLDERS, *contents], lambda root: _fill(root, _SYS_FOLDERS, contents))

    def mount_points(self, targets: Iterable[str], *, devices: bool) -> Path:
        """A tree with a directory for each target, and files in /dev to bind device nodes over."""
        folders = sorted({*BASE_FOLDERS, *(target.strip("/") for target in targets)} - {""})
        contents = {f"dev/{name}": b"" for name in DEVICES} if devices else {}
        return self._publish("points", [*folders, *contents], lambda root: _fill(root, folders, contents))

    def _publish(self, name: str, key: Iterable[str], fill: Callable[[Path], None]) -> Path:
        digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:16]
        final = self._folder / f"{name}-{digest}"
        if final.is_dir():
            return final
        aside = self._folder / f".{name}-{secrets.token_hex(8)}"
        aside.mkdir(mode=0o755)
        fill(aside)
        try:
            aside.rename(final)
        except OSError:  # another node was first
            shutil.rmtree(aside)
        return final


def _fill(root: Path, folders: Iterable[str], contents: dict[str, bytes]) -> None:
    old = os.umask(0o022)
    try:
        for folder in folders:
            (root / folder).mkdir(parents=True, exist_ok=True)
        for path, data in contents.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
    finally:
        os.umask(old)
