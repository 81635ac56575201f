"""Environments: Python packages, installed once inside a sandbox and kept as a layer.

The layer is named by what it holds and found by the fingerprint of what it was made from. It always lies at
/opt/env, so nothing in it has to be moved. What runs the build is given by the node as a `Builder`: a fresh
sandbox that reaches the package index and nothing else, since packages' own build code runs in it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform as machine
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from shoal.errors import BuildFailed, InvalidRequest, Unsupported
from shoal.image import capture, requirements, tree
from shoal.image.interpreter import Interpreter
from shoal.image.manifest import Meta
from shoal.image.store import Store
from shoal.image.toolkit import UV, publish_uv
from shoal.types import Image, Layer, MiB, Result

ENV = "/opt/env"
_WORK = "/opt/shoal-build"
"""Beside the environment, so that uv's cache and the environment can share files by hard links."""
_REVISION = 1
"""Goes up when the same inputs would be built into something else."""
_ROOM = (256 * MiB, 20_000)
"""Bytes and inodes without which a build isn't begun."""

# A .pyc holds as long as it knows the time of its source. So every file gets one fixed time first and is
# compiled after that: the layer is the same whenever it is built, and a source that is edited counts at once.
_SETTLE = """
import compileall, os, sys
for folder, folders, files in os.walk(sys.argv[1]):
    for name in files:
        os.utime(os.path.join(folder, name), (946684800, 946684800), follow_symlinks=False)
library = os.path.join(sys.argv[1], "lib")
try:
    compileall.compile_dir(library, maxlevels=100, quiet=2, workers=2)
except Exception:  # no semaphores here
    compileall.compile_dir(library, maxlevels=100, quiet=2)
for folder, folders, files in os.walk(sys.argv[1], topdown=False):
    for name in files:
        if name.endswith(".pyc"):
            os.utime(os.path.join(folder, name), (946684800, 946684800))
    os.utime(folder, (946684800, 946684800))
"""

_BLAMED = (
    r"[Ff]ailed to (?:build|download(?: and build)?|prepare|install|fetch|read)[: ]+`([^`]+)`",
    r"Because ([A-Za-z0-9._-]+(?:==[^\s,]+)?) (?:was not found|has no|is not)",
    r"there (?:is|are) no versions? of ([A-Za-z0-9._-]+(?:==[^\s,]+)?)",
    r"In `--require-hashes` mode[^:]*: `?([^`\n]+)`?",
    r"Hash mismatch for `([^`]+)`",
)


class EnvironmentSpec(Struct, frozen=True):
    """What an environment is made from."""

    requirements: tuple[str, ...]
    """Lines of a requirements file; `read` of this module makes them from one."""
    python: str = "3.11"
    """"3.11", or an exact "3.11.7"."""
    constraints: tuple[str, ...] = ()
    no_deps: bool = False
    """The requirements are everything: nothing they depend on is added."""
    no_build: bool = False
    """Only wheels: no build code of packages runs."""
    exclude_newer: str | None = None
    """A date, as 2024-05-01: what came to the index later isn't there."""


class Index(Protocol):
    """Where packages come from, as this machine's settings say."""

    def uv_environment(self) -> dict[str, str]:
        """Variables that make uv use it."""

    def uv_arguments(self) -> tuple[str, ...]:
        """What uv takes only as an argument."""

    def local_paths(self) -> tuple[str, ...]:
        """Folders and files of this machine that a build must see at their own paths."""


class Builder(Protocol):
    """A fresh sandbox that reaches the package index only."""

    async def run(self, argv: list[str], *, env: dict[str, str], timeout: float) -> Result:
        """Run a command as root with this environment over the image's own."""

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, with missing parents."""

    def upper(self) -> int:
        """The open folder of its writable layer for "/", as the host sees it; the builder closes it."""


NewBuilder = Callable[[Sequence[Layer]], AbstractAsyncContextManager[Builder]]
"""Makes one, on the base image with these layers over it."""


def read_spec(file: Path, python: str = "3.11", *, no_deps: bool = False) -> EnvironmentSpec:
    """The spec of a requirements file. InvalidRequest names the line that can't be honoured."""
    found = requirements.read(file)
    return EnvironmentSpec(found.requirements, python, found.constraints, no_deps)


def fingerprint(spec: EnvironmentSpec, base_digest: str, interpreter: Interpreter, platform: str, index: Index) -> str:
    """All that decides what a build makes, as 64 hex digits. An open requirement stays as first built."""
    spec = msgspec.structs.replace(spec, python=interpreter.version)
    layers = [layer.digest for layer in interpreter.layers]
    facts = (_REVISION, spec, base_digest, interpreter.path, layers, platform, _index_facts(index))
    return hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).hexdigest()


def _index_facts(index: Index) -> tuple[dict[str, str], tuple[str, ...], tuple[str, ...]]:
    """What an index is, without the passwords and certificates by which it is reached."""
    settings = index.uv_environment()
    constraints = settings.get("UV_CONSTRAINT", "").split()
    contents = tuple(_read_local(path).decode("utf-8", "replace") for path in constraints if "://" not in path)
    ways = {name for name in settings if name == "SSL_CERT_FILE" or _is_credential(name)}
    kept = {name: value for name, value in settings.items() if name not in ways}
    return kept, index.uv_arguments(), contents


