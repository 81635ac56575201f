"""Several layers merged into one that looks the same, as the kernel's overlay would show them.

A tall stack costs a look-up in every layer for each name that isn't there. Merging is done on the trees themselves, so
that it needs neither a mount nor root.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from shoal.errors import InvalidRequest
from shoal.image import capture, erofs, tree
from shoal.image.manifest import Meta
from shoal.image.store import Store
from shoal.image.tree import Entry, Limits, Size
from shoal.types import Layer


def flatten(store: Store, layers: Sequence[Layer], *, bottom: bool, meta: Meta | None = None) -> Layer:
    """One layer in place of these, highest first, all with the same target.

    `bottom`: nothing lies below them, so marks of what they hide can go too.
    """
    targets = {layer.target for layer in layers}
    if len(targets) != 1:
        raise InvalidRequest("layers", f"only layers of one place can be merged, not of {', '.join(sorted(targets))}")
    with store.stage() as folder, ExitStack() as open_layers:
        roots = [open_layers.enter_context(_opened(layer)) for layer in layers]
        merge(roots, folder / "root", bottom=bottom)
        return store.publish(folder / "root", meta=meta or Meta(target=targets.pop()))


def merge(roots: Sequence[int], target: Path, *, bottom: bool, limits: Limits | None = None) -> Size:
    """Writes what the open folders `roots`, highest first, show together to `target`, which must not exist yet."""
    opaque: list[bytes] = []
    entries = _merged(list(roots), b"", bottom, opaque)
    size = capture.write(entries, roots[0], target, limits, drop=[tree.OPAQUE])
    for path in opaque:
        os.setxattr(os.fsencode(target) + b"/" + path, tree.OPAQUE, b"y")
    return size


@contextlib.contextmanager
def _opened(layer: Layer) -> Iterator[int]:
    if layer.format == "directory":
        root = tree.open_directory(layer.source)
    else:
        mount = erofs.attach(Path(layer.source))
        try:
            root = tree.open_directory(".", mount)
        finally:
            os.close(mount)
    try:
        yield root
    finally:
        os.close(root)


def _merged(folders: list[int], path: bytes, bottom: bool, opaque: list[bytes]) -> Iterator[Entry]:
    """The entries of one place, seen from several layers at once; folders before what they hold.

    `bottom`: nothing shines through from below here. `opaque` gets the folders that must say so themselves.
    """
    names = sorted({os.fsencode(name) for folder in folders for name in os.listdir(folder)})
    for name in names:
        below = path + b"/" + name if path else name
        found, closed = _visible(folders, name, below)
        if not (bottom and tree.is_whiteout(found[0].stat)):
            yield found[0]
        if found[0].kind == stat.S_IFDIR:
            if closed and not bottom:
                opaque.append(below)
            with ExitStack() as opened:
                inner = [opened.enter_context(tree.opened(entry)) for entry in found]
                yield from _merged(inner, below, bottom or closed, opaque)


def _visible(folders: list[int], name: bytes, path: bytes) -> tuple[list[Entry], bool]:
    """The highest entry of that name with the folders that shine through it; and whether nothing further does."""
    found: list[Entry] = []
    for folder in folders:
        try:
            entry = Entry(folder, name, path, os.stat(name, dir_fd=folder, follow_symlinks=False))
        except FileNotFoundError:
            continue
        if entry.kind != stat.S_IFDIR:
            return found or [entry], True
        found.append(entry)
        with tree.opened(entry) as inner:
            if tree.is_opaque(inner):
                return found, True
    return found, False
