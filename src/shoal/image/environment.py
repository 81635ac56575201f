"""Environments: Python packages, installed once inside a sandbox and kept as layers.

An environment is a stack: the empty one of its interpreter, and over it a layer for each package. It is found by the
fingerprint of what it was made from; where it was never asked for before but all its packages were, it is put together
without building anything. It always lies at /opt/env, so nothing in it has to be moved.
"""

from __future__ import annotations

import asyncio
import hashlib
import platform as machine
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import msgspec

from shoal.errors import InvalidRequest, Unsupported
from shoal.image import parts, requirements
from shoal.image.install import ENV, EnvironmentSpec, Index, Installation, NewBuilder, blame, read_local
from shoal.image.interpreter import Interpreter
from shoal.image.manifest import Meta
from shoal.image.store import Store
from shoal.image.toolkit import publish_uv
from shoal.image.wheels import Pin, read_pins
from shoal.types import Image, Layer, MiB

__all__ = ["ENV", "EnvironmentSpec", "blame", "build", "fingerprint", "read_spec"]

_REVISION: Final = 2
"""Goes up when the same inputs would be built into something else."""
_ROOM: Final = (256 * MiB, 20_000)
"""Bytes and inodes without which a build isn't begun."""
_HEIGHT_MAX: Final = 300
"""Packages of one stack. Overlay takes 500 layers, and each look-up of a name that isn't there asks them all."""


def read_spec(file: Path, python: str = "3.11", *, no_deps: bool = False) -> EnvironmentSpec:
    """The spec of a requirements file. InvalidRequest names the line that can't be honoured."""
    found = requirements.read(file)
    return EnvironmentSpec(found.requirements, python, found.constraints, no_deps)


def fingerprint(spec: EnvironmentSpec, base_digest: str, interpreter: Interpreter, platform: str, index: Index) -> str:
    """All that decides what a build makes, as 64 hex digits. An open requirement stays as first built."""
    spec = msgspec.structs.replace(spec, python=interpreter.version)
    return _hash((spec, *_circumstances(base_digest, interpreter, platform, index)))


def _circumstances(base_digest: str, interpreter: Interpreter, platform: str, index: Index) -> tuple[object, ...]:
    """What decides beside the requirements."""
    layers = [layer.digest for layer in interpreter.layers]
    return _REVISION, base_digest, interpreter.version, interpreter.path, layers, platform, _index_facts(index)


def _hash(facts: object) -> str:
    return hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).hexdigest()


def _index_facts(index: Index) -> tuple[dict[str, str], tuple[str, ...], tuple[str, ...]]:
    """What an index is, without the passwords and certificates by which it is reached."""
    settings = index.uv_environment()
    constraints = settings.get("UV_CONSTRAINT", "").split()
    contents = tuple(read_local(path).decode("utf-8", "replace") for path in constraints if "://" not in path)
    ways = {name for name in settings if name == "SSL_CERT_FILE" or _is_credential(name)}
    kept = {name: value for name, value in settings.items() if name not in ways}
    return kept, index.uv_arguments(), contents


def _is_credential(name: str) -> bool:
    return name.endswith(("_USERNAME", "_PASSWORD"))


async def build(
    spec: EnvironmentSpec,
    store: Store,
    base: Image,
    interpreter: Interpreter,
    index: Index,
    new_builder: NewBuilder,
    *,
    timeout: float = 1800,
) -> Layer:
    """The layer of an environment: a look-up, a stack of known packages, or one build for all who ask at the same time.

    BuildFailed carries the whole log and names the package; InvalidRequest; StorageFull; Unsupported for an
    index with a password, unless `no_build`. `timeout`: seconds for each step.
    """
    spec = _check(spec)
    platform = machine.machine()
    inputs = fingerprint(spec, base.digest, interpreter, platform, index)
    circumstances = _hash(
        (spec.options, spec.exclude_newer, *_circumstances(base.digest, interpreter, platform, index))
    )

    async def make() -> Layer:
        async with AsyncExitStack() as exits:
            work = _Work(spec, store, interpreter, index, new_builder, timeout, exits)
            return await _make(work, circumstances, inputs)

    return await store.build_once(inputs, make)


