"""What a worker does for its row, again and again."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from msgspec import Struct

from shoal.bench.figures import Sample


class Job(Struct, frozen=True):
    """A job that has been set up."""

    command: str
    """For the table: what `once` times."""
    once: Callable[[], Sample]


class Place(Struct, frozen=True):
    """Where and how large."""

    folder: Path
    """The job's own, on the disk where layers are kept; removed after it."""
    many: int
    """Sandboxes alive at once where a job is about many."""
    cycles: int


SetUp = Callable[[Place], AbstractContextManager[Job]]


def milliseconds(work: Callable[[], object]) -> Sample:
    """How long it takes."""
    start = time.perf_counter()
    work()
    return Sample((time.perf_counter() - start) * 1e3)
