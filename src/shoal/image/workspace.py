"""A git repository at one commit as a layer, with its past and without its future.

What the agent is to write is often in the repository already: in later commits, tags, other branches, remotes, reflogs,
or as loose objects of theirs. So nothing is copied and then removed: a new repository fetches the one commit and what
it descends from, inside a sandbox.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from shoal.errors import BuildFailed, InvalidRequest, NotFound
from shoal.image import capture, tree
from shoal.image.install import Builder
from shoal.image.manifest import Meta
from shoal.image.store import Store
from shoal.types import Layer, NetworkPolicy, Result

_REVISION: Final = 1
_SOURCE: Final = "/opt/shoal-build/source"
_BRANCH: Final = "main"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_REF: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,200}")

# One fixed time and name for what git itself writes, so that the same commit is the same layer.
_FETCH: Final = """
set -eu
cd "$1"
git init -q -b "$4" .
git -c protocol.version=2 fetch -q --no-tags --no-write-fetch-head --update-head-ok "$2" "+$3:refs/heads/$4"
git -c advice.detachedHead=false checkout -q "$4"
git submodule status > /dev/null
rm -rf .git/logs .git/hooks .git/FETCH_HEAD .git/ORIG_HEAD .git/info/refs .git/packed-refs.lock
git repack -q -a -d -f --threads=1
git update-index -q --refresh
git rev-parse HEAD
"""

_ENVIRONMENT: Final = {
    "HOME": "/opt/shoal-build",
    "GIT_CONFIG_COUNT": "3",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "GIT_CONFIG_KEY_1": "uploadpack.allowAnySHA1InWant",
    "GIT_CONFIG_VALUE_1": "true",
    "GIT_CONFIG_KEY_2": "core.hooksPath",
    "GIT_CONFIG_VALUE_2": "/dev/null",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_CONFIG_NOSYSTEM": "1",
}


class GitSpec(Struct, frozen=True):
    """Which commit of which repository."""

    source: str
    """A folder of this machine, or an https URL."""
    commit: str
    """40 hex digits; or a branch or tag, which is looked up each time."""
    target: str = "/workspace"


NewGitBuilder = Callable[[Sequence[Layer], NetworkPolicy | None], AbstractAsyncContextManager[Builder]]
"""Makes a sandbox on the image `host` with these layers and this network."""


async def build_git(spec: GitSpec, store: Store, new_builder: NewGitBuilder, *, timeout: float = 1800) -> Layer:
    """The layer: a look-up by commit, or one build for all who ask. NotFound without such a commit; BuildFailed."""
    _check(spec)
    if _COMMIT.fullmatch(spec.commit) is None:
        async with _opened(spec, new_builder, timeout) as repository:
            commit = await repository.resolve()
        spec = msgspec.structs.replace(spec, commit=commit)
    inputs = hashlib.sha256(f"git {_REVISION} {spec.commit} {spec.target}".encode()).hexdigest()

    async def make() -> Layer:
        async with _opened(spec, new_builder, timeout) as repository:
            await repository.fetch()
            return await asyncio.to_thread(_freeze, store, repository.upper(), spec.target, inputs)

    return await store.build_once(inputs, make)


def _check(spec: GitSpec) -> None:
    if _REF.fullmatch(spec.commit) is None or ".." in spec.commit:
        raise InvalidRequest("commit", f"40 hex digits, or the name of a branch or tag, not {spec.commit!r}")
    if "://" in spec.source:
        if not spec.source.startswith("https://"):
            raise InvalidRequest("source", f"a folder or an https URL, not {spec.source!r}")
    elif not Path(spec.source).is_dir():
        raise NotFound(f"{spec.source} is no folder")
    if not spec.target.startswith("/") or ".." in spec.target.split("/") or spec.target == "/":
        raise InvalidRequest("target", f"an absolute path below the root, not {spec.target!r}")


@asynccontextmanager
async def _opened(spec: GitSpec, new_builder: NewGitBuilder, timeout: float) -> AsyncIterator[_Repository]:
    """In a sandbox that sees the source and nothing else."""
    if "://" in spec.source:
        host = urlsplit(spec.source)
        policy = NetworkPolicy(allow=(f"{host.hostname}:{host.port or 443}",))
        async with new_builder((), policy) as builder:
            yield _Repository(spec, spec.source, builder, timeout)
    else:
        place = str(Path(spec.source).resolve())
        layer = Layer(digest=f"host:{place}", source=place, target=_SOURCE)
        async with new_builder((layer,), None) as builder:
            yield _Repository(spec, _SOURCE, builder, timeout)


class _Repository:
    """The source as a sandbox sees it, and the new repository in it."""

    def __init__(self, spec: GitSpec, source: str, builder: Builder, timeout: float) -> None:
        self._spec = spec
        self._from = source
        self._builder = builder
        self._timeout = timeout

    def upper(self) -> int:
        return self._builder.upper()

    async def resolve(self) -> str:
        """The commit that a branch or tag is now."""
        name = self._spec.commit
        refs = await self._run(["git", "ls-remote", self._from, name, f"{name}^{{}}"])
        lines = (line.partition("\t") for line in refs.stdout.splitlines())
        found = {ref: commit for commit, _, ref in lines}
        for ref in (f"refs/tags/{name}^{{}}", f"refs/heads/{name}", f"refs/tags/{name}", name):
            if _COMMIT.fullmatch(commit := found.get(ref, "")):
                return commit
        raise NotFound(f"{self._spec.source} has no branch or tag {name!r}")

    async def fetch(self) -> None:
        """Makes the new repository at the target."""
        place = self._spec.target
        await self._builder.write(f"{place}/.keep", b"")
        await self._builder.run(["/bin/rm", f"{place}/.keep"], env={}, timeout=self._timeout)
        arguments = [place, self._from, self._spec.commit, _BRANCH]
        result = await self._run(["/bin/sh", "-c", _FETCH, "sh", *arguments])
        if result.stdout.strip() != self._spec.commit:
            raise NotFound(f"{self._spec.source} has no commit {self._spec.commit}")

    async def _run(self, command: list[str]) -> Result:
        result = await self._builder.run(command, env=_ENVIRONMENT, timeout=self._timeout)
        if result.ok:
            return result
        said = result.stderr.strip().splitlines() or ["no reason given"]
        if "not our ref" in result.stderr or "couldn't find remote ref" in result.stderr:
            raise NotFound(f"{self._spec.source} has no commit {self._spec.commit}")
        raise BuildFailed(f"{self._spec.source} could not be fetched: {said[-1]}", result.stderr)


def _freeze(store: Store, upper: int, target: str, inputs: str) -> Layer:
    prefix = target.strip("/").encode()
    size = tree.measure_below(upper, prefix)
    store.check_room(2 * size.bytes, size.entries + 100)
    with store.stage() as folder:
        root = folder / "root"
        capture.capture(upper, prefix, root / target.strip("/"))
        for parent in [root, *(root / target.strip("/")).parents]:
            if root in (parent, *parent.parents):
                parent.chmod(0o755)
        return store.publish(root, meta=Meta(), inputs=inputs)
