"""Environments and other layers, built with sandboxes of this node."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from shoal.errors import InvalidRequest
from shoal.image import debian, environment
from shoal.image.apt import read_apt_settings
from shoal.image.debian import DebianSpec
from shoal.image.environment import EnvironmentSpec
from shoal.image.gate import Gate
from shoal.image.manifest import Manifest, Meta
from shoal.image.throughput import read_throughput
from shoal.image.workspace import GitSpec, build_git
from shoal.node.interface import CommandRequest, CreateRequest
from shoal.node.local import LocalNode
from shoal.types import GiB, Layer, NetworkPolicy, Profile, Result

_PROFILE: Final = Profile(cpu=64, memory=8 * GiB, disk=32 * GiB, processes=1024, inodes=1 << 20)
_LIFE: Final = 6 * 3600.0


class SandboxBuilder:
    """Implements `image.environment.Builder` by a sandbox."""

    def __init__(self, node: LocalNode, sandbox: str, upper: int) -> None:
        self._node = node
        self._sandbox = sandbox
        self._upper = upper

    async def run(self, argv: list[str], *, env: dict[str, str], timeout: float) -> Result:
        request = CommandRequest(cmd=argv, env=env, cwd="/", timeout=timeout, output_limit=16 << 20)
        return await self._node.run(self._sandbox, request)

    async def write(self, path: str, data: bytes) -> None:
        await self._node.write_file(self._sandbox, path, data)

    def upper(self) -> int:
        return self._upper


class Builds:
    """What this node builds."""

    def __init__(self, node: LocalNode) -> None:
        self._node = node
        self._gate: Gate | None = None

    async def gate(self) -> Gate:
        """What builds pass, one after the other where the disk carries no more."""
        if self._gate is None:
            measured = await asyncio.to_thread(read_throughput, self._node.store)
            self._gate = self._gate or Gate(measured.slots())
        return self._gate

    async def environment(self, spec: EnvironmentSpec) -> Layer:
        """The layer with these packages, found or built. Errors as `image.environment.build`."""
        node = self._node
        interpreter = await asyncio.to_thread(node.images.interpreter, spec.python)
        base = await node.images.get("host")
        return await environment.build(spec, node.store, base, interpreter, node.index, self._builder)

    @asynccontextmanager
    async def _builder(
        self, layers: Sequence[Layer], network: str | NetworkPolicy | None = "pypi", image: str = "host"
    ) -> AsyncIterator[SandboxBuilder]:
        node = self._node
        request = CreateRequest(
            image=image, layers=tuple(layers), profile=_PROFILE, network=network, ttl=_LIFE, cwd="/"
        )
        async with (await self.gate()).slot(f"build on {image}"):
            sandbox = (await node.create(request)).id
            try:
                upper = os.open("up0", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=node.upper(sandbox))
                try:
                    yield SandboxBuilder(node, sandbox, upper)
                finally:
                    os.close(upper)
            finally:
                await node.kill(sandbox)

    async def debian(self, spec: DebianSpec, name: str) -> str:
        """Keeps an image of Debian, found or built, under a name; its digest. Errors as `image.debian.build`."""
        settings = await asyncio.to_thread(read_apt_settings)
        record = await debian.build(spec, self._node.store, settings, self._builder)
        return await asyncio.to_thread(self._node.images.catalog.add, record, name)

    async def repository(self, spec: GitSpec) -> Layer:
        """A git repository at a commit, without what came later. Errors as `image.workspace.build_git`."""
        return await build_git(spec, self._node.store, self._builder)

    async def directory(self, source: Path, target: str, key: str | None = None) -> Layer:
        """A layer with the tree at `source` below `target`. With `key`, which names the content, it is made once."""
        if not target.startswith("/") or ".." in target.split("/"):
            raise InvalidRequest("target", f"takes an absolute path, not {target!r}")
        if key is None:
            return await asyncio.to_thread(self._publish, source, target, None)
        inputs = hashlib.sha256(f"directory\n{target}\n{key}".encode()).hexdigest()

        async def build() -> Layer:
            return await asyncio.to_thread(self._publish, source, target, inputs)

        return await self._node.store.build_once(inputs, build)

    def _publish(self, source: Path, target: str, inputs: str | None) -> Layer:
        if not source.is_dir():
            raise InvalidRequest("directory", f"{source} is not a directory")
        with self._node.store.stage() as folder:
            root = folder / "root"
            root.mkdir(mode=0o755)
            below = root / target.strip("/")
            below.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, below, symlinks=True, dirs_exist_ok=True)
            return self._node.store.publish(root, meta=Meta(), inputs=inputs)

    def list(self) -> tuple[Manifest, ...]:
        """All layers of this machine's store, the oldest first."""
        return self._node.store.list()
