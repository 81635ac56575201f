"""Layers made on this machine, for code that runs on asyncio."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.image.environment import EnvironmentSpec
from shoal.sdk.embedded import acall, engine
from shoal.types import Layer


async def build_environment(
    requirements: Sequence[str],
    python: str = "3.11",
    *,
    no_deps: bool = False,
    exclude_newer: str | None = None,
) -> Layer:
    """A layer at /opt/env with these packages: found by all that decides it, or built by uv inside a sandbox.

    `exclude_newer`: a date; what came to the index later is not there. BuildFailed carries the log.
    """
    spec = EnvironmentSpec(tuple(requirements), python, no_deps=no_deps, exclude_newer=exclude_newer)
    return await acall(engine().builds.environment(spec))


async def publish_layer(directory: Path, target: str = "/", key: str | None = None) -> Layer:
    """A layer with the tree of `directory` below `target`. With a `key`, which names the content, it is made once."""
    return await acall(engine().builds.directory(directory, target, key))
