"""`shoal rollouts`: an agent over tasks, a progress bar on stderr, a table or one JSON document on stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shoal.rollouts import Progress, Report

CAPACITY, PLATFORM = 3, 4


def rollouts(
    tasks: Annotated[str, typer.Option(help="pypi, pypi-hanging, or a manifest (.jsonl).")],
    agent: Annotated[str, typer.Option(help='oracle, noop, "cmd: ...", or pkg.mod:Class.')],
    task: Annotated[list[str] | None, typer.Option(help="Only tasks whose id matches; may be repeated.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only so many, those with the shortest recorded tests.")
    ] = None,
    group: Annotated[int, typer.Option(min=1, help="Rollouts of each task.")] = 1,
    parallel: Annotated[int, typer.Option(min=1, help="Rollouts at once.")] = 8,
    agent_limit: Annotated[float, typer.Option(min=1, help="Seconds that an agent gets.")] = 1800.0,
    out: Annotated[Path | None, typer.Option(help="Folder for results.jsonl and report.json.", file_okay=False)] = None,
    resume: Annotated[bool, typer.Option(help="Leave out what is finished in --out.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON and nothing else.")] = False,
) -> None:
    """Roll out an agent over real tasks and grade what it leaves."""
    from shoal.errors import InvalidRequest
    from shoal.rollouts import load_tasks, run, select_tasks

    if resume and out is None:
        raise InvalidRequest("resume", "needs --out DIR, the folder of the run to go on with")
    sys.path.insert(0, str(Path.cwd()))  # where users keep the module of pkg.mod:Class
    chosen = select_tasks(load_tasks(tasks), task or (), limit)
    with progress_bar() as show:
        report = run(
            chosen, agent, group=group, parallel=parallel, out=out, resume=resume, on_progress=show,
            agent_limit=agent_limit,
        )  # fmt: skip
    print_report(report, as_json=json)
    if code := exit_code(report):
        raise typer.Exit(code)


@contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None]]:
    """A bar with count, mean reward, rate and time left. On a stderr that is no terminal: nothing."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar

    columns = (
        BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[last]}"),
    )  # fmt: skip
    console = Console(stderr=True)
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        row = bar.add_task("rollouts", total=None, rate="", last="")

        def show(progress: Progress) -> None:
            last = f"{progress.last.task} {progress.last.verdict}" if progress.last else ""
            speed = bar.tasks[row].speed
            rate = f"{60 * speed:.1f} a minute" if speed else ""
            bar.update(row, completed=progress.done, total=progress.total, rate=rate, last=last)

        yield show


def print_report(report: Report, *, as_json: bool) -> None:
    """The report on stdout, and the platform's failures on stderr, one a line."""
    from rich.console import Console

    from shoal.rollouts.batch import encode_report
    from shoal.rollouts.report import summary

    if as_json:
        sys.stdout.write(encode_report(report).decode())
    else:
        Console().print(summary(report))
    for rollout in report.failures:
        why = rollout.error.message if rollout.error else rollout.note
        print(f"{rollout.task}: {rollout.verdict}: {' '.join(why.split())[:300]}", file=sys.stderr)


def exit_code(report: Report) -> int:
    """0, or that for what the platform failed at; 3 where all it lacked was room."""
    codes = {rollout.error.code if rollout.error else "" for rollout in report.failures}
    if not codes:
        return 0
    return CAPACITY if codes == {"capacity"} else PLATFORM
