"""The sandbox as users see it. `sync.py` is generated from this file; change it here and run `make sync`."""

from __future__ import annotations

import os
import signal as signals
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, overload

from shoal.errors import CommandFailed, InvalidRequest, NotFound
from shoal.node.interface import CommandRequest, CreateRequest, Node, Output
from shoal.sandbox.landing import Bounds
from shoal.sdk.embedded import acall, engine
from shoal.sdk.feed import AsyncContent, Feed, apieces_of
from shoal.sdk.requests import missing, plain_env, plain_layers, profile_of, refuse_later
from shoal.sdk.streams import TextStreams, Writer, close_stream, next_piece, to_bytes
from shoal.sdk.transfer import download, upload
from shoal.types import (
    Change,
    FileEvent,
    FileInfo,
    Layer,
    Mark,
    NetworkPolicy,
    Profile,
    Result,
    SandboxInfo,
    State,
    parse_size,
)

FileInfos = list[FileInfo]
FileEvents = list[FileEvent]
SandboxInfos = list[SandboxInfo]
Changes = list[Change]
"""Aliases, since the classes below have a method `list`."""


class AsyncCommand:
    """A command that runs in the background."""

    def __init__(self, node: Node, sandbox: str, id: int, pid: int) -> None:
        self.id = id
        self.pid = pid
        """Inside the sandbox."""
        self._node = node
        self._sandbox = sandbox
        self._result: Result | None = None

    async def wait(self, check: bool = False) -> Result:
        """Its end. Output that was not iterated over is kept up to the limit it was started with."""
        if self._result is None:
            self._result = await acall(self._node.wait(self._sandbox, self.id))
        if check and self._result.exit_code != 0:
            raise CommandFailed(self._result)
        return self._result

    async def kill(self, signal: int = signals.SIGKILL) -> None:
        """SIGKILL goes to all that it started, any other signal to its process group."""
        await acall(self._node.signal(self._sandbox, self.id, signal))

    async def send_stdin(self, data: str | bytes) -> None:
        """Waits while the command does not read."""
        await acall(self._node.send_stdin(self._sandbox, self.id, to_bytes(data)))

    async def close_stdin(self) -> None:
        await acall(self._node.close_stdin(self._sandbox, self.id))

    async def resize(self, cols: int, rows: int) -> None:
        """Of a command on a terminal."""
        await acall(self._node.resize(self._sandbox, self.id, cols, rows))

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Its output as it comes; the command waits while nobody takes it."""
        while pieces := await acall(self._node.output(self._sandbox, self.id)):
            for piece in pieces:
                yield piece


class AsyncCommands:
    """Runs commands in one sandbox."""

    def __init__(self, node: Node, sandbox: str) -> None:
        self._node = node
        self._sandbox = sandbox

    @overload
    async def run(
        self,
        cmd: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = ...,
        cwd: str | None = ...,
        user: str | int | None = ...,
        timeout: float | None = ...,
        silence: float | None = ...,
        stdin: str | bytes | None = ...,
        on_stdout: Writer | None = ...,
        on_stderr: Writer | None = ...,
        background: Literal[False] = ...,
        check: bool = ...,
        output_limit: int | str = ...,
        changes: bool = ...,
    ) -> Result: ...

    @overload
    async def run(
        self,
        cmd: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = ...,
        cwd: str | None = ...,
        user: str | int | None = ...,
        timeout: float | None = ...,
        silence: float | None = ...,
        stdin: str | bytes | None = ...,
        background: Literal[True],
        output_limit: int | str = ...,
    ) -> AsyncCommand: ...

    async def run(
        self,
        cmd: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | int | None = None,
        timeout: float | None = None,
        silence: float | None = None,
        stdin: str | bytes | None = None,
        on_stdout: Writer | None = None,
        on_stderr: Writer | None = None,
        background: bool = False,
        check: bool = False,
        output_limit: int | str = "1MiB",
        changes: bool = False,
    ) -> Result | AsyncCommand:
        """Runs text by a shell, a list as it is, and returns when the command has ended.

        `timeout` and `silence` (seconds in all, seconds without output) kill everything the command started; what it
        had written is in the result. Without `stdin` it reads EOF at once. `on_stdout` and `on_stderr` get text as it
        comes. `background=True` returns a handle at once; its stdin stays open. `check=True` raises CommandFailed.
        `output_limit`: bytes kept of each stream, head and tail. `changes=True` counts the files it changed.
        """
        request = CommandRequest(
            cmd=cmd,
            env=plain_env(env),
            cwd=cwd,
            user=user,
            timeout=timeout,
            silence=silence,
            output_limit=parse_size(output_limit, "output_limit"),
            stdin=None if stdin is None else to_bytes(stdin, "stdin"),
            feed=background and stdin is None,
            changes=changes,
        )
        if background:
            return await self.start(request)
        if on_stdout is None and on_stderr is None:
            result = await acall(self._node.run(self._sandbox, request))
        else:
            result = await self._stream(request, on_stdout, on_stderr)
        if check and result.exit_code != 0:
            raise CommandFailed(result)
        return result

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise missing("Commands", name)

    async def start(self, request: CommandRequest) -> AsyncCommand:
        """A command by its whole request; what `run(background=True)` and terminals are made of."""
        id, pid = await acall(
            self._node.start(self._sandbox, request),
            undo=lambda started: self._node.signal(self._sandbox, started[0], signals.SIGKILL),
        )
        return AsyncCommand(self._node, self._sandbox, id, pid)

    async def _stream(self, request: CommandRequest, on_stdout: Writer | None, on_stderr: Writer | None) -> Result:
        command = await self.start(request)
        decoders = TextStreams(on_stdout, on_stderr)
        try:
            async for piece in command:
                decoders.write(piece)
            decoders.finish()
            return await command.wait()
        except BaseException:
            await command.kill()
            raise


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
        env: Mapping[str, str] | None = None,
        cwd: str = "/workspace",
        user: str | int = "root",
        ttl: float | None = 3600,
        metadata: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Self:
        """Makes a sandbox.

        `layers`: keys of layers (digests, names, "python:3.11"), highest first. `profile`: a name or a Profile.
        `tier`: "namespace", or "fake" for tests of your own code: it isolates nothing.
        `network`: None for none at all, "pypi" for the package index, or a NetworkPolicy. `env`, `cwd` and `user` hold
        for every command that does not say otherwise. `ttl`: seconds of life.
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
            env=plain_env(env),
            cwd=cwd,
            user=user,
            ttl=ttl,
            metadata=dict(metadata or {}),
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

    async def info(self) -> SandboxInfo:
        return await acall(self._node.info(self.id))

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

    async def kill(self) -> None:
        """Ends all of it. Calling it again is no error; any other call then raises SandboxGone."""
        await acall(self._node.kill(self.id))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()
