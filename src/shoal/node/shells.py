"""Sessions: one shell that stays, and runs one command after the other.

The end of a command is not looked for in its output. The shell itself says it on its socket, and init hands it over
after all that was written before. A program in the session has no descriptor of that socket, cannot open it by /proc
(it is no pipe), and what another process than the shell writes there is dropped by init, by the kernel's word on who
wrote it. Each command has a random mark: what is said late, twice or about another one counts for nothing.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import signal
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final

from shoal.errors import InvalidRequest, SandboxGone, SessionClosed, ShoalError
from shoal.node.commands import VERDICTS, Kept, check
from shoal.node.dialects import INTERRUPT, Bash, Dialect, End, State, dialect, greeting, parse_end
from shoal.node.interface import CommandRequest, Output, ShellCommand, ShellEnd
from shoal.node.retained import Retained
from shoal.sandbox.channel import Exit, Process, Report, Request
from shoal.sandbox.interface import Box
from shoal.types import Limit, Result, Unclaimed

_GREETING_SECONDS: Final = 30.0
_BEGIN_SECONDS: Final = 60.0
"""For a shell to read its next command, and a second more for each 100 kB: bash reads a socket byte by byte."""
_LEAVE_SECONDS: Final = 2.0
"""For a shell to leave a command whose time is up; then the session is ended."""
_LEAVE_AGAIN: Final = 0.1
_UNCLAIMED: Final = 64 << 10
_SAID: Final = 1024


class Running:
    """One command of a session."""

    def __init__(self, request: ShellCommand, retained: Retained | None) -> None:
        self.mark = secrets.token_hex(8)
        self.kept = (Kept(request.output_limit), Kept(request.output_limit))
        self.retained = retained
        self.begun = asyncio.Event()
        self.ended: asyncio.Future[ShellEnd] = asyncio.get_running_loop().create_future()
        self.limit: Limit | None = None
        self.cpu_us = 0
        self.oom_kills = 0
        self.started = self.last_output = time.monotonic()

    def receive(self, stream: int, data: bytes) -> None:
        self.last_output = time.monotonic()
        self.kept[stream - 1].add(data)

    def finish(self, code: int | None, number: int | None, *, closed: bool) -> None:
        """`code` or the `number` of a signal."""
        if self.ended.done():
            return
        if self.limit in ("timeout", "silence"):
            code, number = None, signal.SIGKILL  # as for any command; the shell may have lived through it
        limit = self.limit
        if limit is None and code != 0 and self.oom_kills:
            limit = "memory"
        out, err = self.kept
        result = Result(
            exit_code=code,
            signal=number,
            stdout_bytes=out.value(),
            stderr_bytes=err.value(),
            stdout_total=out.total,
            stderr_total=err.total,
            truncated=out.truncated or err.truncated,
            duration=time.monotonic() - self.started,
            cpu_seconds=self.cpu_us / 1e6,
            oom_kills=self.oom_kills,
            limit=limit,
            verdict=VERDICTS[limit],
        )
        self.ended.set_result(ShellEnd(result, closed))
        self._end_output()

    def fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # nobody may be waiting
            self._end_output()

    def _end_output(self) -> None:
        self.begun.set()
        if self.retained is not None:
            self.retained.finish()


class Shell:
    """The session as the node knows it."""

    def __init__(self, process: Process) -> None:
        self.id = process.id
        self.closed: str | None = None
        """How the shell ended."""
        self._process = process
        self._dialect: Dialect = Bash()
        self._state = State()
        self._said = b""
        self._turn = asyncio.Lock()
        self._running: Running | None = None
        self._unclaimed = (Kept(_UNCLAIMED), Kept(_UNCLAIMED))
        self._leaving: asyncio.Task[None] | None = None
        process.on_report = self._hear
        process.ended.add_done_callback(self._shell_ended)

    @property
    def pid(self) -> int:
        return self._process.pid.result()

    # What comes from init

    def receive(self, stream: int, data: bytes) -> None:
        running = self._running
        if running is None:
            self._unclaimed[stream - 1].add(data)
        else:
            running.receive(stream, data)
            if running.retained is not None:
                running.retained.add(stream, data)
                return
        self._process.grant(stream, len(data))

    def _hear(self, report: Report) -> None:
        """Lines of words, of which the first is the mark of the command that runs; any other line is nothing to us."""
        running = self._running
        if running is not None and running.begun.is_set():
            running.cpu_us += report.cpu_us
            running.oom_kills += report.oom_kills
        *lines, self._said = (self._said + report.text).split(b"\n")
        self._said = self._said[:_SAID]
        for line in lines:
            self._hear_line(line.decode("ascii", "replace").split(" "))

    def _hear_line(self, words: list[str]) -> None:
        running = self._running
        if running is None or words[0] != running.mark:
            return
        if len(words) == 1:
            running.last_output = time.monotonic()
            running.begun.set()
        elif (end := parse_end(words[1:])) is not None:
            self._command_ended(running, end)

    def _command_ended(self, running: Running, end: End) -> None:
        self._running = None
        self._state = State(end.code, end.flags, interrupted=running.limit is not None)
        running.finish(end.code, None, closed=False)

    def _shell_ended(self, ended: asyncio.Future[Exit]) -> None:
        running, self._running = self._running, None
        error = None if ended.cancelled() else ended.exception()
        if error is not None:
            self.closed = str(error)
            if running is not None:
                running.fail(error if isinstance(error, ShoalError) else SessionClosed(str(error)))
            return
        end = ended.result()
        exited = os.WIFEXITED(end.status)
        code, number = (os.WEXITSTATUS(end.status), None) if exited else (None, os.WTERMSIG(end.status))
        self.closed = self.closed or (f"exit code {code}" if exited else f"signal {number}")
        if running is not None:
            running.oom_kills += end.oom_kills
            running.cpu_us += end.cpu_us
            running.finish(code, number, closed=True)

    # What callers ask

    async def greet(self, startup: str) -> None:
        """Learns which shell it is. `startup`: a file that it is to read first."""
        running = self._running = Running(ShellCommand(cmd=""), None)
        greeted = asyncio.Event()
        version = ""

        def hear(report: Report) -> None:
            nonlocal version
            words = report.text.decode("ascii", "replace").split()
            if len(words) == 3 and words[0] == running.mark:
                version = words[2]
                greeted.set()

        self._process.on_report = hear
        await self._process.send_input(greeting(running.mark).encode())
        running.ended.add_done_callback(lambda _: greeted.set())
        try:
            async with asyncio.timeout(_GREETING_SECONDS):
                await greeted.wait()
        except TimeoutError:
            self._kill("it did not answer")
        finally:
            self._running = None
            self._process.on_report = self._hear
        if running.ended.done() or self.closed:
            raise self._closed_error()
        self._dialect = dialect(version)
        if startup:
            await self.run(ShellCommand(cmd=f'BASH_ENV={shlex.quote(startup)};. "$BASH_ENV"'))
        self.take_unclaimed()

    async def run(self, request: ShellCommand) -> ShellEnd:
        """If the caller gives up, the command is ended as if its time was up."""
        _check(request)
        async with self._turn:
            return await self._finish(await self._begin(request, None))

    async def stream(self, request: ShellCommand) -> AsyncIterator[Output | ShellEnd]:
        """See `Node.stream_in_shell`."""
        _check(request)
        async with self._turn:
            retained = Retained(self._process.grant, hold=True)
            running = await self._begin(request, retained)
            offset = 0
            try:
                while pieces := await retained.read("", offset):
                    for piece in pieces:
                        offset += len(piece.data)
                        yield piece
                end = await asyncio.shield(running.ended)
            finally:
                retained.leave("")
                if not running.ended.done():
                    await self._abandon(running)
            yield end

    async def close(self) -> None:
        """See `Node.close_shell`."""
        self._kill("it was closed")
        with suppress(ShoalError):
            await asyncio.shield(self._process.ended)

    def take_unclaimed(self) -> Unclaimed:
        out, err = self._unclaimed
        self._unclaimed = (Kept(_UNCLAIMED), Kept(_UNCLAIMED))
        return Unclaimed(out.value(), err.value(), out.total, err.total)

    # One command

    async def _begin(self, request: ShellCommand, retained: Retained | None) -> Running:
        if self.closed is not None:
            raise self._closed_error()
        running = self._running = Running(request, retained)
        text = self._dialect.command(request.cmd, running.mark, self._state).encode("utf-8", "surrogateescape")
        clocks = asyncio.get_running_loop().create_task(self._watch(running, request, len(text)))
        running.ended.add_done_callback(lambda _: clocks.cancel())
        sending = asyncio.get_running_loop().create_task(self._process.send_input(text))
        running.ended.add_done_callback(lambda _: sending.cancel())
        return running

    async def _finish(self, running: Running) -> ShellEnd:
        try:
            return await asyncio.shield(running.ended)
        except asyncio.CancelledError:
            await self._abandon(running)
            raise

    async def _abandon(self, running: Running) -> None:
        """Nobody wants its result: the next command must not wait for it."""
        if running.limit is None:
            running.limit = "timeout"
            self._leave(running)
        with suppress(ShoalError):
            await asyncio.shield(running.ended)

    async def _watch(self, running: Running, request: ShellCommand, size: int) -> None:
        """Its clocks. They run from when it is sent, and silence from when it has begun."""
        sent = time.monotonic()
        deadline = sent + request.timeout if request.timeout is not None else None
        most = sent + _BEGIN_SECONDS + size / 100_000
        try:
            async with asyncio.timeout_at(_loop_time(min(most, deadline or most))):
                await running.begun.wait()
        except TimeoutError:
            if deadline is None or deadline > most:
                self._kill("it does not read what it is sent")
                running.fail(self._closed_error())
                return
        while True:
            now = time.monotonic()
            quiet = running.last_output + request.silence if request.silence is not None else None
            limit: Limit = "timeout" if quiet is None or (deadline is not None and deadline <= quiet) else "silence"
            at = deadline if limit == "timeout" else quiet
            if at is None:
                return
            if at <= now:
                running.limit = limit
                self._leave(running)
                return
            await asyncio.sleep(at - now)

    def _leave(self, running: Running) -> None:
        self._leaving = asyncio.get_running_loop().create_task(self._force(running))

    async def _force(self, running: Running) -> None:
        """Out of the command, if the shell can do that; else the session ends."""
        end = time.monotonic() + (_LEAVE_SECONDS if isinstance(self._dialect, Bash) and running.begun.is_set() else 0)
        while time.monotonic() < end:
            self._process.interrupt(INTERRUPT)
            await asyncio.wait([running.ended], timeout=_LEAVE_AGAIN)
            if running.ended.done():
                return
        self._kill("a command that had to be ended could not be left")

    def _kill(self, reason: str) -> None:
        self.closed = self.closed or reason
        self._process.kill(signal.SIGKILL, tree=True)

    def _closed_error(self) -> Exception:
        ended = self._process.ended
        if ended.done() and not ended.cancelled() and isinstance(error := ended.exception(), SandboxGone):
            return error
        return SessionClosed(self.closed or "it could not be started")


async def open_shell(box: Box, request: Request, startup: str) -> Shell:
    """Starts a session. What a command would be refused for, it is refused for; SessionClosed if it ends at once."""
    shell: Shell | None = None

    def receive(stream: int, data: bytes) -> None:
        assert shell is not None
        shell.receive(stream, data)

    process = box.start(request, receive, auto_credit=False)
    shell = Shell(process)
    try:
        await asyncio.shield(process.pid)
        await shell.greet(startup)
    except BaseException:
        process.kill(signal.SIGKILL, tree=True)
        raise
    return shell


def _check(request: ShellCommand) -> None:
    if not isinstance(request.cmd, str):
        raise InvalidRequest("cmd", f"of a session is text for its shell, not {request.cmd!r}")
    check(
        CommandRequest(
            cmd=request.cmd or ":",
            timeout=request.timeout,
            silence=request.silence,
            output_limit=request.output_limit,
        )
    )


def _loop_time(moment: float) -> float:
    """A time of `time.monotonic` as the running loop counts it."""
    return asyncio.get_running_loop().time() + moment - time.monotonic()
