"""Commands of a sandbox. `sync_commands.py` is generated from this file; change it here and run `make sync`."""

from __future__ import annotations

import secrets
import signal as signals
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Literal, overload

from msgspec.structs import replace

from shoal.errors import CommandFailed
from shoal.node.interface import CommandRequest, Node, Output
from shoal.sdk.embedded import acall
from shoal.sdk.requests import plain_env
from shoal.sdk.streams import TextStreams, Writer, to_bytes
from shoal.types import CommandInfo, Result, parse_size

CommandInfos = list[CommandInfo]
"""An alias, since a class below has a method `list`."""


class AsyncCommand:
    """A command that runs in the background, or did so not long ago.

    Its output is named by offsets: bytes of all that it wrote, both streams together in the order in which they came.
    Several handles read independently. With 1 MiB of a stream unread the command waits for a reader who is slow, but no
    more than 30 seconds between two of its steps; from the start it waits as long for the first one. When nobody reads,
    the last 512 KiB stay for who comes later. What has fallen out raises OutputLost: at `available` reading can go on.
    """

    def __init__(self, node: Node, sandbox: str, id: int, pid: int, offset: int = 0, reader: str = "") -> None:
        self.id = id
        self.pid = pid
        """Inside the sandbox."""
        self.offset = offset
        """Where the next iteration starts: the output up to here has been given."""
        self._node = node
        self._sandbox = sandbox
        self._reader = reader
        self._result: Result | None = None

    async def wait(self, check: bool = False) -> Result:
        """Its end. Who waits does not read: the command goes on, and the result has head and tail of what it wrote, up
        to the limit it was started with. Results stay for 10 minutes, those of the last 1,024 commands, while all that
        these wrote and that is kept is within 64 MiB; then NotFound."""
        if self._result is None:
            self._result = await acall(self._node.wait(self._sandbox, self.id, self._reader))
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
        """Its output from `offset` on as it comes, to its end. OutputLost if that is not kept any more."""
        while pieces := await acall(self._node.output(self._sandbox, self.id, self.offset, self._reader)):
            for piece in pieces:
                self.offset += len(piece.data)
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
        comes. `background=True` returns a handle at once; its stdin stays open until `close_stdin`, unless `stdin` is
        given. `check=True` raises CommandFailed.
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

    async def list(self) -> CommandInfos:
        """Background commands and terminals, running or ended not long ago (see `Command.wait`); not sessions."""
        return await acall(self._node.list_commands(self._sandbox))

    async def connect(self, id: int, offset: int = 0) -> AsyncCommand:
        """Another handle on a background command, from any thread; its output is read from `offset` on.

        NotFound if there is none of that id, or none any more."""
        info = await acall(self._node.find_command(self._sandbox, id))
        return AsyncCommand(self._node, self._sandbox, info.id, info.pid, offset, secrets.token_hex(8))

    async def start(self, request: CommandRequest) -> AsyncCommand:
        """A command by its whole request; what `run(background=True)` and terminals are made of."""
        id, pid = await acall(
            self._node.start(self._sandbox, request),
            undo=lambda started: self._node.signal(self._sandbox, started[0], signals.SIGKILL),
        )
        return AsyncCommand(self._node, self._sandbox, id, pid)

    async def _stream(self, request: CommandRequest, on_stdout: Writer | None, on_stderr: Writer | None) -> Result:
        command = await self.start(replace(request, hold=True))
        decoders = TextStreams(on_stdout, on_stderr)
        try:
            async for piece in command:
                decoders.write(piece)
            decoders.finish()
            return await command.wait()
        except BaseException:
            await command.kill()
            raise
