"""`shoal doctor`: what is missing on this machine, why it matters and what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

if TYPE_CHECKING:
    from shoal.node.doctor.finding import Finding
    from shoal.node.doctor.report import Report

COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red", "absent": "dim"}
CANNOT_RUN = 4


def doctor(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="With --inside: programs, or folders of them, to look at.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
    data: Annotated[Path | None, typer.Option(help="The data folder, if not the usual one.")] = None,
    inside: Annotated[bool, typer.Option("--inside", help="Look at the image this runs in, not the machine.")] = False,
) -> None:
    """Try what sandboxes need of this machine; exits with 4 if they cannot run here."""
    from shoal.node.doctor import image, report

    if inside:
        findings = image.examine([str(path) for path in paths or ()])
        if json:
            _print_document({"findings": findings})
        else:
            _print_findings(Console(), findings)
        return
    if paths:
        raise typer.BadParameter("paths are looked at with --inside only", param_hint="paths")
    result = report.examine(data)
    if json:
        _print_document(result)
    else:
        _print_report(result)
    if not result.tier["namespace"].available:
        raise typer.Exit(CANNOT_RUN)


def _print_document(document: Any) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(document))


def _print_report(result: Report) -> None:
    console = Console()
    console.print(", ".join(f"{name} {value}" for name, value in result.machine.items()), highlight=False)
    _print_findings(console, result.findings)
    tier = result.tier["namespace"]
    verdict = "[green]can run[/]" if tier.available else "[bold red]cannot run[/]: see what failed above"
    console.print(f"Sandboxes of the namespace tier {verdict}.")
    if tier.unenforced:
        console.print(f"Nothing enforces here: {', '.join(tier.unenforced)}.")


def _print_findings(console: Console, findings: Sequence[Finding]) -> None:
    for group, members in groupby(sorted(findings, key=_group_order(findings)), lambda finding: finding.group):
        console.print(_table(group, list(members)))
    for finding in findings:
        if finding.status in ("warn", "fail"):
            console.print(f"[{COLOURS[finding.status]}]{finding.id}[/]: {escape(finding.why)}", highlight=False)
            console.print(f"    {escape(finding.fix)}", highlight=False, soft_wrap=True)


def _group_order(findings: Sequence[Finding]) -> Callable[[Finding], int]:
    """Groups in the order in which they first appear."""
    order = list(dict.fromkeys(finding.group for finding in findings))
    return lambda finding: order.index(finding.group)


def _table(group: str, findings: Sequence[Finding]) -> Table:
    table = Table(
        "",
        "",
        Column(overflow="fold"),
        title=group,
        title_justify="left",
        show_header=False,
        box=None,
        pad_edge=False,
    )
    for finding in findings:
        status = f"[{COLOURS[finding.status]}]{finding.status}[/]"
        table.add_row(status, escape(finding.title), escape(finding.detail))
    return table
