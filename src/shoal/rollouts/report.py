"""What a batch of rollouts comes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct
from rich.console import Group
from rich.table import Table
from rich.text import Text

from shoal.rollouts.results import Rollout
from shoal.types import Verdict

PHASES = ("prepare", "acquire", "init", "agent", "grade", "release")


class Spread(Struct, frozen=True):
    """How a number is distributed."""

    mean: float
    p50: float
    p95: float
    max: float


class Report(Struct, frozen=True, kw_only=True):
    """A whole batch. `reward` is the mean over what was graded: the platform's failures are left out."""

    agent: str
    tasks: int
    rollouts: int
    """Finished, with those of an earlier run that was resumed."""
    planned: int
    reward: float | None
    """None if nothing was graded."""
    verdicts: dict[Verdict, int]
    seconds: dict[str, Spread]
    """By phase, and `total` for a whole rollout without waiting for shared preparation."""
    elapsed: float
    """Seconds this run took."""
    results: tuple[Rollout, ...] = ()
    """Left out of report.json, for they are in results.jsonl."""

    @property
    def failures(self) -> list[Rollout]:
        """Where the platform failed."""
        return [rollout for rollout in self.results if rollout.reward is None]


def summarize(agent: str, results: Sequence[Rollout], *, tasks: int, planned: int, elapsed: float) -> Report:
    """The report over these rollouts."""
    rewards = [rollout.reward for rollout in results if rollout.reward is not None]
    return Report(
        agent=agent,
        tasks=tasks,
        rollouts=len(results),
        planned=planned,
        reward=sum(rewards) / len(rewards) if rewards else None,
        verdicts=dict(sorted(Counter(rollout.verdict for rollout in results).items())),
        seconds=_seconds(results),
        elapsed=elapsed,
        results=tuple(results),
    )


def _seconds(results: Iterable[Rollout]) -> dict[str, Spread]:
    columns: dict[str, list[float]] = {phase: [] for phase in (*PHASES, "total")}
    for rollout in results:
        for phase, seconds in rollout.seconds.items():
            columns.setdefault(phase, []).append(seconds)
        columns["total"].append(sum(rollout.seconds.values()) - rollout.seconds.get("prepare", 0.0))
    return {phase: spread(column) for phase, column in columns.items() if column}


def spread(values: Sequence[float]) -> Spread:
    """Mean and percentiles of at least one value."""
    return Spread(
        mean=sum(values) / len(values),
        p50=percentile(values, 0.5),
        p95=percentile(values, 0.95),
        max=max(values),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie, interpolated between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(report: Report) -> Group:
    """What a terminal shows: the mean reward, the seconds, the verdicts."""
    reward = "none" if report.reward is None else f"{report.reward:.3f}"
    head = f"{report.agent}: mean reward {reward} over {report.rollouts} rollouts of {report.tasks} tasks"
    verdicts = ", ".join(f"{verdict} {count}" for verdict, count in report.verdicts.items())
    table = Table()
    table.add_column("seconds")
    for column in ("median", "P95", "mean", "max"):
        table.add_column(column, justify="right")
    for phase, seconds in report.seconds.items():
        table.add_row(phase, *(f"{each:.3f}" for each in (seconds.p50, seconds.p95, seconds.mean, seconds.max)))
    return Group(Text(head, style="bold"), table, Text(f"{verdicts or 'nothing done'}; {report.elapsed:.1f} s in all"))
