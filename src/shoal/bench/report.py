"""A report for people: a table on the terminal, or in Markdown for the documentation."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table

from shoal.bench import marks
from shoal.bench.figures import Figures
from shoal.bench.marks import Judgement, Mark
from shoal.bench.rows import find
from shoal.bench.run import Report
from shoal.types import GiB

_COLOURS = {"aim": "bold green", "met": "green", "missed": "bold red", "not measured": "dim"}


def tables(report: Report) -> RenderableType:
    """Rows, marks and ratios; then what could not be measured."""
    absent = [f"[yellow]{name}[/] is absent: {escape(why)}" for name, why in report.absent.items()]
    quick = ["[yellow]A quick run: too few samples to quote.[/]"] if report.quick else []
    return Group(describe(report.machine), _rows(report), _marks(report), _ratios(report), *quick, *absent)


def _rows(report: Report) -> Table:
    table = Table(Column("row", no_wrap=True), "what", box=None, title="Rows", title_justify="left")
    for heading in ("n", "min", "p50", "p99", "unit"):
        table.add_column(heading, justify="left" if heading == "unit" else "right")
    for name, row in report.rows.items():
        table.add_row(name, find(name).about, *_cells(row))
    return table


def _cells(row: Figures) -> list[str]:
    return [str(row.n), number(row.min), number(row.p50), number(row.p99), row.unit]


def _marks(report: Report) -> Table:
    table = Table("mark", "at least", "aim", "here", "", box=None, title="Marks", title_justify="left")
    for judgement in marks.judge(report.rows):
        colour = _COLOURS[judgement.outcome]
        table.add_row(*mark_cells(judgement)[:-1], f"[{colour}]{judgement.outcome}[/]")
    return table


def _ratios(report: Report) -> Table:
    table = Table("ratio of medians", "", box=None, title="Beside each other", title_justify="left")
    for names, ratio in report.ratios.items():
        table.add_row(names, number(ratio))
    return table


def mark_cells(judgement: Judgement) -> list[str]:
    mark, value = judgement.mark, judgement.value
    here = "" if value is None else number(value)
    return [mark_title(mark), bound(mark, mark.least), bound(mark, mark.aim), here, judgement.outcome]


def mark_title(mark: Mark) -> str:
    return f"{mark.row} {mark.figure}" + (f" / {mark.relative_to}" if mark.relative_to else "")


def bound(mark: Mark, value: float) -> str:
    sign = "≥" if mark.higher else "≤"
    unit = "" if mark.relative_to or not value else f" {find(mark.row).unit}"
    return f"{sign} {number(value)}{unit}"


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{float(f'{value:.3g}'):,.10g}"


def describe(machine: dict[str, str | int]) -> str:
    """One line; memory in GiB."""
    shown = {**machine, "memory": f"{int(machine['memory']) / GiB:.0f} GiB"} if "memory" in machine else machine
    return ", ".join(f"{name} {value}" for name, value in shown.items())


# Markdown


def markdown(report: Report) -> str:
    """The same tables, with what was timed and what it consists of."""
    return "\n".join(_markdown(report)) + "\n"


def _markdown(report: Report) -> Iterator[str]:
    yield f"Machine: {describe(report.machine)}."
    yield ""
    yield from _table(["row", "what", "n", "min", "p50", "p99", "unit"], _row_cells(report))
    yield from _table(["mark", "at least", "aim", "here", "outcome"], map(mark_cells, marks.judge(report.rows)))
    yield from _table(["ratio of medians", ""], ([name, number(ratio)] for name, ratio in report.ratios.items()))
    yield "What was timed:"
    yield ""
    for name, row in report.rows.items():
        yield f"- `{name}`: `{row.command}`" + _parts(row)
    for name, why in report.absent.items():
        yield f"- `{name}` is absent: {why}"


def _row_cells(report: Report) -> Iterator[list[str]]:
    for name, row in report.rows.items():
        yield [f"`{name}`", find(name).about, *_cells(row)]


def _table(heading: list[str], rows: Iterator[list[str]]) -> Iterator[str]:
    for cells in (heading, ["---"] * len(heading), *rows):
        yield f"| {' | '.join(cells)} |"
    yield ""


def _parts(row: Figures) -> str:
    return f" ({', '.join(f'{name} {number(value)}' for name, value in row.parts.items())})" if row.parts else ""
