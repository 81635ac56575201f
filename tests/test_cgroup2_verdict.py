"""`make test-cgroup2` must not pass when its guest proved nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "scripts" / "cgroup2"))

import verdict

NEEDED = ("tests.test_x.test_v2",)


def report(*cases: str, end: str = "\nexit 0\n") -> str:
    return f'noise\n<?xml version="1.0"?><testsuites><testsuite>{"".join(cases)}</testsuite></testsuites>{end}'


def case(name: str, inside: str = "") -> str:
    return f'<testcase classname="tests.test_x" name="{name}">{inside}</testcase>'


GOOD = report(case("test_v2"), case("test_a"))


def test_all_is_well() -> None:
    found = verdict.judge(GOOD, 2, NEEDED)
    assert found.problems == ()
    assert len(found.passed) == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "before it could say"),
        ("\nexit 0\n", "only 0 tests passed"),
        (GOOD.replace("\nexit 0\n", ""), "before it could say"),
        (GOOD.replace("exit 0", "exit 2"), "status 2"),
        (GOOD[:60], "only 0 tests passed"),
        (report(case("test_a"), case("test_b")), "test_v2 did not pass"),
        (report(case("test_v2", '<skipped message="no v2"/>'), case("test_a"), case("test_b")), "test_v2 did not pass"),
        (report(case("test_v2"), case("test_a", '<failure message="x">y</failure>'), end="\nexit 1\n"), "1 failed"),
        (report(case("test_v2"), case("test_a", '<error message="x">y</error>'), end="\nexit 1\n"), "1 failed"),
    ],
    ids=["nothing", "no tests", "cut off", "status", "torn", "other tests", "skipped", "failed", "error"],
)
def test_what_proves_nothing_fails(text: str, problem: str) -> None:
    assert any(problem in each for each in verdict.judge(text, 2, NEEDED).problems)
