"""The reporting plugin under real pytest, and reports that a sandbox made up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InvalidRequest
from shoal.rollouts.grading import (
    DESK,
    LONGEST_REPORT,
    PYTEST,
    RANKS,
    REPORT,
    grade,
    parse_report,
    test_environment,
)
from shoal.rollouts.reward import Count, score
from shoal.rollouts.trees import Entry, Patch, exam
from shoal.types import Result

from .stand_in import BASE, FIX, KEPT, RIGHT, Box, honest, make_task

environment_of = test_environment
del test_environment  # pytest would take it for a test

SUITE = """
import unittest, pytest
def test_passed(): pass
def test_failed(): assert 0
def test_skipped(): pytest.skip()
@pytest.mark.xfail
def test_xfailed(): assert 0
@pytest.mark.xfail
def test_xpassed(): pass
@pytest.mark.xfail(strict=True)
def test_xpassed_strict(): pass
@pytest.fixture
def bad_setup(): raise RuntimeError
def test_setup(bad_setup): pass
@pytest.fixture
def bad_teardown():
    yield
    raise RuntimeError
def test_teardown(bad_teardown): pass
def test_both(bad_teardown): assert 0
@pytest.mark.parametrize("x", ["a b", "\\u00e9", "\\ud800"])
def test_names(x): pass
class Sub(unittest.TestCase):
    def test_sub(self):
        for i in range(3):
            with self.subTest(i=i):
                self.assertNotEqual(i, 1)
    def test_sub_skip(self):
        with self.subTest():
            self.skipTest("no")
"""


def run_suite(folder: Path, **files: str) -> dict[str, str]:
    """The outcomes of these test modules, reported by the plugin."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    plugin = str(resources.files("shoal.rollouts").joinpath("data"))
    variables = {**os.environ, "PYTHONPATH": plugin, "SHOAL_REPORT": str(folder / "report")}
    command = [sys.executable, *PYTEST[1:], *(f"{name}.py" for name in files)]
    subprocess.run(command, cwd=folder, env=variables, capture_output=True, check=False)
    return dict(parse_report((folder / "report").read_bytes()))


def test_the_plugin_says_how_each_test_ended(tmp_path: Path) -> None:
    said = run_suite(tmp_path, test_a=SUITE, test_b="raise RuntimeError")
    assert {test.removeprefix("test_a.py::"): outcome for test, outcome in said.items()} == {
        "test_b.py": "error", "test_passed": "passed", "test_failed": "failed", "test_skipped": "skipped",
        "test_xfailed": "xfailed", "test_xpassed": "passed", "test_xpassed_strict": "failed",
        "test_setup": "error", "test_teardown": "error", "test_both": "error", "test_names[a b]": "passed",
        "test_names[\\xe9]": "passed", "test_names[\\ud800]": "passed", "Sub::test_sub": "failed",
        "Sub::test_sub_skip": "passed",
    }  # fmt: skip


def test_what_was_reported_before_a_crash_stays(tmp_path: Path) -> None:
    suite = "import os\ndef test_1(): pass\ndef test_2(): os._exit(0)\ndef test_3(): pass\n"
    assert run_suite(tmp_path, test_a=suite) == {"test_a.py::test_1": "passed"}


@pytest.mark.parametrize(
    "report",
    [
        b"nonsense\n",
        b"[]\n",
        b'{"id": "a"}\n',
        b'{"id": "a", "outcome": "great"}\n',
        b'{"id": "a", "outcome": "passed", "more": 1}\n',
        b'{"id": "a", "outcome": "passed"}\n{"id": "b", "outc',
        b'{"id": "\xff", "outcome": "passed"}\n',
        b'{"id": 1, "outcome": "passed"}\n',
        b"[" * 100_000,
    ],
)
def test_a_report_that_the_plugin_did_not_write_counts_for_nothing(report: bytes) -> None:
    with pytest.raises(InvalidRequest, match="report"):
        parse_report(report)


@given(st.binary(max_size=200))
def test_no_report_breaks_the_parser(report: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        assert set(parse_report(report).values()) <= set(RANKS)


def test_a_pass_never_makes_up_for_a_failure() -> None:
    lines = [b'{"id": "a", "outcome": "%s"}' % said for said in (b"passed", b"failed", b"passed", b"skipped")]
    assert parse_report(b"\n".join(lines)) == {"a": "failed"}
    assert parse_report(b"") == {}


def test_the_reward_is_all_or_nothing(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    assert score(task, {RIGHT: "passed", KEPT: "passed"}).reward == 1
    assert score(task, {RIGHT: "passed", KEPT: "passed"}, in_time=False).reward == 0
    for kept in ("failed", "error", "skipped", "xfailed"):
        earned = score(task, {RIGHT: "passed", KEPT: kept})
        assert (earned.reward, earned.missed) == (0, (KEPT,))
        assert (earned.fail_to_pass, earned.pass_to_pass) == (Count(1, 1), Count(0, 1))
    assert score(task, {}).missed == (RIGHT, KEPT)


def test_tests_that_never_ended_before_the_fix_count_as_failing_before(tmp_path: Path) -> None:
    task = make_task(tmp_path, fail_to_pass=[], pass_to_pass=[], must_pass=[RIGHT, KEPT], base_limit_s=40)
    assert score(task, {RIGHT: "passed"}).fail_to_pass == Count(1, 2)


def test_the_tests_environment_has_nothing_of_the_host(tmp_path: Path) -> None:
    variables = environment_of(make_task(tmp_path, import_root={"base": ".", "fix": "src"}))
    assert variables == {
        "PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C.UTF-8", "HOME": f"{DESK}/home",
        "TMPDIR": f"{DESK}/tmp", "PYTHONPATH": f"/workspace/src:/workspace:{DESK}/plugin",
        "SHOAL_REPORT": REPORT,
    }  # fmt: skip


def graded(tmp_path: Path, box: Box, changes: Patch = Patch()) -> tuple[str, dict[str, str], str]:  # noqa: B008
    said = asyncio.run(grade(box, make_task(tmp_path), changes, exam(BASE, FIX)))
    return said.verdict, dict(said.outcomes), said.note


def test_tests_are_laid_in_over_the_agents_changes(tmp_path: Path) -> None:
    box = Box(0, BASE, honest, Result(exit_code=0))
    changes = Patch({"thing.py": FIX["thing.py"]}, ("old.py",))
    assert graded(tmp_path, box, changes) == ("ok", {RIGHT: "passed", KEPT: "passed"}, "")
    assert box.workspace.keys() == {
        "PKG-INFO",
        "CHANGES.rst",
        "pyproject.toml",
        "thing.py",
        "tests/test_thing.py",
    }
    command, options = box.ran[-1]
    assert command[-1] == "tests/test_thing.py"
    assert (options["cwd"], options["timeout"]) == ("/workspace", 60)


def test_no_report_a_forged_one_and_one_without_end_give_no_outcomes(tmp_path: Path) -> None:
    class Odd(Box):
        report: bytes | None = None

        async def run(self, cmd: object, **options: object) -> Result:
            if self.report is not None:
                self.now[REPORT] = Entry(data=self.report)
            return Result(exit_code=4, stdout_bytes=b"no tests ran")

    for report in (None, b"passed!\n", bytes(LONGEST_REPORT + 1)):
        box = Odd(0, BASE, honest, Result())
        box.report = report
        verdict, outcomes, note = graded(tmp_path, box)
        assert (verdict, outcomes) == ("ok", {})
        assert "no tests ran" in note
