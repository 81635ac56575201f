"""From the outcomes of tests to a reward."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from shoal.rollouts.tasks import Task


class Count(Struct, frozen=True):
    """How many of a set of tests passed."""

    passed: int = 0
    total: int = 0


class Score(Struct, frozen=True):
    """What a graded tree earned."""

    fail_to_pass: Count
    pass_to_pass: Count
    reward: float
    """1 if every test that must pass did, else 0."""
    missed: tuple[str, ...] = ()
    """Those that must pass and did not, in the manifest's order."""


def score(task: Task, outcomes: Mapping[str, str], in_time: bool = True) -> Score:
    """The reward for these outcomes by node id. Tests cut short earn nothing, whatever had passed by then."""
    required = task.must_start_passing + task.pass_to_pass
    missed = tuple(test for test in required if outcomes.get(test) != "passed")
    reward = 1.0 if in_time and not missed else 0.0
    return Score(count(task.must_start_passing, outcomes), count(task.pass_to_pass, outcomes), reward, missed)


def count(tests: tuple[str, ...], outcomes: Mapping[str, str]) -> Count:
    """How many of these tests passed."""
    return Count(sum(outcomes.get(test) == "passed" for test in tests), len(tests))
