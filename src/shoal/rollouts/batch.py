"""Many rollouts: tasks in groups, a bounded number at once, each result kept as soon as it is there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from msgspec import Struct, structs

from shoal.config import data_dir
from shoal.errors import InvalidRequest
from shoal.network.index import read_package_index
from shoal.rollouts.agents import Agent, NamedAgent, find_agent
from shoal.rollouts.downloads import Downloads
from shoal.rollouts.preparation import Machine, Platform
from shoal.rollouts.report import Report, summarize
from shoal.rollouts.results import REPORT, ResultsFile, Rollout, write_atomically
from shoal.rollouts.rollout import Ready, blame, phase, prepare, roll_out
from shoal.rollouts.tasks import Task, load_tasks

AGENT_LIMIT = 1800.0


class Progress(Struct, frozen=True):
    """How far a batch is."""

    done: int
    total: int
    last: Rollout | None = None
    """What has just finished; None at the start."""


def run(
    tasks: Sequence[Task] | str | Path,
    agent: str | Agent,
    *,
    group: int = 1,
    parallel: int = 8,
    out: str | Path | None = None,
    resume: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    agent_limit: float = AGENT_LIMIT,
) -> Report:
    """`run_async` for callers without an event loop."""
    return uvloop.run(
        run_async(
            tasks, agent, group=group, parallel=parallel, out=out, resume=resume, on_progress=on_progress,
            agent_limit=agent_limit,
        )
    )  # fmt: skip


async def run_async(
    tasks: Sequence[Task] | str | Path,
    agent: str | Agent,
    *,
    group: int = 1,
    parallel: int = 8,
    out: str | Path | None = None,
    resume: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    agent_limit: float = AGENT_LIMIT,
    platform: Platform | None = None,
) -> Report:
    """Rolls out every task `group` times, at most `parallel` at once, and says what came of it.

    `tasks` is a list of them, a manifest file or the name of one that comes with Shoal. `out` is a folder for
    results.jsonl and report.json; with `resume`, what is finished there is not done again (what the platform
    failed at is). `agent_limit` is how many seconds an agent gets. Raises InvalidRequest; a rollout's own
    failure is in its result and never ends the batch.
    """
    chosen = load_tasks(tasks) if isinstance(tasks, (str, Path)) else list(tasks)
    if len({task.id for task in chosen}) < len(chosen):
        raise InvalidRequest("tasks", "two of them have the same id")
    _check_numbers(group=group, parallel=parallel, agent_limit=agent_limit)
    async with contextlib.AsyncExitStack() as stack:
        downloads = Downloads(data_dir() / "downloads", read_package_index())
        actor = find_agent(agent, downloads)
        file = stack.enter_context(ResultsFile(Path(out), resume=resume)) if out is not None else None
        await stack.enter_async_context(downloads)
        where = platform or Machine(data_dir() / "tmp")
        stack.push_async_callback(where.close)
        batch = Batch(chosen, actor, group, where, downloads, file, on_progress or _ignore)
        try:
            await batch.run(parallel, agent_limit)
        finally:
            report = batch.report()
            if out is not None:
                write_atomically(Path(out) / REPORT, encode_report(report))
    return report


def encode_report(report: Report) -> bytes:
    """The report as JSON, without the rollouts themselves."""
    return msgspec.json.format(msgspec.json.encode(structs.replace(report, results=())), indent=2) + b"\n"


def _check_numbers(**numbers: float) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise InvalidRequest(name, f"at least 1, not {number}")


def _ignore(progress: Progress) -> None:
    """For callers who don't want to know."""


class Batch:
    """The rollouts of one call of `run`: what is to do, what is done."""

    def __init__(
        self,
        tasks: Sequence[Task],
        agent: NamedAgent,
        group: int,
        platform: Platform,
        downloads: Downloads,
        file: ResultsFile | None,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._tasks, self._agent, self._group = tasks, agent, group
        self._platform, self._downloads = platform, downloads
        self._file, self._on_progress = file, on_progress
        self._start = time.perf_counter()
        planned = {(agent.name, task.id, index) for task in tasks for index in range(group)}
        before = file.read() if file is not None else {}
        self._done = {k: each for k, each in before.items() if k in planned and each.reward is not None}
        self._todo = len(planned) - len(self._done)
        self._results: list[Rollout] = []

    async def run(self, parallel: int, agent_limit: float) -> None:
        """Does what is left. No more tasks are held in memory at once than rollouts run."""
        self._on_progress(Progress(0, self._todo))
        at_once = asyncio.Semaphore(parallel)
        waiting = asyncio.Semaphore(parallel)
        await _all(self._run_task(task, waiting, at_once, agent_limit) for task in self._tasks)

    async def _run_task(
        self, task: Task, waiting: asyncio.Semaphore, at_once: asyncio.Semaphore, agent_limit: float
    ) -> None:
        records = self._open_records(task)
        if not records:
            return
        async with waiting:
            ready = await self._prepare(task, records)
            if ready is not None:
                await _all(self._run_one(record, ready, at_once, agent_limit) for record in records)

    async def _run_one(self, record: Rollout, ready: Ready, at_once: asyncio.Semaphore, agent_limit: float) -> None:
        async with at_once:
            await roll_out(record, ready, self._agent, self._platform, agent_limit)
        self._finish(record)

    def _open_records(self, task: Task) -> list[Rollout]:
        records = [Rollout(task=task.id, agent=self._agent.name, group=index) for index in range(self._group)]
        return [record for record in records if record.key not in self._done]

    async def _prepare(self, task: Task, records: list[Rollout]) -> Ready | None:
        """What the task's rollouts share. Where it can't be had, all of them are the platform's failures."""
        first, *others = records
        try:
            with phase(first, "prepare"):
                return await prepare(task, self._platform, self._downloads)
        except Exception as error:  # the border of a task, like that of a rollout
            for record in records:
                blame(record, error)
                self._finish(record)
        finally:
            for record in others:
                record.seconds.update(first.seconds)
        return None

    def _finish(self, record: Rollout) -> None:
        if self._file is not None:
            self._file.append(record)
        self._results.append(record)
        self._on_progress(Progress(len(self._results), self._todo, record))

    def report(self) -> Report:
        """What is done so far, an earlier run included."""
        results = sorted([*self._done.values(), *self._results], key=lambda rollout: rollout.key)
        return summarize(
            self._agent.name,
            results,
            tasks=len(self._tasks),
            planned=self._todo + len(self._done),
            elapsed=time.perf_counter() - self._start,
        )


async def _all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs them together; the first that fails ends the others and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
