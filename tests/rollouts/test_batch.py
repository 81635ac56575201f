"""Whole batches on a platform in memory: rewards, failures, resuming, stopping."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import (
    BuildFailed,
    CapacityError,
    CommandFailed,
    InvalidRequest,
    NotFound,
    SandboxGone,
    SetupFailed,
)
from shoal.rollouts.batch import Progress, run, run_async
from shoal.rollouts.report import Report
from shoal.rollouts.results import Rollout
from shoal.rollouts.sharing import Once
from shoal.rollouts.tasks import Task
from shoal.rollouts.trees import Entry, Tree
from shoal.types import Result

from .stand_in import BASE, FIX, Box, Memory, make_task


def go(tasks: list[Task], agent: Any, platform: Memory | None = None, **options: Any) -> Report:
    platform = platform or Memory()
    report = asyncio.run(run_async(tasks, agent, platform=platform, **options))
    assert not any(box.alive for box in platform.boxes)
    return report


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("noop", 0.0), ("cmd: true", 0.0)])
def test_oracle_earns_everything_and_noop_nothing(shelf: Path, tmp_path: Path, agent: str, reward: float) -> None:
    report = go([make_task(shelf)], agent, out=tmp_path / "out")
    assert (report.reward, report.verdicts) == (reward, {"ok": 1})
    [line] = lines(tmp_path / "out")
    assert line["fail_to_pass"] == {"passed": int(reward), "total": 1}
    assert line["pass_to_pass"] == {"passed": 1, "total": 1}
    assert line["seconds"].keys() == {"prepare", "acquire", "init", "agent", "grade", "release"}
    assert (line["task"], line["agent"], line["group"], line["reward"]) == (
        "thing__1.0__1.1",
        agent,
        0,
        reward,
    )
    assert (line["verdict"], line["sandbox"], line["session"]) == ("ok", "box-0", None)
    assert json.loads((tmp_path / "out/report.json").read_text())["reward"] == reward


def test_nothing_of_the_fix_is_in_the_agents_box(shelf: Path) -> None:
    seen: list[Box] = []

    async def look(task: Task, box: Any) -> None:
        seen.append(box)
        assert box.workspace.keys() - BASE.keys() == {
            "thing-1.0.dist-info/METADATA", "thing-1.0.dist-info/entry_points.txt",
        }  # fmt: skip
        assert "the answer is right" in await box.files.read("/tmp/shoal-task.md")

    platform = Memory()
    go([make_task(shelf)], look, platform)
    assert platform.boxes[0] is seen[0]
    assert len(platform.boxes) == 2


def test_the_agents_box_is_dead_before_its_changes_are_graded(shelf: Path) -> None:
    class Watching(Memory):
        async def sandbox(self, layers: Any, life: float) -> Box:
            assert not any(box.alive for box in self.boxes)
            return await super().sandbox(layers, life)

    assert go([make_task(shelf)], "oracle", Watching()).reward == 1


def test_forged_tests_earn_nothing(shelf: Path) -> None:
    async def forge(task: Task, box: Any) -> None:
        await box.files.write("/workspace/tests/test_thing.py", "# mine")
        await box.files.write("/workspace/pytest.ini", "[pytest]")
        await box.files.write("/workspace/conftest.py", "# mine")

    def check(tree: Tree) -> dict[str, str]:
        assert "pytest.ini" not in tree
        assert "conftest.py" not in tree
        assert tree["tests/test_thing.py"] == FIX["tests/test_thing.py"]
        return {}

    assert go([make_task(shelf)], forge, Memory(check)).verdicts == {"ok": 1}


def test_a_group_shares_its_preparation_and_no_more_than_parallel_run_at_once(shelf: Path, tmp_path: Path) -> None:
    tasks = [make_task(shelf, f"t{number}") for number in range(4)]
    platform = Memory()
    seen: list[Progress] = []

    async def dawdle(task: Task, box: Any) -> None:
        await asyncio.sleep(0.01)

    report = go(tasks, dawdle, platform, group=3, parallel=2, on_progress=seen.append, out=tmp_path)
    assert (report.rollouts, report.planned, report.tasks) == (12, 12, 4)
    assert platform.most_at_once == 2
    assert Counter((line["task"], line["group"]) for line in lines(tmp_path)) == Counter(
        (task.id, index) for task in tasks for index in range(3)
    )
    assert [progress.done for progress in seen] == list(range(13))
    assert {progress.total for progress in seen} == {12}


def test_a_task_that_can_not_be_prepared_has_no_reward_and_the_others_go_on(shelf: Path, tmp_path: Path) -> None:
    platform = Memory()
    platform.failing = {"bad": BuildFailed("no such wheel", "log"), "odd": RuntimeError("what?")}
    report = go([make_task(shelf, name) for name in ("bad", "odd", "good")], "oracle", platform, group=2, out=tmp_path)
    assert (report.reward, report.verdicts) == (1.0, {"ok": 2, "platform_error": 4})
    errors = {line["task"]: line["error"] for line in lines(tmp_path) if line["reward"] is None}
    assert errors == {
        "bad": {"code": "build_failed", "message": "no such wheel"},
        "odd": {"code": "RuntimeError", "message": "what?"},
    }


def test_an_archive_with_another_digest_is_a_platform_error_that_names_it(shelf: Path) -> None:
    task = make_task(shelf)
    (shelf / task.fix_sdist.file).write_bytes(b"x" * task.fix_sdist.bytes)
    [failure] = go([task], "noop").failures
    assert failure.error is not None
    assert failure.error.code == "digest_mismatch"
    assert task.fix_sdist.file in failure.error.message


@pytest.mark.parametrize(
    ("error", "verdict", "reward"),
    [
        (SetupFailed("mount", 12), "platform_error", None),
        (CapacityError("full", 1), "platform_error", None),
        (SandboxGone("x", "lost"), "platform_lost", None),
        (SandboxGone("x", "init_died"), "policy_limit", 0.0),
        (TimeoutError("the model's own"), "platform_error", None),
        (NotFound("/workspace/\udcff"), "platform_error", None),
        (CommandFailed(Result(exit_code=1)), "ok", 0.0),
    ],
)
def test_whose_fault_an_error_is(
    shelf: Path, tmp_path: Path, error: Exception, verdict: str, reward: float | None
) -> None:
    async def fail(task: Task, box: Any) -> None:
        raise error

    [rollout] = go([make_task(shelf)], fail, out=tmp_path / "out").results
    assert (rollout.verdict, rollout.reward) == (verdict, reward)
    assert [line["verdict"] for line in lines(tmp_path / "out")] == [verdict]


def test_an_agent_that_leaves_too_much_has_only_itself_to_blame(shelf: Path) -> None:
    async def hoard(task: Task, box: Any) -> None:
        box.now["/workspace/core"] = Entry(data=bytes(65 << 20))

    [rollout] = go([make_task(shelf)], hoard).results
    assert (rollout.verdict, rollout.reward) == ("policy_limit", 0.0)


def test_an_agent_out_of_time_earns_nothing(shelf: Path) -> None:
    async def dawdle(task: Task, box: Any) -> None:
        await asyncio.sleep(60)

    platform = Memory()
    [rollout] = go([make_task(shelf)], dawdle, platform, agent_limit=1).results
    assert (rollout.verdict, rollout.reward) == ("policy_timeout", 0.0)
    assert len(platform.boxes) == 1


@pytest.mark.parametrize(
    ("result", "reward"),
    [
        (Result(signal=9, limit="timeout", verdict="policy_timeout"), 0.0),
        (Result(signal=9, verdict="policy_oom"), 0.0),
        (Result(verdict="platform_lost"), None),
    ],
)
def test_tests_that_a_limit_ends_earn_nothing_and_those_the_platform_ends_say_nothing(
    shelf: Path, result: Result, reward: float | None
) -> None:
    [rollout] = go([make_task(shelf)], "oracle", Memory(result=result)).results
    assert (rollout.verdict, rollout.reward) == (result.verdict, reward)


def test_resume_does_what_is_missing_and_what_the_platform_failed_at(shelf: Path, tmp_path: Path) -> None:
    tasks = [make_task(shelf, name) for name in ("a", "b")]
    platform = Memory()
    platform.failing = {"b": BuildFailed("not today", "")}
    assert go(tasks, "oracle", platform, out=tmp_path).verdicts == {"ok": 1, "platform_error": 1}
    again = Memory()
    seen: list[Progress] = []
    report = go(tasks, "oracle", again, out=tmp_path, resume=True, group=2, on_progress=seen.append)
    assert (report.reward, report.verdicts, report.planned) == (1.0, {"ok": 4}, 4)
    assert seen[0].total == 3
    assert list(again.trees) == ["a", "b"]
    third = Memory()
    assert go(tasks, "oracle", third, out=tmp_path, resume=True, group=2).rollouts == 4
    assert third.boxes == []
    assert go(tasks, "noop", Memory(), out=tmp_path, resume=True).reward == 0.0


def test_cancelling_kills_the_boxes_and_keeps_what_is_done(shelf: Path, tmp_path: Path) -> None:
    async def act(task: Task, box: Any) -> None:
        if task.id != "quick":
            await asyncio.sleep(60)

    platform = Memory()

    async def interrupted() -> None:
        tasks = [make_task(shelf, name) for name in ("quick", "slow", "slower")]
        done = asyncio.Event()

        def watch(progress: Progress) -> None:
            if progress.done:
                done.set()

        batch = asyncio.create_task(run_async(tasks, act, platform=platform, out=tmp_path, on_progress=watch))
        await done.wait()
        await asyncio.sleep(0.05)
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch

    asyncio.run(interrupted())
    assert not any(box.alive for box in platform.boxes)
    assert [line["task"] for line in lines(tmp_path)] == ["quick"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["rollouts"], report["planned"]) == (1, 3)


def test_what_goes_wrong_outside_a_rollout_is_raised_as_itself(shelf: Path) -> None:
    def fail(progress: Progress) -> None:
        if progress.done:
            raise KeyError("progress")

    with pytest.raises(KeyError, match="progress"):
        go([make_task(shelf, f"t{number}") for number in range(3)], "noop", on_progress=fail)


@pytest.mark.parametrize(
    ("options", "field"),
    [({"group": 0}, "group"), ({"parallel": 0}, "parallel"), ({"agent_limit": 0}, "agent_limit")],
)
def test_bad_numbers_are_named(shelf: Path, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        go([make_task(shelf)], "noop", **options)
    assert caught.value.field == field


def test_bad_tasks_and_agents_are_refused_before_anything_runs(shelf: Path) -> None:
    with pytest.raises(InvalidRequest, match="agent"):
        run([make_task(shelf)], "nobody")
    with pytest.raises(InvalidRequest, match="tasks"):
        run("nowhere.jsonl", "noop")
    with pytest.raises(InvalidRequest, match="same id"):
        go([make_task(shelf), make_task(shelf)], "noop")


def test_one_computation_serves_all_that_ask_and_survives_any_of_them() -> None:
    async def ask() -> None:
        made: list[str] = []

        async def make() -> str:
            made.append("once")
            await asyncio.sleep(0.02)
            return "value"

        once: Once[str, str] = Once()
        askers = [asyncio.create_task(once.get("key", make)) for _ in range(3)]
        await asyncio.sleep(0)
        askers[0].cancel()
        assert await asyncio.gather(*askers[1:]) == ["value", "value"]
        assert made == ["once"]
        endless = asyncio.create_task(once.get("other", lambda: asyncio.sleep(60, "never")))
        await asyncio.sleep(0)
        await once.close()
        with pytest.raises(asyncio.CancelledError):
            await endless

    asyncio.run(ask())


def test_a_rollout_is_what_a_line_holds() -> None:
    assert {"task", "agent", "group", "reward", "verdict", "fail_to_pass", "pass_to_pass", "seconds"} < set(
        Rollout.__struct_fields__
    )


INTERRUPTED = """
import asyncio, sys
from pathlib import Path
from rollouts.stand_in import Memory, make_task
from shoal.rollouts import batch
platform = Memory()
batch.Machine = lambda scratch: platform
async def act(task, box):
    if task.id != "quick":
        print("ready", flush=True)
        await asyncio.sleep(60)
tasks = [make_task(Path(sys.argv[1]), name) for name in ("quick", "slow")]
try:
    batch.run(tasks, act, out=sys.argv[2], parallel=1)
except KeyboardInterrupt:
    print("interrupted", any(box.alive for box in platform.boxes))
"""


def test_an_interrupt_ends_a_run_in_order(shelf: Path, tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[1])
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])}
    command = [sys.executable, "-c", INTERRUPTED, str(shelf), str(tmp_path)]
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "interrupted False\n"
    assert [line["task"] for line in lines(tmp_path)] == ["quick"]
    assert json.loads((tmp_path / "report.json").read_text())["planned"] == 2
