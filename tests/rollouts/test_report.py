"""The sums of a batch."""

from __future__ import annotations

import statistics

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shoal.rollouts.batch import encode_report
from shoal.rollouts.report import percentile, spread, summarize, summary
from shoal.rollouts.results import Rollout

numbers = st.lists(st.floats(0, 1e6), min_size=1, max_size=40)


@given(numbers, st.floats(0, 1))
def test_a_percentile_lies_between_its_neighbours(values: list[float], share: float) -> None:
    found = percentile(values, share)
    slack = 1e-9 * max(values)
    assert sum(value <= found + slack for value in values) >= share * (len(values) - 1)
    assert sum(value >= found - slack for value in values) >= (1 - share) * (len(values) - 1)


@given(numbers)
def test_the_median_is_the_usual_one(values: list[float]) -> None:
    assert percentile(values, 0.5) == pytest.approx(statistics.median(values))
    assert (percentile(values, 0), percentile(values, 1)) == (min(values), max(values))


def test_a_spread_by_hand() -> None:
    found = spread([float(number) for number in range(101)])
    assert (found.mean, found.p50, found.p95, found.max) == (50, 50, 95, 100)


def rollout(number: int, reward: float | None, verdict: str = "ok", **seconds: float) -> Rollout:
    facts = {
        "task": "t",
        "agent": "a",
        "group": number,
        "reward": reward,
        "verdict": verdict,
        "seconds": seconds,
    }
    return msgspec.convert(facts, Rollout)


def test_failures_of_the_platform_are_no_part_of_the_mean() -> None:
    results = [
        rollout(0, 1.0, prepare=9.0, agent=1.0, grade=2.0),
        rollout(1, 0.0, "policy_timeout", prepare=9.0, agent=3.0),
        rollout(2, None, "platform_error", prepare=9.0),
    ]
    report = summarize("a", results, tasks=1, planned=4, elapsed=5.0)
    assert (report.reward, report.rollouts, report.planned) == (0.5, 3, 4)
    assert report.verdicts == {"ok": 1, "platform_error": 1, "policy_timeout": 1}
    assert report.seconds["agent"].mean == 2
    assert report.seconds["total"].max == 3
    assert [each.group for each in report.failures] == [2]
    decoded = msgspec.json.decode(encode_report(report))
    assert decoded["reward"] == 0.5
    assert decoded["seconds"]["agent"] == {"mean": 2.0, "p50": 2.0, "p95": 2.9, "max": 3.0}
    assert decoded["results"] == []


def test_the_summary_has_the_mean_and_every_phase() -> None:
    results = [rollout(0, 1.0, agent=0.5, grade=0.25)]
    console = Console(width=100)
    with console.capture() as capture:
        console.print(summary(summarize("oracle", results, tasks=1, planned=1, elapsed=5.0)))
    text = capture.get()
    assert "oracle: mean reward 1.000 over 1 rollouts of 1 tasks" in text
    assert "0.500" in text
    assert "grade" in text


def test_nothing_graded_has_no_mean() -> None:
    report = summarize("a", [], tasks=0, planned=0, elapsed=0.0)
    assert report.reward is None
    assert report.seconds == {}
    summary(report)
