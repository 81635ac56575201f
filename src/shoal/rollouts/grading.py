"""The tests of the fix, run on what an agent left, in a sandbox that the agent has never been in.

Code under test shares a process with the reporting plugin, so an agent that means to can forge a report. What
it can't do is change the tests, their settings, the interpreter or the plugin beforehand.
"""

from __future__ import annotations

from importlib import resources
from typing import Literal

import msgspec
from msgspec import Struct

from shoal.errors import InvalidRequest, LimitExceeded, NotFound
from shoal.rollouts.box import Box
from shoal.rollouts.changes import apply_patch, read_bounded
from shoal.rollouts.preparation import WORKSPACE
from shoal.rollouts.tasks import Task
from shoal.rollouts.trees import Patch
from shoal.types import MiB, Result, Verdict

DESK = "/tmp/shoal-grading"
REPORT = f"{DESK}/report/outcomes.jsonl"
LONGEST_REPORT = 32 * MiB
PYTEST = ("python", "-m", "pytest", "-q", "--tb=short", "-p", "shoal_report", "-p", "no:cacheprovider",
          "--continue-on-collection-errors", "-o", "addopts=", "-o", "filterwarnings=default")  # fmt: skip
TAIL = 2000

Outcome = Literal["passed", "failed", "error", "skipped", "xfailed"]
RANKS: tuple[Outcome, ...] = ("passed", "skipped", "xfailed", "failed", "error")


class Grade(Struct, frozen=True):
    """What the tests said."""

    verdict: Verdict
    outcomes: dict[str, Outcome]
    """By node id."""
    note: str = ""
    """Where there is no report: what pytest said last."""


class _Line(Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    outcome: Outcome


async def grade(box: Box, task: Task, changes: Patch, exam: Patch) -> Grade:
    """Grades `changes` in a fresh sandbox that has the task's environment and workspace."""
    await apply_patch(box, changes)
    await apply_patch(box, exam)
    result = await run_tests(box, task)
    try:
        return Grade(result.verdict, parse_report(await _read_report(box)))
    except (InvalidRequest, LimitExceeded, NotFound) as error:
        return Grade(result.verdict, {}, f"{error}\n{_tail(result)}".strip())


async def run_tests(box: Box, task: Task) -> Result:
    """Runs pytest over the task's test files, for as long as the task gives it."""
    await _lay_desk(box)
    command = [*PYTEST, *task.test_files]
    return await box.commands.run(command, env=test_environment(task), cwd=WORKSPACE, timeout=task.test_limit)


def test_environment(task: Task) -> dict[str, str]:
    """Variables for the tests. PATH is the sandbox's own, the environment's folder first."""
    roots = [WORKSPACE if root == "." else f"{WORKSPACE}/{root}" for root in task.import_roots]
    return {
        "PYTHONHASHSEED": "0",
        "TZ": "UTC",
        "LC_ALL": "C.UTF-8",
        "HOME": f"{DESK}/home",
        "TMPDIR": f"{DESK}/tmp",
        "PYTHONPATH": ":".join([*roots, f"{DESK}/plugin"]),
        "SHOAL_REPORT": REPORT,
    }


async def _lay_desk(box: Box) -> None:
    plugin = resources.files("shoal.rollouts").joinpath("data", "shoal_report.py").read_bytes()
    for folder in ("home", "tmp", "report"):
        await box.files.make_dir(f"{DESK}/{folder}")
    await box.files.write(f"{DESK}/plugin/shoal_report.py", plugin)


async def _read_report(box: Box) -> bytes:
    info = await box.files.stat(REPORT)
    return await read_bounded(box, REPORT, info.size, LONGEST_REPORT, LONGEST_REPORT)


def parse_report(report: bytes) -> dict[str, Outcome]:
    """Outcomes by node id, the worst of several. Raises InvalidRequest if any line is not the plugin's."""
    outcomes: dict[str, Outcome] = {}
    try:
        for line in msgspec.json.Decoder(_Line).decode_lines(report):
            known = outcomes.get(line.id, line.outcome)
            outcomes[line.id] = max(known, line.outcome, key=RANKS.index)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest("report", f"not what the reporting plugin writes: {error}") from None
    return outcomes


def _tail(result: Result) -> str:
    return f"{result.stdout}\n{result.stderr}"[-TAIL:]
