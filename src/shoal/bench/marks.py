"""What the figures have to reach, in one table, and whether they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct

from shoal.bench.figures import Figures, rounded

Outcome = Literal["aim", "met", "missed", "not measured"]


class Mark(Struct, frozen=True):
    """A promise about one figure of one row."""

    row: str
    figure: Literal["p50", "p99"]
    least: float
    aim: float
    relative_to: str | None = None
    """The row of the same run that both are shares of; None: they stand for themselves, in the row's unit."""
    higher: bool = False
    """More is better."""


MARKS: Final = (
    Mark("oneshot", "p50", 1.0, 0.5, relative_to="bwrap_oneshot"),
    Mark("oneshot_16", "p50", 400, 700, higher=True),
    Mark("exec", "p50", 1.7, 1.2, relative_to="python_floor"),
    Mark("exec", "p50", 1.2, 0.8),
    Mark("exec", "p99", 5.0, 2.0),
    Mark("idle", "p50", 0.6, 0.45),
    Mark("env_attach", "p50", 5.0, 1.0),
    Mark("output_200m", "p50", 0.6, 0.8, relative_to="socket_copy", higher=True),
    Mark("upload_64m", "p50", 0.6, 0.8, relative_to="socket_copy", higher=True),
    Mark("download_64m", "p50", 0.6, 0.8, relative_to="socket_copy", higher=True),
    Mark("bulk_memory", "p99", 64, 16),
    Mark("neighbour", "p99", 1000, 100),
    Mark("reap", "p99", 0, 0),
    Mark("leftovers", "p99", 0, 0),
)

RATIOS: Final = (
    ("oneshot", "bwrap_oneshot"),
    ("oneshot", "crun_oneshot"),
    ("oneshot", "runc_oneshot"),
    ("oneshot", "python_floor"),
    ("exec", "python_floor"),
    ("output_200m", "socket_copy"),
    ("upload_64m", "socket_copy"),
    ("download_64m", "socket_copy"),
    ("neighbour", "exec"),
    ("env_attach", "uv_hardlink"),
    ("env_attach", "tar_unpack"),
)
"""Times of one run that mean something only beside each other."""


class Judgement(Struct, frozen=True):
    """A mark and where the run ended."""

    mark: Mark
    value: float | None
    """In the mark's own terms: a share if it is relative. None where a row is missing."""
    outcome: Outcome


def judge(rows: Mapping[str, Figures]) -> list[Judgement]:
    """Every mark against the rows that there are."""
    return [_judge(mark, rows) for mark in MARKS]


def _judge(mark: Mark, rows: Mapping[str, Figures]) -> Judgement:
    value = _value(mark, rows)
    if value is None:
        return Judgement(mark, None, "not measured")
    if _reaches(mark, value, mark.aim):
        return Judgement(mark, value, "aim")
    return Judgement(mark, value, "met" if _reaches(mark, value, mark.least) else "missed")


def _value(mark: Mark, rows: Mapping[str, Figures]) -> float | None:
    if mark.row not in rows or (mark.relative_to is not None and mark.relative_to not in rows):
        return None
    value: float = getattr(rows[mark.row], mark.figure)
    return value if mark.relative_to is None else rounded(value / getattr(rows[mark.relative_to], mark.figure))


def _reaches(mark: Mark, value: float, bound: float) -> bool:
    return value >= bound if mark.higher else value <= bound


def ratios(rows: Mapping[str, Figures]) -> dict[str, float]:
    """Medians over each other, by "this/that"."""
    return {f"{a}/{b}": rounded(rows[a].p50 / rows[b].p50) for a, b in RATIOS if a in rows and b in rows}
