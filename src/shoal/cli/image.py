"""`shoal image`: what is in this machine's store, whether it is whole, and making room in it."""

from __future__ import annotations

import re
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from shoal.cli.env import KEY_DIGITS, Json
from shoal.errors import InvalidRequest
from shoal.types import parse_size

if TYPE_CHECKING:
    from shoal.image.garbage import Item, Removal
    from shoal.image.manifest import Manifest
    from shoal.image.store import Store

Keys = Annotated[list[str] | None, typer.Argument(help="Digests, beginnings of digests or names; none: all.")]
_DAMAGED = 1
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def image() -> typer.Typer:
    """The group of commands."""
    app = typer.Typer(no_args_is_help=True)
    app.command("ls")(list_layers)
    app.command()(inspect)
    app.command()(verify)
    app.command()(gc)
    return app


def list_layers(json: Json = False) -> None:
    """What is in the store, the oldest first."""
    from shoal.image.garbage import look

    store = _store()
    manifests, items = store.list(), {item.digest: item for item in look(store)}
    names: dict[str, list[str]] = {}
    for name, digest in store.names().items():
        names.setdefault(digest, []).append(name)
    if json:
        _print_json([_facts(store, each, items.get(each.digest), names) for each in manifests])
        return
    table = Table(
        Column("key", no_wrap=True, min_width=KEY_DIGITS),
        Column("at"),
        Column("form", no_wrap=True),
        Column("size", justify="right", no_wrap=True),
        Column("used", no_wrap=True),
        Column("names"),
        box=None,
        pad_edge=False,
    )
    for each in manifests:
        item = items.get(each.digest)
        at = each.path[0].removesuffix("/bin") if each.target == "/" and each.path else each.target
        row = (_short(each.digest), at, each.format, *_size_and_age(item), ", ".join(names.get(each.digest, [])))
        table.add_row(*row)
    Console().print(table)


def inspect(key: Annotated[str, typer.Argument(help="A digest, the beginning of one, or a name.")]) -> None:
    """All that is known of one layer, as JSON."""
    from shoal.image.garbage import look

    store = _store()
    manifest = store.manifest(key)
    items = {item.digest: item for item in look(store)}
    names = {manifest.digest: [name for name, digest in store.names().items() if digest == manifest.digest]}
    _print_json(_facts(store, manifest, items.get(manifest.digest), names))


def verify(keys: Keys = None, json: Json = False) -> None:
    """Read every byte again and compare with what was published; exits with 1 if a layer is damaged."""
    from shoal.image.verify import verify as check

    store = _store()
    wanted = keys or [manifest.digest for manifest in store.list()]
    total = sum(store.manifest(key).bytes for key in wanted)
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        verdicts = check(store, wanted, tell=lambda size: progress.advance(task, size))
    if json:
        _print_json(verdicts)
    else:
        for verdict in verdicts:
            print(f"{_short(verdict.digest)}  {verdict.fault or 'as it was made'}")
    if any(verdict.fault for verdict in verdicts):
        raise typer.Exit(_DAMAGED)


def gc(
    unused_for: Annotated[str | None, typer.Option(help="Remove what was not used for so long: 12h, 30d.")] = None,
    keep: Annotated[str | None, typer.Option(help="Remove the longest unused until no more is left: 50GiB.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json: Json = False,
) -> None:
    """Remove layers to make room. What has a name, is needed by one that stays, or is in use stays."""
    from shoal.image.garbage import Policy, collect

    if unused_for is None and keep is None:
        raise InvalidRequest("gc", "say what may go: --unused-for 30d, --keep 50GiB, or both")
    policy = Policy(
        unused_for=None if unused_for is None else parse_age(unused_for),
        keep_bytes=None if keep is None else parse_size(keep, "keep"),
    )
    removal = collect(_store(), policy, dry_run=dry_run)
    if json:
        _print_json(removal)
    else:
        _tell(removal, dry_run)


def _tell(removal: Removal, dry_run: bool) -> None:
    for digest in removal.removed:
        print(_short(digest))
    done = "would free" if dry_run else "freed"
    held = f", {len(removal.in_use)} more in use" if removal.in_use else ""
    left = f"{removal.kept / 2**20:,.1f} MiB left"
    print(f"{done} {removal.freed / 2**20:,.1f} MiB in {len(removal.removed)} layers{held}; {left}", file=sys.stderr)


def parse_age(text: str) -> float:
    """Seconds from "90s", "15m", "12h", "30d" or "2w"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if match is None:
        raise InvalidRequest("unused_for", f"a time like 12h or 30d (s, m, h, d, w), not {text!r}")
    return float(match[1]) * _AGES[match[2]]


def _store() -> Store:
    from shoal.config import data_dir
    from shoal.image.store import Store

    return Store(data_dir() / "store")


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:KEY_DIGITS]


def _size_and_age(item: Item | None) -> tuple[str, str]:
    if item is None:
        return "", ""
    used = datetime.fromtimestamp(item.used).astimezone().isoformat(" ", "minutes")
    return f"{item.size / 2**20:,.1f} MiB", used


def _facts(store: Store, manifest: Manifest, item: Item | None, names: dict[str, list[str]]) -> dict[str, Any]:
    import msgspec

    facts: dict[str, Any] = msgspec.to_builtins(manifest)
    facts["source"] = store.get(manifest.digest).source
    facts["names"] = names.get(manifest.digest, [])
    if item is not None:
        facts |= {"stored": item.size, "used": item.used}
    return facts


def _print_json(document: object) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
