"""Whether layers still are what their names promise: every byte of them is read again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from shoal.errors import DigestMismatch, NotFound, PlatformError
from shoal.image import disk, tree
from shoal.image.manifest import Manifest
from shoal.image.store import Store


class Verdict(Struct, frozen=True):
    """What was found of one layer."""

    digest: str
    fault: str | None
    """None: it is as it was made."""


def verify(
    store: Store, digests: list[str] | None = None, tell: Callable[[int], None] = lambda _: None
) -> list[Verdict]:
    """Checks these layers, or all. `tell` gets the bytes of each one that is done. NotFound for one that isn't here."""
    found = [store.manifest(key) for key in digests] if digests is not None else list(store.list())
    verdicts: list[Verdict] = []
    for manifest in found:
        verdicts.append(Verdict(manifest.digest, _fault(store, manifest)))
        tell(manifest.bytes)
    return verdicts


def _fault(store: Store, manifest: Manifest) -> str | None:
    try:
        check(store, manifest)
    except (PlatformError, NotFound, OSError) as error:
        return str(error)
    return None


def check(store: Store, manifest: Manifest) -> None:
    """DigestMismatch if a layer's bytes are not those that were published; NotFound if a part of a stack is gone."""
    folder = store.folder(manifest.digest)
    if manifest.format == "stack":
        for key in manifest.needs:
            if key.startswith("sha256:"):
                store.manifest(key)
        return
    if manifest.format == "erofs":
        _compare(folder / "image.erofs", manifest.blob, disk.digest(folder / "image.erofs"))
        return
    root = tree.open_directory(folder / "tree")
    try:
        found = tree.identify(root).digest
    finally:
        os.close(root)
    _compare(folder / "tree", manifest.tree, found)


def _compare(place: Path, expected: str | None, found: str) -> None:
    if expected is not None and expected != found:
        raise DigestMismatch(str(place), expected, found)
