"""How much a disk takes: measured once by writing to it, kept beside the store, measured anew on demand."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from shoal.image.store import Store
from shoal.types import MiB

_FILE: Final = "throughput-v1.json"
_STREAMS: Final = 4
_PIECE: Final = 1 * MiB
_SECONDS: Final = 0.5
PER_TASK: Final = 75.0 * MiB
"""Bytes a second that one build, fetch or unpacking writes: of a tar with 22,000 files here."""
_MOST: Final = 256 * MiB
"""Written at the most, however fast it is."""
_ROOM: Final = 2 * _MOST


class Throughput(Struct, frozen=True):
    """Bytes a second that reach the disk."""

    peak: float
    """By several writers at once, each flushing what it wrote."""
    measured: float
    """Seconds since the epoch."""
    device: int
    """Of the file system that it was measured on."""

    def slots(self, per_task: float = PER_TASK, processors: int | None = None) -> int:
        """How many tasks at once use the disk fully without thrashing it: floor(peak / per task).

        `per_task`: bytes a second that one writes. At least one, and no more than two for each processor, which then
        are what is short."""
        most = 2 * (processors or os.cpu_count() or 1)
        return max(1, min(int(self.peak // per_task), most))


def read_throughput(store: Store, *, anew: bool = False) -> Throughput:
    """What was measured for the store's disk; measured now (about half a second) if never, elsewhere, or `anew`."""
    file = store.root / _FILE
    if not anew:
        try:
            found = msgspec.json.decode(file.read_bytes(), type=Throughput)
        except (FileNotFoundError, msgspec.MsgspecError):
            found = None
        if found is not None and found.device == os.stat(store.root).st_dev:
            return found
    store.check_room(_ROOM, 16)
    with store.stage() as folder:
        measured = measure(folder)
        aside = folder / "result"
        aside.write_bytes(msgspec.json.encode(measured))
        aside.rename(file)
    return measured


def measure(folder: Path) -> Throughput:
    """Writes to files in `folder`, which are gone when this returns."""
    return Throughput(peak=_write(folder, _STREAMS), measured=time.time(), device=os.stat(folder).st_dev)


def _write(folder: Path, streams: int) -> float:
    """Bytes a second of so many writers at once."""
    written = [0] * streams
    end = time.perf_counter() + _SECONDS
    start = time.perf_counter()

    def write(index: int) -> None:
        piece = os.urandom(_PIECE)
        with tempfile.TemporaryFile(dir=folder) as file:
            while time.perf_counter() < end and written[index] < _MOST // streams:
                file.write(piece)
                file.flush()
                os.fdatasync(file.fileno())
                written[index] += len(piece)

    writers = [threading.Thread(target=write, args=(index,)) for index in range(streams)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    return sum(written) / (time.perf_counter() - start)
