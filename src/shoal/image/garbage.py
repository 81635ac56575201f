"""Which layers go when room is needed: first a pure choice, then the removal of what nobody uses.

A layer stays if it has a name, if an image consists of it, if one that stays needs it, or if any process holds it
(`holds`). Of the rest those go that were not used for long, and then, the longest unused first, as many as it takes to
get below a size.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from shoal.image.catalog import Catalog
from shoal.image.store import Store


class Policy(Struct, frozen=True):
    """What may go. With neither field nothing does."""

    unused_for: float | None = None
    """Seconds since the last use, to about ten minutes."""
    keep_bytes: int | None = None
    """Bytes on disk that layers may take in all."""


class Item(Struct, frozen=True):
    """One layer as the choice sees it."""

    digest: str
    size: int
    """Bytes on disk."""
    used: float
    """Seconds since the epoch."""
    pinned: bool = False
    """It has a name, or an image consists of it."""
    needs: tuple[str, ...] = ()
    """Digests of layers without which it is of no use."""


class Removal(Struct, frozen=True):
    """What a collection did."""

    removed: tuple[str, ...]
    """Digests."""
    freed: int
    """Bytes on disk."""
    in_use: tuple[str, ...]
    """Chosen, but held by a process."""
    kept: int
    """Bytes on disk of what is still there."""


def choose(items: Sequence[Item], policy: Policy, now: float) -> list[Item]:
    """Those that go, the longest unused first."""
    rooted = _needed(items, (item.digest for item in items if item.pinned))
    free = sorted((item for item in items if item.digest not in rooted), key=lambda item: (item.used, item.digest))
    over = 0 if policy.keep_bytes is None else sum(item.size for item in items) - policy.keep_bytes
    chosen: list[Item] = []
    for item in free:
        old = policy.unused_for is not None and now - item.used > policy.unused_for
        if old or over > 0:
            chosen.append(item)
            over -= item.size
    # What one that stays needs, stays as well.
    kept = _needed(items, {item.digest for item in items} - {item.digest for item in chosen})
    return [item for item in chosen if item.digest not in kept]


def _needed(items: Iterable[Item], roots: Iterable[str]) -> set[str]:
    """The roots, what they need, and what that needs."""
    needs = {item.digest: item.needs for item in items}
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        digest = waiting.pop()
        if digest not in found:
            found.add(digest)
            waiting += needs.get(digest, ())
    return found


def collect(store: Store, policy: Policy, *, dry_run: bool = False) -> Removal:
    """Removes what the policy lets go and nobody holds. `dry_run`: only says what would be chosen."""
    items = look(store)
    chosen = choose(items, policy, time.time())
    removed = chosen if dry_run else [item for item in chosen if store.discard(item.digest)]
    gone = {item.digest for item in removed}
    if not dry_run:
        store.forget(gone)
    return Removal(
        removed=tuple(item.digest for item in removed),
        freed=sum(item.size for item in removed),
        in_use=tuple(item.digest for item in chosen if item.digest not in gone),
        kept=sum(item.size for item in items if item.digest not in gone),
    )


def look(store: Store) -> list[Item]:
    """Every layer as the choice sees it. One that goes away meanwhile is left out."""
    named = {*store.names().values(), *Catalog(store).layers()}
    found: list[Item] = []
    for manifest in store.list():
        folder = store.folder(manifest.digest)
        with contextlib.suppress(FileNotFoundError):
            item = Item(
                digest=manifest.digest,
                size=size_on_disk(folder),
                used=max(folder.stat().st_mtime, manifest.created),
                pinned=manifest.digest in named,
                needs=tuple(key for key in manifest.needs if key.startswith("sha256:")),
            )
            found.append(item)
    return found


def size_on_disk(folder: Path) -> int:
    """Bytes that a layer's folder takes."""
    total = 0
    for place, _, files in os.walk(folder):
        total += sum(os.lstat(os.path.join(place, name)).st_blocks for name in files) * 512
    return total
