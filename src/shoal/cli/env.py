"""`shoal env`: environments of Python packages as layers."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

if TYPE_CHECKING:
    from shoal.image.manifest import Manifest

KEY_DIGITS = 12
"""Of a layer's digest, in tables. If ever two begin alike, `--layer` asks for more of it."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def env() -> typer.Typer:
    """The group of commands."""
    app = typer.Typer(no_args_is_help=True)
    app.command("build")(build)
    app.command("ls")(list_environments)
    return app


def build(
    requirements: Annotated[Path, typer.Option("-r", "--requirements", help="A requirements file.")],
    python: Annotated[str, typer.Option(help="An interpreter of this machine, as 3.11 or 3.11.7.")] = "3.11",
    no_deps: Annotated[bool, typer.Option("--no-deps", help="The file names everything.")] = False,
    json: Json = False,
) -> None:
    """Build an environment inside a sandbox, or find it; prints the key for `--layer`."""
    from shoal.image.environment import read_spec
    from shoal.sdk.embedded import call, engine

    spec = read_spec(requirements, python, no_deps=no_deps)
    with Console(stderr=True).status(f"building {requirements}"):
        layer = call(engine().builds.environment(spec))
    if json:
        _print_json(layer)
    else:
        print(layer.digest)


def list_environments(json: Json = False) -> None:
    """The environments in this machine's store, the oldest first."""
    from shoal.config import data_dir
    from shoal.image.environment import ENV
    from shoal.image.store import Store

    found = [manifest for manifest in Store(data_dir() / "store").list() if f"{ENV}/bin" in manifest.path]
    if json:
        _print_json(found)
    else:
        Console().print(_table(found))


def _print_json(document: object) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.encode(document).decode() + "\n")


def _table(found: list[Manifest]) -> Table:
    """Keys are cut to what `--layer` needs, and never further however narrow the terminal is."""
    table = Table(
        Column("key", no_wrap=True, min_width=KEY_DIGITS),
        Column("python", no_wrap=True),
        Column("size", justify="right", no_wrap=True),
        Column("made", no_wrap=True),
        box=None,
        pad_edge=False,
    )
    for manifest in found:
        made = datetime.fromtimestamp(manifest.created).astimezone().isoformat(" ", "minutes")
        size = f"{manifest.bytes / 2**20:.1f} MiB"
        table.add_row(short_key(manifest), ", ".join(manifest.needs).removeprefix("python:"), size, made)
    return table


def short_key(manifest: Manifest) -> str:
    return manifest.digest.removeprefix("sha256:")[:KEY_DIGITS]
