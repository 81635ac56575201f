"""`shoal bench`: what Shoal costs on this machine, beside its marks and what others cost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shoal.bench.run import Progress, Report


def bench(
    peers: Annotated[bool, typer.Option("--peers", help="Also bubblewrap, crun, runc, uv and tar.")] = False,
    only: Annotated[list[str] | None, typer.Option(metavar="ROW", help="Only this row; may be repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few samples, to see that it works.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
) -> None:
    """Measure Shoal on this machine; all rows in one run, in turns."""
    from shoal.bench.rows import choose
    from shoal.bench.run import measure
    from shoal.errors import InvalidRequest

    if json and markdown:
        raise InvalidRequest("markdown", "goes without --json")
    rows = choose(only or (), peers=peers)
    with progress_bar() as tell:
        report = measure(rows, quick=quick, tell=tell)
    print_report(report, as_json=json, as_markdown=markdown)


@contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None]]:
    """The row at work and the time left, on a stderr that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )  # fmt: skip
    console = Console(stderr=True)
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def tell(progress: Progress) -> None:
            description = f"{progress.doing} {progress.row}"
            bar.update(task, completed=progress.done, total=progress.total, description=description)

        yield tell


def print_report(report: Report, *, as_json: bool, as_markdown: bool) -> None:
    if as_json:
        import msgspec

        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    elif as_markdown:
        from shoal.bench.report import markdown

        sys.stdout.write(markdown(report))
    else:
        from rich.console import Console

        from shoal.bench.report import tables

        Console().print(tables(report), highlight=False)
