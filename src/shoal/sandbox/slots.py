"""Slots: ranges of 65,536 uids and gids, one for each live sandbox, that no other sandbox or node on this machine uses.

Kernel accounts (inotify instances, pipe buffers, descriptors in flight) hang on uids, so two sandboxes that shared a
range could starve each other.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

from shoal.errors import CapacityError

IDS: Final = 65_536
FIRST: Final = 0x7000_0000
"""Above what distributions, useradd, newuidmap and systemd hand out."""
BLOCK: Final = 256
BLOCKS: Final = 128


class Slots:
    """Takes blocks of slots by a file lock each, so that a crash gives them back. Freed slots are used again first."""

    def __init__(self, folder: Path) -> None:
        """`folder`: shared by all nodes of this machine; made if missing."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._locks: list[int] = []
        self._free: list[int] = []

    def take(self) -> int:
        """The first uid of a free slot. CapacityError when the machine has none left."""
        if not self._free:
            self._take_block()
        return self._free.pop()

    def give(self, slot: int) -> None:
        self._free.append(slot)

    def _take_block(self) -> None:
        for block in range(BLOCKS):
            descriptor = os.open(self._folder / str(block), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            self._locks.append(descriptor)
            first = FIRST + block * BLOCK * IDS
            self._free = [first + index * IDS for index in reversed(range(BLOCK))]
            return
        raise CapacityError("all id ranges of this machine are in use", retry_after=1.0)

    def close(self) -> None:
        for descriptor in self._locks:
            os.close(descriptor)
        self._locks.clear()
        self._free.clear()
