"""The packages of a finished environment as layers, taken out of the sandbox's writable layer that it was made in."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from shoal.image import capture, tree, wheels
from shoal.image.install import ENV
from shoal.image.manifest import Meta
from shoal.image.store import Store
from shoal.types import Layer

_PREFIX: Final = ENV.lstrip("/")
_EPOCH_NS: Final = 946684800 * 10**9
"""The time of every folder, as of every file (`install`)."""


def names(upper: int) -> frozenset[str]:
    """Every file of the environment so far, by its path below it."""
    root = tree.open_below(upper, _PREFIX.encode())
    try:
        return frozenset(os.fsdecode(entry.path) for entry in tree.walk(root) if not _is_folder(entry))
    finally:
        os.close(root)


def publish(store: Store, upper: int, empty: Collection[str], wanted: Mapping[str, str]) -> dict[str, Layer] | None:
    """A layer for each name, under the inputs that it is found by; "" is the environment without packages.

    None if a file is of no package, or a package brought none: then it has to be kept whole.
    """
    _check_room(store, upper)
    with store.stage() as folder:
        source = folder / "whole"
        capture.capture(upper, _PREFIX.encode(), source)
        found, total = _sort(source)
        found[""] = [path for path in found.get("", []) if path in empty or wheels.source_of(path) in empty]
        if sum(map(len, found.values())) < total or not found.keys() >= wanted.keys():
            return None
        return {
            name: store.publish(_carve(source, folder / f"part{index}", found[name]), meta=Meta(), inputs=inputs)
            for index, (name, inputs) in enumerate(wanted.items())
        }


def publish_whole(store: Store, upper: int, meta: Meta, inputs: str) -> Layer:
    """All of it as one layer."""
    _check_room(store, upper)
    with store.stage() as folder:
        root = folder / "root"
        capture.capture(upper, _PREFIX.encode(), root / _PREFIX)
        for parent in (root, (root / _PREFIX).parent):
            parent.chmod(0o755)
        return store.publish(root, meta=meta, inputs=inputs)


def _check_room(store: Store, upper: int) -> None:
    size = tree.measure_below(upper, _PREFIX.encode())
    store.check_room(2 * size.bytes, 2 * size.entries + 100)


def _sort(source: Path) -> tuple[dict[str, list[str]], int]:
    """Files by package, and how many there are."""
    root = tree.open_directory(source)
    try:
        files = [os.fsdecode(entry.path) for entry in tree.walk(root) if not _is_folder(entry)]
    finally:
        os.close(root)
    records = {path: _read(source / path) for path in files if wheels.is_record(path)}
    return wheels.partition(files, records), len(files)


def _read(file: Path) -> str:
    """In our own copy; a link there could still lead anywhere."""
    if file.is_symlink() or not file.is_file():
        return ""
    return file.read_text(errors="surrogateescape")


def _carve(source: Path, root: Path, files: Collection[str]) -> Path:
    """A tree of its own for these files, which are moved; folders are made anew, all alike."""
    for path in files:
        target = root / _PREFIX / path
        target.parent.mkdir(parents=True, exist_ok=True)
        (source / path).rename(target)
    (root / _PREFIX).mkdir(parents=True, exist_ok=True)
    for place, _, _ in os.walk(root, topdown=False):
        Path(place).chmod(0o755)
        os.utime(place, ns=(_EPOCH_NS, _EPOCH_NS))
    return root


def _is_folder(entry: tree.Entry) -> bool:
    return entry.kind == stat.S_IFDIR
