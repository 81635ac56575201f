"""`shoal image`: the images of this machine, whether their layers are whole, and making room."""

from __future__ import annotations

import contextlib
import re
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from shoal.cli.env import KEY_DIGITS, Json
from shoal.errors import InvalidRequest, NotFound
from shoal.types import parse_size

if TYPE_CHECKING:
    from shoal.image.catalog import Catalog
    from shoal.image.garbage import Item, Removal
    from shoal.image.manifest import Manifest
    from shoal.image.store import Store

Keys = Annotated[list[str] | None, typer.Argument(help="Digests, beginnings of digests or names; none: all.")]
_DAMAGED = 1
_WIDE = 240
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def image() -> typer.Typer:
    """The group of commands."""
    app = typer.Typer(no_args_is_help=True)
    app.command("ls")(list_images)
    app.command()(build)
    app.command()(inspect)
    app.command("rm")(remove)
    app.command()(verify)
    app.command()(gc)
    return app


def list_images(
    layers: Annotated[bool, typer.Option("--layers", help="Every layer of the store, of images or not.")] = False,
    json: Json = False,
) -> None:
    """The images of this machine; with --layers, all that is in the store, the oldest first."""
    if layers:
        _list_layers(json)
        return
    store = _store()
    facts = [_image_facts(store, digest) for digest in _catalog(store).list()]
    if json:
        _print_json(facts)
        return
    table = Table(
        Column("image", no_wrap=True, min_width=KEY_DIGITS),
        Column("names"),
        Column("layers", justify="right"),
        Column("size", justify="right", no_wrap=True),
        Column("made", no_wrap=True),
        Column("from"),
        box=None,
        pad_edge=False,
    )
    table.add_row("", "host", "", "", "", "this machine's own system directories")
    for each in facts:
        row = (str(len(each["layers"])), f"{each['bytes'] / 2**20:,.1f} MiB", _moment(each["created"]), each["source"])
        table.add_row(_short(each["digest"]), ", ".join(each["names"]), *row)
    _console().print(table)


def _list_layers(json: bool) -> None:
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
    _console().print(table)


def inspect(key: Annotated[str, typer.Argument(help="A digest, the beginning of one, or a name.")]) -> None:
    """All that is known of one image, or one layer, as JSON."""
    from shoal.image.garbage import look

    store = _store()
    with contextlib.suppress(NotFound):
        _print_json(_image_facts(store, _catalog(store).resolve(key)))
        return
    manifest = store.manifest(key)
    items = {item.digest: item for item in look(store)}
    names = {manifest.digest: [name for name, digest in store.names().items() if digest == manifest.digest]}
    _print_json(_facts(store, manifest, items.get(manifest.digest), names))


def build(
    name: Annotated[str, typer.Argument(help="debian:SUITE, or shoal-base: Debian with what agents commonly use.")],
    package: Annotated[list[str] | None, typer.Option(help="Packages of Debian beside the essential ones.")] = None,
    tag: Annotated[str | None, typer.Option(help="Another name to keep it under.")] = None,
    json: Json = False,
) -> None:
    """Make an image of Debian from its packages, inside a sandbox; prints its digest."""
    from shoal.image.debian import spec_of
    from shoal.sdk.embedded import call, engine

    spec = spec_of(name, tuple(package or ()))
    with Console(stderr=True).status(f"building {name}"):
        digest = call(engine().builds.debian(spec, tag or name))
    if json:
        _print_json(_image_facts(_store(), digest))
    else:
        print(digest)


def remove(name: Annotated[str, typer.Argument(help="The name of an image, or its digest.")]) -> None:
    """Forget a name, and the image with its last one. Its layers stay until `gc`."""
    print(_short(_catalog(_store()).remove(name)))


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


def _catalog(store: Store) -> Catalog:
    from shoal.image.catalog import Catalog

    return Catalog(store)


def _image_facts(store: Store, digest: str) -> dict[str, Any]:
    import msgspec

    catalog = _catalog(store)
    record = catalog.record(digest)
    manifests = [store.manifest(layer) for layer in record.layers]
    return {
        "digest": digest,
        "names": [name for name, bound in catalog.tags().items() if bound == digest],
        "bytes": sum(manifest.bytes for manifest in manifests),
        "entries": sum(manifest.entries for manifest in manifests),
        **msgspec.to_builtins(record),
    }


def _console() -> Console:
    """What is not a terminal has no width: whoever reads a pipe wants whole names."""
    return Console() if sys.stdout.isatty() else Console(width=_WIDE)


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "minutes")


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:KEY_DIGITS]


def _size_and_age(item: Item | None) -> tuple[str, str]:
    if item is None:
        return "", ""
    return f"{item.size / 2**20:,.1f} MiB", _moment(item.used)


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