def _is_credential(name: str) -> bool:
    return name.endswith(("_USERNAME", "_PASSWORD"))


def _read_local(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequest("index", f"{path} can't be read: {error.strerror}") from error


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
    """The layer of an environment: a look-up, or one build for all who ask for it at the same time.

    BuildFailed carries the whole log and names the package; InvalidRequest; StorageFull; Unsupported for an
    index with a password, unless `no_build`. `timeout`: seconds for each step.
    """
    spec = _check(spec)
    inputs = fingerprint(spec, base.digest, interpreter, machine.machine(), index)

    async def make() -> Layer:
        _check_secrets(spec, index)
        store.check_room(*_ROOM)
        toolkit = await asyncio.to_thread(publish_uv, store)
        async with new_builder((toolkit, *interpreter.layers, *_folders(index))) as builder:
            await _Build(spec, interpreter, index, builder, timeout).run()
            return await asyncio.to_thread(_freeze, store, builder.upper(), interpreter, inputs)

    return await store.build_once(inputs, make)


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


def _freeze(store: Store, upper: int, interpreter: Interpreter, inputs: str) -> Layer:
    """Take /opt/env out of the sandbox's writable layer."""
    prefix = ENV.lstrip("/").encode()
    source = tree.open_below(upper, prefix)
    try:
        size = tree.measure(source)
    finally:
        os.close(source)
    store.check_room(2 * size.bytes, size.entries + 100)
    meta = Meta(path=(f"{ENV}/bin",), env={"VIRTUAL_ENV": ENV}, needs=(interpreter.key,))
    with store.stage() as folder:
        root = folder / "root"
        capture.capture(upper, prefix, root / ENV.lstrip("/"))
        for parent in (root, root / "opt"):
            parent.chmod(0o755)
        return store.publish(root, meta=meta, inputs=inputs)


class _Build:
    """One build under way."""

    def __init__(
        self, spec: EnvironmentSpec, interpreter: Interpreter, index: Index, builder: Builder, timeout: float
    ) -> None:
        self._spec = spec
        self._interpreter = interpreter
        self._index = index
        self._builder = builder
        self._timeout = timeout
        self._log: list[str] = []
        self._env = {
            "HOME": f"{_WORK}/home",
            "UV_CACHE_DIR": f"{_WORK}/cache",
            "UV_LINK_MODE": "hardlink",
            "UV_NO_PROGRESS": "1",
            "UV_PYTHON_DOWNLOADS": "never",
            **index.uv_environment(),
        }

    async def run(self) -> None:
        await self._write_inputs()
        await self._step([UV, "venv", ENV, "--python", self._interpreter.path])
        if self._spec.requirements:
            await self._step([UV, "pip", "install", "--python", f"{ENV}/bin/python", *self._options()])
        await self._step([f"{ENV}/bin/python", "-I", "-c", _SETTLE, ENV])

    async def _write_inputs(self) -> None:
        await self._builder.write(f"{_WORK}/home/.keep", b"")
        await self._write_lines("requirements.txt", self._spec.requirements)
        await self._write_lines("constraints.txt", self._spec.constraints)
        for path in self._index.local_paths():
            if Path(path).is_file():
                await self._builder.write(path, await asyncio.to_thread(_read_local, path))

    async def _write_lines(self, name: str, lines: Sequence[str]) -> None:
        await self._builder.write(f"{_WORK}/{name}", "".join(f"{line}\n" for line in lines).encode())

    def _options(self) -> list[str]:
        spec = self._spec
        options = ["-r", f"{_WORK}/requirements.txt", "-c", f"{_WORK}/constraints.txt"]
        options += self._index.uv_arguments()
        options += ["--no-deps"] if spec.no_deps else []
        options += ["--no-build"] if spec.no_build else []
        options += ["--exclude-newer", spec.exclude_newer] if spec.exclude_newer else []
        return options

    async def _step(self, argv: list[str]) -> None:
        result = await self._builder.run(argv, env=self._env, timeout=self._timeout)
        self._log += [f"$ {' '.join(argv[:3])} ...", result.stdout, result.stderr]
        if result.ok:
            return
        log = "\n".join(part.rstrip() for part in self._log if part)
        raise BuildFailed(self._explain(result), log)

    def _explain(self, result: Result) -> str:
        """One line: which package, for which Python, and how it ended."""
        if result.limit == "timeout":
            how = f"took more than {self._timeout:g} s"
        elif result.limit is not None:
            how = f"was ended by the limit on {result.limit}"
        else:
            how = f"failed (exit code {result.exit_code})"
        package = blame(result.stderr + result.stdout)
        what = f"could not install {package}" if package else "could not be built"
        return f"environment for Python {self._interpreter.version} {what}: the build {how}"


def blame(log: str) -> str | None:
    """The package that uv's words are about, if they name one."""
    for pattern in _BLAMED:
        if match := re.search(pattern, log):
            return match[1]
    return None
