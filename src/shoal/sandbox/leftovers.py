"""What a node leaves when it and its spawners are killed at once: empty cgroups, removed by the next node."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shoal.sandbox.cgroup import Hierarchies

_NAME: Final = re.compile(r"shoal-(\d+)-[0-9a-f]{8}")


class Claim:
    """A node's name, held by a file lock for as long as the node lives."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def claim(run_dir: Path) -> tuple[str, Claim]:
    """A name that no other node has, for its directories on every hierarchy."""
    folder = run_dir / "nodes"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"shoal-{os.getpid()}-{secrets.token_hex(4)}"
    return name, Claim(folder / name)


def sweep(hierarchies: Hierarchies, run_dir: Path) -> None:
    """Removes the cgroups of nodes that are dead. Nothing that has a process in it can be removed."""
    parents = [*hierarchies.v1.values(), *([hierarchies.unified] if hierarchies.unified else [])]
    for parent in parents:
        for path in parent.glob("shoal-*-*"):
            if _is_dead(path.name, run_dir):
                _remove_tree(path)
    for path in (run_dir / "nodes").glob("shoal-*-*"):
        if _is_dead(path.name, run_dir):
            path.unlink(missing_ok=True)


def _is_dead(name: str, run_dir: Path) -> bool:
    """By its process and by its lock: the pid may be another's by now, the lock a node's with another run folder."""
    match = _NAME.fullmatch(name)
    if match is None or _holds_lock(run_dir / "nodes" / name):
        return False
    return (run_dir / "nodes" / name).exists() or not Path("/proc", match[1]).exists()


def _holds_lock(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _remove_tree(path: Path) -> None:
    for child in _folders(path):
        _remove_tree(child)
    with contextlib.suppress(OSError):
        path.rmdir()


def _folders(path: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        yield from (Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
