"""Layers of tools that builds use: `uv`, the very binary that Shoal itself depends on."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import uv

from shoal.errors import Unsupported
from shoal.image.manifest import Meta
from shoal.image.store import Store
from shoal.types import Layer

UV = "/opt/shoal/bin/uv"
"""Where it is inside."""


def publish_uv(store: Store) -> Layer:
    """The layer that holds uv, made once for each version. Unsupported if uv's program is not installed."""
    try:
        binary = Path(uv.find_uv_bin())
    except FileNotFoundError as error:
        raise Unsupported("building environments needs the program uv: install it with `pip install uv`") from error
    found = binary.stat()
    facts = f"toolkit uv 1 {binary} {found.st_size} {found.st_mtime_ns}"
    inputs = hashlib.sha256(facts.encode()).hexdigest()
    return store.find_or_build(inputs, lambda: _publish(store, binary, inputs))


def _publish(store: Store, binary: Path, inputs: str) -> Layer:
    with store.stage() as folder:
        target = folder / "root" / UV.lstrip("/")
        target.parent.mkdir(parents=True)
        shutil.copyfile(binary, target)
        target.chmod(0o755)
        return store.publish(folder / "root", meta=Meta(), inputs=inputs)
