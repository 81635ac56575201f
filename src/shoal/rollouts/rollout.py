"""One rollout: a sandbox, an agent in it, and a grade."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from msgspec import Struct

from shoal.errors import CommandFailed, Interrupted, LimitExceeded, SandboxGone, ShoalError
from shoal.rollouts.agents import NamedAgent
from shoal.rollouts.box import Box
from shoal.rollouts.changes import collect_changes
from shoal.rollouts.downloads import Downloads
from shoal.rollouts.grading import Grade, grade
from shoal.rollouts.preparation import TASK_FILE, Platform
from shoal.rollouts.pypi import base_tree, fetch_releases, with_statement
from shoal.rollouts.results import Failure, Rollout
from shoal.rollouts.reward import score
from shoal.rollouts.tasks import Task
from shoal.rollouts.trees import Patch, exam
from shoal.types import Layer, Verdict

SPARE_LIFE = 900.0
"""Seconds that a sandbox may live beyond the work that is planned for it."""
SHOWN = 10


class Ready(Struct, frozen=True):
    """A task with everything that its rollouts share."""

    task: Task
    layers: tuple[Layer, ...]
    """Environment, then workspace."""
    exam: Patch


async def prepare(task: Task, platform: Platform, downloads: Downloads) -> Ready:
    """Fetches both releases, makes the workspace and the environment. The fix goes into no layer."""
    releases = await fetch_releases(task, downloads)
    workspace = await platform.workspace(task, base_tree(task, releases.base))
    environment = await platform.environment(task)
    told = await asyncio.to_thread(with_statement, task, releases)
    return Ready(told, (environment, workspace), exam(releases.base, releases.fix))


async def roll_out(record: Rollout, ready: Ready, agent: NamedAgent, platform: Platform, agent_limit: float) -> None:
    """Fills in `record`. Raises nothing but cancellation: a failure is one of its verdicts."""
    try:
        changes = await _let_act(record, ready, agent, platform, agent_limit)
        if changes is not None:
            _settle(record, ready.task, await _grade(record, ready, changes, platform))
    except Exception as error:  # the border of a rollout: whatever went wrong, the others go on
        blame(record, error)


async def _let_act(record: Rollout, ready: Ready, agent: NamedAgent, platform: Platform, limit: float) -> Patch | None:
    """What the agent changed; None if its time ran out. Its sandbox and all that ran there is gone then."""
    with phase(record, "acquire"):
        box = await platform.sandbox(ready.layers, limit + SPARE_LIFE)
    record.sandbox = box.id
    try:
        with phase(record, "init"):
            await box.files.write(TASK_FILE, ready.task.statement)
        with phase(record, "agent"):
            in_time = await _act_within(limit, agent, ready.task, box)
        if not in_time:
            record.verdict, record.reward = "policy_timeout", 0.0
            return None
        with phase(record, "grade"):
            return await collect_changes(box, ready.exam)
    finally:
        with phase(record, "release"):
            await box.kill()


async def _act_within(limit: float, agent: NamedAgent, task: Task, box: Box) -> bool:
    """Whether the agent ended before its time did. Its own TimeoutError is not that."""
    try:
        async with asyncio.timeout(limit) as deadline:
            await agent.act(task, box)
    except CommandFailed:
        return True  # it gave up; what stands is graded
    except TimeoutError:
        if not deadline.expired():
            raise
        return False
    return True


async def _grade(record: Rollout, ready: Ready, changes: Patch, platform: Platform) -> Grade:
    with phase(record, "grade"):
        box = await platform.sandbox(ready.layers, ready.task.test_limit + SPARE_LIFE)
    try:
        with phase(record, "grade"):
            return await grade(box, ready.task, changes, ready.exam)
    finally:
        with phase(record, "release"):
            await box.kill()


def _settle(record: Rollout, task: Task, graded: Grade) -> None:
    """The reward for a grade. A command that the platform ended says nothing about the agent."""
    earned = score(task, graded.outcomes, in_time=graded.verdict == "ok")
    record.verdict = graded.verdict
    record.fail_to_pass, record.pass_to_pass = earned.fail_to_pass, earned.pass_to_pass
    record.missed, record.note = earned.missed[:SHOWN], graded.note
    if graded.verdict == "ok" or graded.verdict.startswith("policy_"):
        record.reward = earned.reward


def blame(record: Rollout, error: Exception) -> None:
    """Sets the verdict of a rollout that ended with an error, and a reward if it was the agent's doing."""
    record.verdict = verdict_of(error)
    record.reward = 0.0 if record.verdict.startswith("policy_") else None
    code = error.code if isinstance(error, ShoalError) else type(error).__name__
    # A message may quote a path of a sandbox, which need not be text.
    record.error = Failure(code, (str(error) or repr(error)).encode("utf-8", "backslashreplace").decode())


def verdict_of(error: Exception) -> Verdict:
    """Whose fault it is. An init that died unasked was brought down from inside; nothing else reaches it."""
    if isinstance(error, (Interrupted, LimitExceeded)):
        return "policy_limit"
    if isinstance(error, SandboxGone):
        return "policy_limit" if error.reason == "init_died" else "platform_lost"
    return "platform_error"


@contextlib.contextmanager
def phase(record: Rollout, name: str) -> Iterator[None]:
    """Adds the seconds that the block takes to those of the phase."""
    start = time.perf_counter()
    try:
        yield
    finally:
        record.seconds[name] = record.seconds.get(name, 0.0) + time.perf_counter() - start
