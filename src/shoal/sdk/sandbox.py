"""The sandbox as users see it. `sync.py` is generated from this file; change it here and run `make sync`."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, overload

from shoal.errors import InvalidRequest, NotFound
from shoal.node.interface import CreateRequest, Node, ShellRequest
from shoal.sandbox.landing import Bounds
from shoal.sdk.commands import AsyncCommands
from shoal.sdk.embedded import acall, engine
from shoal.sdk.feed import AsyncContent, Feed, apieces_of
from shoal.sdk.requests import audit_of, missing, plain_env, plain_layers, profile_of, refuse_later
from shoal.sdk.shells import AsyncPtys, AsyncShell
from shoal.sdk.streams import close_stream, next_piece, to_bytes
from shoal.sdk.transfer import download, upload
from shoal.types import (
    AccessPolicy,
    Audit,
    AuditRecord,
    Change,
    FileEvent,
    FileInfo,
    Layer,
    Mark,
    NetworkPolicy,
    Profile,
    SandboxInfo,
    State,
    parse_size,
)

FileInfos = list[FileInfo]
FileEvents = list[FileEvent]
SandboxInfos = list[SandboxInfo]
Changes = list[Change]
AuditRecords = list[AuditRecord]
"""Aliases, since the classes below have a method `list`."""


class AsyncFiles:
    """The files of one sandbox. Relative paths start in its working directory."""

    def __init__(self, node: Node, sandbox: str) -> None:
        self._node = node
        self._sandbox = sandbox

    @overload
    async def read(
        self, path: str, format: Literal["text"] = "text", *, limit: int | str = ..., user: str | int | None = ...
    ) -> str: ...
    @overload
    async def read(
        self, path: str, format: Literal["bytes"], *, limit: int | str = ..., user: str | int | None = ...
    ) -> bytes: ...
    @overload
    async def read(
        self, path: str, format: Literal["stream"], *, user: str | int | None = ...
    ) -> AsyncIterator[bytes]: ...

    async def read(
        self,
        path: str,
        format: Literal["text", "bytes", "stream"] = "text",
        *,
        limit: int | str = "512MiB",
        user: str | int | None = None,
    ) -> str | bytes | AsyncIterator[bytes]:
        """A regular file. Text is UTF-8; what is not becomes U+FFFD. A stream holds little at a time and has no limit.

        LimitExceeded if there are more than `limit` bytes: a file's size is the sandbox's choice."""
        if format == "stream":
            return self._pieces(path, user)
        if format not in ("text", "bytes"):
            raise InvalidRequest("format", f"takes 'text', 'bytes' or 'stream', not {format!r}")
        data = await acall(self._node.read_file(self._sandbox, path, user, parse_size(limit, "limit")))
        return data if format == "bytes" else data.decode("utf-8", "replace")

    async def _pieces(self, path: str, user: str | int | None) -> AsyncIterator[bytes]:
        stream = self._node.stream_file(self._sandbox, path, user)
        try:
            while (piece := await acall(next_piece(stream))) is not None:
                yield piece
        finally:
            await acall(close_stream(stream))

    async def write(
        self, path: str, data: AsyncContent, mode: int | None = None, user: str | int | None = None
    ) -> None:
        """Makes missing parents, replaces atomically, and keeps an existing file's mode and owner.

        `data`: text, bytes, something that gives bytes piece by piece, or an open binary file. If that fails half-way,
        the file is as it was."""
        if isinstance(data, (str, bytes, bytearray, memoryview)):
            await acall(self._node.write_file(self._sandbox, path, to_bytes(data), mode, user))
        else:
            await self._feed(Feed(lambda pieces: self._node.write_file(self._sandbox, path, pieces, mode, user)), data)

    async def _feed(self, feed: Feed, data: AsyncContent) -> None:
        try:
            async for piece in apieces_of(data):
                if not await acall(feed.send(piece)):
                    break
            await acall(feed.finish())
        except BaseException:
            await acall(feed.abandon())
            raise

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise missing("Files", name)

    async def write_many(self, files: Mapping[str, AsyncContent]) -> None:
        """Path to content; each file atomically, not all together."""
        for path, data in files.items():
            await self.write(path, data)

    async def append(self, path: str, data: AsyncContent) -> None:
        """Makes the file if it is missing. `data` as in `write`; what has been sent when it fails half-way stays."""
        if isinstance(data, (str, bytes, bytearray, memoryview)):
            await acall(self._node.append_file(self._sandbox, path, to_bytes(data)))
        else:
            await self._feed(Feed(lambda pieces: self._node.append_file(self._sandbox, path, pieces)), data)

    async def list(self, path: str = ".", depth: int = 1) -> FileInfos:
        """The entries below a directory, sorted by path; links are not followed."""
        return await acall(self._node.list_files(self._sandbox, path, depth))

    async def stat(self, path: str) -> FileInfo:
        """Of the path itself, also if it is a link."""
        return await acall(self._node.stat_file(self._sandbox, path))

    async def exists(self, path: str) -> bool:
        try:
            await self.stat(path)
        except NotFound:
            return False
        return True

    async def make_dir(self, path: str, mode: int = 0o755) -> None:
        """With missing parents; one that is there is no error."""
        await acall(self._node.make_dir(self._sandbox, path, mode))

    async def remove(self, path: str) -> None:
        """A file, a link, or a directory with all that is in it. NotFound if nothing is there."""
        await acall(self._node.remove_file(self._sandbox, path))

    async def rename(self, old: str, new: str) -> None:
        """Replaces what is at `new`. A directory that comes from a layer cannot be renamed; copy it."""
        await acall(self._node.rename_file(self._sandbox, old, new))

    async def watch(self, path: str, recursive: bool = False) -> AsyncWatch:
        """What happens to a file, or to the entries of a folder, or with `recursive` to all below it, from now on.

        NotFound if nothing is there; LimitExceeded past 32 watches of one sandbox."""
        id = await acall(
            self._node.watch_files(self._sandbox, path, recursive),
            undo=lambda watch: self._node.end_watch(self._sandbox, watch),
        )
        return AsyncWatch(self._node, self._sandbox, id)

    async def upload(
        self, local: str | os.PathLike[str], remote: str, *, user: str | int | None = None, owners: bool = False
    ) -> None:
        """A file or a tree of this machine to the path `remote`, with modes, times, links, holes and FIFOs as they are.

        It belongs to `user` (None: root), or with `owners` to the numbers that it belongs to here. Folders that are
        there keep their mode and what else is in them. Sockets and devices are left out."""
        await acall(upload(self._node, self._sandbox, Path(local), remote, user, owners))

    async def download(
        self, remote: str, local: str | os.PathLike[str], *, limit: int | str = "8GiB", entries: int = 1_000_000
    ) -> None:
        """A file or a tree to the path `local`, with times, links and holes, and modes without set-uid bits.

        It belongs to the caller. Links are made as links and never followed; FIFOs, sockets and devices are left out.
        LimitExceeded if all its files have more than `limit` bytes, holes included, or there are more than `entries`;
        what has come by then stays."""
        bounds = Bounds(parse_size(limit, "limit"), entries)
        await acall(download(self._node, self._sandbox, remote, Path(local), bounds))


class AsyncWatch:
    """The events of what is watched, as they come. Ends by `close`, with a `with` block, or with what it watches."""

    def __init__(self, node: Node, sandbox: str, id: int) -> None:
        self._node = node
        self._sandbox = sandbox
        self._id = id
        self._waiting: deque[FileEvent] = deque()
        self._closed = False

    async def __aiter__(self) -> AsyncIterator[FileEvent]:
        """Waits for events until `close`. NotFound when what is watched is gone, SandboxGone with the sandbox.

        "overflow" says that more happened than was taken: what was lost must be looked for."""
        while self._waiting or await self._fetch(None):
            yield self._waiting.popleft()

    async def take(self, timeout: float) -> FileEvents:
        """The events that have come, or that come first within `timeout` seconds; none if there are none."""
        if not self._waiting:
            await self._fetch(timeout)
        taken = [*self._waiting]
        self._waiting.clear()
        return taken

    async def _fetch(self, timeout: float | None) -> bool:
        if not self._closed:
            self._waiting.extend(await acall(self._node.file_events(self._sandbox, self._id, timeout)))
        return bool(self._waiting)

    async def close(self) -> None:
        """Whoever waits for an event gets none. Calling it again is no error."""
        self._closed = True
        await acall(self._node.end_watch(self._sandbox, self._id))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncSandbox:
    """A fresh, isolated environment. Ends by `kill`, at the end of `async with`, after `ttl`, or with this process."""

    def __init__(self, node: Node, info: SandboxInfo) -> None:
        self.id = info.id
        self.capabilities = frozenset(info.capabilities)
        """What this sandbox can do beyond what every one can."""
        self.commands = AsyncCommands(node, info.id)
        self.files = AsyncFiles(node, info.id)
        self.pty = AsyncPtys(node, info.id)
        self._node = node

    @classmethod
    async def create(
        cls,
        image: str = "host",
        layers: Iterable[str | Layer] = (),
        workspace: str | Layer | None = None,
        profile: str | Profile = "basic",
        tier: str = "namespace",
        network: str | NetworkPolicy | None = None,
        access: AccessPolicy | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = "/workspace",
        user: str | int = "root",
        ttl: float | None = 3600,
        metadata: Mapping[str, str] | None = None,
        audit: Audit | None = None,
        **options: Any,
    ) -> Self:
        """Makes a sandbox.

        `layers`: keys of layers (digests, names, "python:3.11"), highest first. `profile`: a name or a Profile.
        `tier`: "namespace", or "fake" for tests of your own code: it isolates nothing. `network`: None for none at all,
        "pypi" for the package index, or a NetworkPolicy. `access`: what of its files and programs commands may use.
        `env`, `cwd` and `user` hold for every command that does not say otherwise. `ttl`: seconds of life. `audit`:
        what is to be written down.
        InvalidRequest names the field that is wrong; CapacityError when there is no room; SetupFailed.
        """
        refuse_later(options)
        request = CreateRequest(
            image=image,
            layers=plain_layers(layers),
            workspace=workspace,
            profile=profile_of(profile),
            tier=tier,
            network=network,
            access=access,
            env=plain_env(env),
            cwd=cwd,
            user=user,
            ttl=ttl,
            metadata=dict(metadata or {}),
            audit=audit_of(audit),
        )
        node = engine().node
        return cls(node, await acall(node.create(request), undo=lambda info: node.kill(info.id)))

    @classmethod
    async def connect(cls, id: str) -> Self:
        """A handle on a sandbox of this process. NotFound, or SandboxGone with the reason."""
        node = engine().node
        return cls(node, await acall(node.info(id)))

    @classmethod
    async def list(cls, metadata: Mapping[str, str] | None = None, state: State | None = None) -> SandboxInfos:
        """The live sandboxes whose metadata has all of these entries."""
        wanted = set((metadata or {}).items())
        infos = await acall(engine().node.list_sandboxes())
        return [info for info in infos if wanted <= set(info.metadata.items()) and state in (None, info.state)]

    @classmethod
    async def kill_all(cls, metadata: Mapping[str, str] | None = None) -> int:
        """Ends those that `list` would show; how many."""
        infos = await cls.list(metadata)
        for info in infos:
            await acall(engine().node.kill(info.id))
        return len(infos)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise missing("Sandbox", name)

    async def shell(
        self, *, env: Mapping[str, str] | None = None, cwd: str | None = None, user: str | int | None = None
    ) -> AsyncShell:
        """A session: a bash that stays, with its directory, variables, functions, options and jobs."""
        request = ShellRequest(env=plain_env(env), cwd=cwd, user=user)
        id, pid = await acall(
            self._node.open_shell(self.id, request), undo=lambda opened: self._node.close_shell(self.id, opened[0])
        )
        return AsyncShell(self._node, self.id, id, pid)

    async def info(self) -> SandboxInfo:
        return await acall(self._node.info(self.id))

    async def set_access(self, policy: AccessPolicy) -> None:
        """Tightens what commands may use of files and programs; those that run, as far as docs/guide/access.md says.

        InvalidRequest names the field by which something would be allowed that is not now."""
        await acall(self._node.set_access(self.id, policy))

    async def changes(self, since: Mark | None = None) -> Changes:
        """What differs from its layers, or from what was at a mark, sorted by path."""
        return await acall(self._node.changes(self.id, self._mark_id(since)))

    async def mark(self) -> Mark:
        """This moment, for `changes` and `diff` since then. The last four of a sandbox are kept.

        Takes as long as `changes`, and of the node's memory 500 bytes for each changed path and up to 8 MiB of the
        contents of small files."""
        return Mark(self.id, await acall(self._node.mark(self.id)))

    def _mark_id(self, since: Mark | None) -> int | None:
        if since is not None and (not isinstance(since, Mark) or since.sandbox != self.id):
            raise InvalidRequest("since", f"takes a mark of this sandbox, not {since!r}")
        return None if since is None else since.id

    async def diff(self, since: Mark | None = None, path: str = "/", *, limit: int | str = "16MiB") -> str:
        """A unified diff of what is below `path`, as git writes it, with names relative to it.

        Binary files, and those larger than 1 MiB, have one line that says so. LimitExceeded past `limit` bytes."""
        return await acall(self._node.diff(self.id, self._mark_id(since), path, parse_size(limit, "limit")))

    async def audit(self, since: float = 0.0) -> AuditRecords:
        """What was written down after this time (of the last record that is known), oldest first, while it lives.

        A record of kind "dropped" stands where some are missing: a sandbox may do more than can be kept."""
        return await acall(self._node.audit(self.id, since))

    async def kill(self) -> None:
        """Ends all of it. Calling it again is no error; any other call then raises SandboxGone."""
        await acall(self._node.kill(self.id))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()
