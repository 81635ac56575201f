"""A run: every row's worker started, its operations taken in turns, the samples made into a report."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

from msgspec import Struct, field

from shoal.bench import marks
from shoal.bench.figures import Figures, Sample, summarise
from shoal.bench.process import RowProcess
from shoal.bench.rows import Row, interleave
from shoal.config import data_dir
from shoal.errors import PlatformError
from shoal.node import facts

_WHOLE, _QUICK = (500, 1000), (50, 50)
"""Sandboxes alive at once, and cycles."""


class Report(Struct, frozen=True):
    """What a run found."""

    machine: dict[str, facts.Fact]
    rows: dict[str, Figures]
    ratios: dict[str, float]
    absent: dict[str, str] = field(default_factory=dict)
    """Rows that could not be measured here, and why."""
    quick: bool = False
    """A run with a few samples only: no figures to quote."""


class Progress(Struct, frozen=True):
    """Told before each step."""

    row: str
    doing: str
    done: int
    total: int


class _Run:
    """Samples as they come in."""

    def __init__(self, rows: Sequence[Row], *, quick: bool, folder: Path, tell: Callable[[Progress], None]) -> None:
        self.samples: dict[str, list[Sample]] = {row.name: [] for row in rows}
        self.commands: dict[str, str] = {}
        self.absent: dict[str, str] = {}
        self._quick = quick
        self._folder = folder
        self._tell = tell
        self._done = 0
        self._total = sum(self.count(row) for row in rows)

    def count(self, row: Row) -> int:
        return row.quick if self._quick else row.count

    def measure_group(self, rows: Sequence[Row]) -> None:
        """One after the other where each sample wants a fresh process, all in turns else."""
        for row in rows:
            for _ in range(self.count(row) if row.fresh else 0):
                self._take_turns([row], 1)
        if shared := [row for row in rows if not row.fresh]:
            self._take_turns(shared)

    def _take_turns(self, rows: Sequence[Row], count: int | None = None) -> None:
        with ExitStack() as stack:
            ready = {row.name: worker for row in rows if (worker := self._begin(row, stack)) is not None}
            counts = [(row.name, count or self.count(row)) for row in rows if row.name in ready]
            pauses = {row.name: row.pause for row in rows}
            for name in interleave(counts):
                if name not in self.absent:
                    time.sleep(pauses[name])
                    self._measure(name, ready[name])

    def _begin(self, row: Row, stack: ExitStack) -> RowProcess | None:
        """Workers are set up one by one, so that none is timed while another still prepares."""
        if row.name in self.absent:
            return None
        self._progress(row.name, "setting up")
        many, cycles = _QUICK if self._quick else _WHOLE
        worker = stack.enter_context(RowProcess(row.name, self._folder / row.name, many=many, cycles=cycles))
        try:
            worker.wait_ready()
        except PlatformError as error:
            self.absent[row.name] = str(error)
            return None
        self.commands[row.name] = worker.command
        return worker

    def _measure(self, name: str, worker: RowProcess) -> None:
        self._progress(name, "measuring")
        try:
            self.samples[name].append(worker.measure())
        except PlatformError as error:
            self.absent[name] = str(error)
        self._done += 1

    def _progress(self, row: str, doing: str) -> None:
        self._tell(Progress(row, doing, self._done, self._total))

    def figures(self, rows: Iterable[Row]) -> dict[str, Figures]:
        return {
            row.name: summarise(self.samples[row.name], row.unit, self.commands[row.name])
            for row in rows
            if self.samples[row.name] and row.name not in self.absent
        }


def measure(rows: Sequence[Row], *, quick: bool = False, tell: Callable[[Progress], None] = lambda _: None) -> Report:
    """Measures these rows. A row that fails is absent with its reason; the others go on."""
    data_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=data_dir(), ignore_cleanup_errors=True) as folder:
        # Containers of others reach their root through it, with ids of their own.
        Path(folder).chmod(0o755)
        run = _Run(rows, quick=quick, folder=Path(folder), tell=tell)
        for _, members in groupby(rows, lambda row: row.group):
            run.measure_group(list(members))
    found = run.figures(rows)
    return Report(facts.machine(), found, marks.ratios(found), run.absent, quick)