class _Work:
    """The sandbox of a build, made when it is needed for the first time."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        store: Store,
        interpreter: Interpreter,
        index: Index,
        new_builder: NewBuilder,
        timeout: float,
        exits: AsyncExitStack,
    ) -> None:
        self.spec = spec
        self.store = store
        self.interpreter = interpreter
        self._index = index
        self._new_builder = new_builder
        self._timeout = timeout
        self._exits = exits
        self._begun: Installation | None = None
        self.upper = -1
        self.empty: frozenset[str] = frozenset()
        """Files of the environment before anything is installed."""

    async def begin(self) -> Installation:
        if self._begun is None:
            _check_secrets(self.spec, self._index)
            self.store.check_room(*_ROOM)
            toolkit = await asyncio.to_thread(publish_uv, self.store)
            layers = (toolkit, *self.interpreter.layers, *_folders(self._index))
            builder = await self._exits.enter_async_context(self._new_builder(layers))
            self._begun = Installation(self.spec, self.interpreter, self._index, builder, self._timeout)
            await self._begun.prepare()
            self.upper = builder.upper()
            self.empty = await asyncio.to_thread(parts.names, self.upper)
        return self._begun


async def _make(work: _Work, circumstances: str, inputs: str) -> Layer:
    """1. Which packages, exactly; 2. those that are known; 3. the others installed; 4. all of them stacked."""
    pins = await _pins(work)
    if pins is None or len(pins) > _HEIGHT_MAX:
        return await _whole(work, inputs)
    keys = {pin: _hash(("package", circumstances, pin)) for pin in pins}
    empty = _hash(("empty", circumstances))
    found = {pin: work.store.find(key) for pin, key in keys.items()}
    bottom = work.store.find(empty)
    missing = [pin for pin, layer in found.items() if layer is None]
    if missing or bottom is None:
        installation = await work.begin()
        if missing:
            await installation.install([pin.line for pin in missing])
        await installation.settle()
        wanted = {pin.name: keys[pin] for pin in missing} | ({} if bottom else {"": empty})
        made = await asyncio.to_thread(parts.publish, work.store, work.upper, work.empty, wanted)
        if made is None:
            return await _whole(work, inputs)
        found |= {pin: made[pin.name] for pin in missing}
        bottom = bottom or made[""]
    stacked = [layer for pin in reversed(pins) if (layer := found[pin]) is not None]
    meta = _meta(work.interpreter)
    return await asyncio.to_thread(work.store.publish_stack, [*stacked, bottom], meta=meta, inputs=inputs)


async def _pins(work: _Work) -> tuple[Pin, ...] | None:
    """None where something cannot be said as a name and a version."""
    lines = [line for line in work.spec.requirements if line not in work.spec.options]
    pins = read_pins(lines)
    if pins is not None and (work.spec.no_deps or not pins):
        return pins
    installation = await work.begin()
    return read_pins(await installation.resolve())


async def _whole(work: _Work, inputs: str) -> Layer:
    """All of it as one layer."""
    installation = await work.begin()
    await installation.install()
    await installation.settle()
    return await asyncio.to_thread(parts.publish_whole, work.store, work.upper, _meta(work.interpreter), inputs)


def _meta(interpreter: Interpreter) -> Meta:
    return Meta(path=(f"{ENV}/bin",), env={"VIRTUAL_ENV": ENV}, needs=(interpreter.key,))


def _check(spec: EnvironmentSpec) -> EnvironmentSpec:
    """The same with each line checked, in one order: two spellings of one wish are one environment."""
    if spec.exclude_newer and not re.fullmatch(r"\d{4}-\d\d-\d\d(T[\d:.]+Z)?", spec.exclude_newer):
        raise InvalidRequest("exclude_newer", f"a date like 2024-05-01, not {spec.exclude_newer!r}")
    return msgspec.structs.replace(
        spec,
        requirements=tuple(sorted({requirements.check(line) for line in spec.requirements})),
        constraints=tuple(sorted({requirements.check(line, "constraints") for line in spec.constraints})),
    )


def _check_secrets(spec: EnvironmentSpec, index: Index) -> None:
    if not spec.no_build and any(_is_credential(name) for name in index.uv_environment()):
        way = "install wheels only (no_build), or use an index that needs none"
        raise Unsupported(f"the index needs a password, which packages' build code could read: {way}")


def _folders(index: Index) -> list[Layer]:
    paths = [path for path in index.local_paths() if Path(path).is_dir()]
    return [Layer(digest=f"host:{path}", source=path, target=path) for path in paths]
