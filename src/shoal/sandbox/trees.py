"""Small trees that sandboxes need and no image brings: the places where mounts go."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

BASE_FOLDERS: Final = ("proc", "sys", "dev/pts", "dev/shm", "dev/mqueue")
DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")


class MountPoints:
    """Trees of nothing but places for mounts, by content, shared by the nodes of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)

    def tree(self, targets: Iterable[str], *, devices: bool) -> Path:
        """A directory for each target; with `devices` files in /dev to bind device nodes over."""
        folders = sorted({*BASE_FOLDERS, *(target.strip("/") for target in targets)} - {""})
        files = [f"dev/{name}" for name in DEVICES] if devices else []
        digest = hashlib.sha256("\0".join([*folders, *files]).encode()).hexdigest()[:16]
        final = self._folder / f"points-{digest}"
        if not final.is_dir():
            self._publish(final, folders, files)
        return final

    def _publish(self, final: Path, folders: Iterable[str], files: Iterable[str]) -> None:
        aside = self._folder / f".points-{secrets.token_hex(8)}"
        aside.mkdir()
        root = os.open(aside, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fchmod(root, 0o755)
            for folder in folders:
                make_folders(root, folder)
            for file in files:
                write_file(root, file, b"")
            aside.rename(final)
        except OSError:
            shutil.rmtree(aside)
            if not final.is_dir():  # else another node was first
                raise
        finally:
            os.close(root)


def make_folders(root: int, path: str) -> None:
    """With their modes whatever our umask."""
    parts = path.split("/")
    for count in range(1, len(parts) + 1):
        folder = "/".join(parts[:count])
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, dir_fd=root)
            os.chmod(folder, 0o755, dir_fd=root)


def write_file(root: int, path: str, data: bytes) -> None:
    """Makes the file, and the folders that it is in."""
    if "/" in path:
        make_folders(root, path.rpartition("/")[0])
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=root)
    try:
        os.fchmod(descriptor, 0o644)
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)
