"""What a sandbox's root has below every image: folders that things are mounted on, devices, a workspace.

An image brings its own over it, with its own modes; what it lacks is then still there.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from shoal.image.manifest import Meta
from shoal.image.store import Store
from shoal.types import Layer

_REVISION = 1
_DEVICES = {
    "null": (1, 3),
    "zero": (1, 5),
    "full": (1, 7),
    "random": (1, 8),
    "urandom": (1, 9),
    "tty": (5, 0),
}
# /root can be passed through but not listed: interpreters may lie below it.
_FOLDERS = {
    "dev": 0o755, "dev/mqueue": 0o755, "dev/pts": 0o755, "dev/shm": 0o1777, "home": 0o755, "mnt": 0o755,
    "opt": 0o755, "proc": 0o555, "root": 0o711, "run": 0o755, "run/lock": 0o1777, "srv": 0o755, "sys": 0o555,
    "tmp": 0o1777, "workspace": 0o777,
}  # fmt: skip
_LINKS = {
    "dev/fd": "/proc/self/fd",
    "dev/stdin": "/proc/self/fd/0",
    "dev/stdout": "/proc/self/fd/1",
    "dev/stderr": "/proc/self/fd/2",
    "dev/ptmx": "pts/ptmx",
}


def write(root: Path) -> None:
    """Into an empty folder."""
    for name, mode in _FOLDERS.items():
        (root / name).mkdir()
        (root / name).chmod(mode)
    for name, target in _LINKS.items():
        (root / name).symlink_to(target)
    _make_devices(root / "dev")


def publish_skeleton(store: Store) -> Layer:
    """The layer that goes below images made elsewhere; made once."""
    inputs = hashlib.sha256(f"skeleton {_REVISION} {os.geteuid() == 0}".encode()).hexdigest()
    return store.find_or_build(inputs, lambda: _build(store, inputs))


def _build(store: Store, inputs: str) -> Layer:
    with store.stage() as folder:
        root = folder / "root"
        root.mkdir(0o755)
        write(root)
        return store.publish_directory(root, meta=Meta(), inputs=inputs)


def _make_devices(folder: Path) -> None:
    """For an ordinary user, who can make none, files over which a sandbox binds the machine's own."""
    for name, (major, minor) in _DEVICES.items():
        if os.geteuid() == 0:
            os.mknod(folder / name, stat.S_IFCHR, os.makedev(major, minor))
        else:
            (folder / name).touch()
        (folder / name).chmod(0o666)
