"""One command from the node's side: its output within a limit, its clocks, and the result made of all that."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from shoal.errors import InvalidRequest
from shoal.node.interface import CommandRequest
from shoal.node.retained import Retained
from shoal.sandbox.channel import Exit, Process, Request
from shoal.sandbox.interface import Box
from shoal.types import CommandInfo, Limit, Result, Verdict

_MARK_ROOM: Final = 64
_JOIN_MAX: Final = 2048
_SHOWN: Final = 1000
_SECONDS_MAX: Final = 1e9
_FULL: Final = 64 << 10
"""Who writes in large pieces stops short of the last byte."""


class Kept:
    """Head and tail of a stream within `limit` bytes; what is between is counted and named in a line."""

    def __init__(self, limit: int) -> None:
        self.total = 0
        self._limit = limit
        self._head = bytearray()
        self._head_room = limit // 2
        self._most = limit - self._head_room
        self._tail: deque[bytes] = deque()
        """Pieces as they came, so that gigabytes pass without a copy."""
        self._held = 0
        self._small = bytearray()
        """Small ones, to be joined: a command that writes byte by byte must not cost fifty times its limit."""

    @property
    def truncated(self) -> bool:
        return self.total > self._limit

    @property
    def size(self) -> int:
        """Bytes held, at the most."""
        return min(self.total, 2 * self._limit)

    def add(self, data: bytes) -> None:
        self.total += len(data)
        if room := self._head_room - len(self._head):
            self._head += data[:room]
            data = data[room:]
        if len(data) < _JOIN_MAX:
            self._small += data
            if len(self._small) >= _JOIN_MAX:
                self._join()
        else:
            self._join()
            self._append(data)

    def _join(self) -> None:
        if self._small:
            self._append(bytes(self._small))
            self._small.clear()

    def _append(self, data: bytes) -> None:
        self._tail.append(data[-self._most :])
        self._held += len(self._tail[-1])
        while self._held - len(self._tail[0]) >= self._most:
            self._held -= len(self._tail.popleft())

    def value(self) -> bytes:
        tail = b"".join((*self._tail, self._small))
        if not self.truncated:
            return bytes(self._head) + tail
        room = max(self._limit - self._head_room - _MARK_ROOM, 0)
        tail = tail[len(tail) - room :]
        missing = self.total - len(self._head) - len(tail)
        mark = f"\n[... {missing} bytes left out ...]\n".encode()
        return (bytes(self._head) + mark + tail)[: self._limit]


class Command:
    """A command. With `streamed` its output can be read while it comes, by the rules of `node.retained`."""

    def __init__(self, request: CommandRequest, *, streamed: bool, output: int | None = None) -> None:
        """`output`: bytes that it may write in all; None for any number."""
        self._request = request
        self._output = output
        self._kept = (Kept(request.output_limit), Kept(request.output_limit))
        self._retained = Retained(self._grant, hold=request.hold) if streamed else None
        self._begun = time.time()
        self._limit: Limit | None = None
        self._last_output = 0.0
        self._clocks: list[asyncio.TimerHandle] = []
        self._process: Process | None = None
        self._box: Box | None = None

    def start(self, box: Box, request: Request) -> None:
        """Asks init for it. SandboxGone if the sandbox has ended."""
        loop = asyncio.get_running_loop()
        self._box = box
        self._process = process = box.start(request, self._receive, auto_credit=self._retained is None)
        self._last_output = time.monotonic()
        if self._request.timeout is not None:
            self._clocks.append(loop.call_later(self._request.timeout, self._stop, "timeout"))
        if self._request.silence is not None:
            self._clocks.append(loop.call_later(self._request.silence, self._check_silence))
        process.ended.add_done_callback(self._finished)

    @property
    def process(self) -> Process:
        assert self._process is not None
        return self._process

    def _receive(self, stream: int, data: bytes) -> None:
        self._last_output = time.monotonic()
        self._kept[stream - 1].add(data)
        if self._output is not None and self._kept[0].total + self._kept[1].total > self._output:
            self._stop("output")
        if self._retained is not None:
            self._retained.add(stream, data)

    def _grant(self, stream: int, count: int) -> None:
        self.process.grant(stream, count)

    def _finished(self, _: object) -> None:
        for clock in self._clocks:
            clock.cancel()
        if self._retained is not None:
            self._retained.finish()

    def _stop(self, limit: Limit) -> None:
        """Once; the first limit stands."""
        if self._limit is None:
            self._limit = limit
            self.process.kill(signal.SIGKILL, tree=True)

    def _check_silence(self) -> None:
        assert self._request.silence is not None
        left = self._last_output + self._request.silence - time.monotonic()
        if left <= 0:
            self._stop("silence")
        else:
            self._clocks[-1] = asyncio.get_running_loop().call_later(left, self._check_silence)

    @property
    def held(self) -> bool:
        """It belongs to the one who started it, and is nobody else's to find."""
        return self._request.hold

    @property
    def retained(self) -> Retained:
        assert self._retained is not None
        return self._retained

    @property
    def size(self) -> int:
        """Bytes of output that are held for it."""
        kept, retained = sum(kept.size for kept in self._kept), self._retained
        return kept + (retained.end - retained.start if retained is not None else 0)

    def info(self) -> CommandInfo:
        """Of one that was started in the background."""
        return CommandInfo(
            id=self.process.id,
            pid=self.process.pid.result(),
            cmd=_shown(self._request.cmd),
            started=self._begun,
            running=not self.process.ended.done(),
            written=self.retained.end,
            available=self.retained.start,
        )

    async def wait(self, changes: Callable[[], Awaitable[dict[str, int]]] | None = None) -> Result:
        end = await asyncio.shield(self.process.ended)
        return self._result(end, await changes() if changes else None)

    def _result(self, end: Exit, changes: dict[str, int] | None) -> Result:
        out, err = self._kept
        exited = os.WIFEXITED(end.status)
        failed = not exited or os.WEXITSTATUS(end.status) != 0
        # With background children a command may end by itself in the moment its time is up.
        limit = (self._limit or self._blame(end)) if failed else None
        return Result(
            exit_code=os.WEXITSTATUS(end.status) if exited else None,
            signal=None if exited else os.WTERMSIG(end.status),
            stdout_bytes=out.value(),
            stderr_bytes=err.value(),
            stdout_total=out.total,
            stderr_total=err.total,
            truncated=out.truncated or err.truncated,
            duration=end.duration_ns / 1e9,
            cpu_seconds=end.cpu_us / 1e6,
            peak_memory=end.peak_memory,
            oom_kills=end.oom_kills,
            limit=limit,
            changes=changes,
            verdict=VERDICTS[limit],
        )

    def _blame(self, end: Exit) -> Limit | None:
        """Of one that failed by itself: what the kernel refused it. That of the disk is a judgement: none is left."""
        if end.oom_kills:
            return "memory"
        if end.refused:
            return "processes"
        return "disk" if self._box is not None and _is_full(self._box.upper) else None


def _is_full(upper: int) -> bool:
    """No room for one more file, or for more than a few pages."""
    try:
        usage = os.fstatvfs(upper)
    except OSError:  # the sandbox has just ended
        return False
    return usage.f_favail == 0 or usage.f_bavail * usage.f_frsize < _FULL


def _shown(cmd: str | Sequence[str]) -> tuple[str, ...]:
    """What there is room for of a command line."""
    shown, room = [], _SHOWN
    for part in [cmd] if isinstance(cmd, str) else cmd:
        if room <= 0:
            break
        shown.append(part[:room])
        room -= len(part) + 1
    return tuple(shown)


VERDICTS: Final[dict[Limit | None, Verdict]] = {
    None: "ok",
    "timeout": "policy_timeout",
    "silence": "policy_timeout",
    "memory": "policy_oom",
    "processes": "policy_limit",
    "disk": "policy_limit",
    "output": "policy_limit",
}


def check(request: CommandRequest) -> None:
    """InvalidRequest with the field, for what can be known before it is started."""
    if not request.cmd:
        raise InvalidRequest("cmd", "is empty")
    for part in [request.cmd] if isinstance(request.cmd, str) else request.cmd:
        if not _is_argument(part):
            raise InvalidRequest("cmd", f"takes text without NUL bytes, or a list of such, not {part!r}")
    for field in ("timeout", "silence"):
        check_seconds(field, getattr(request, field))
    if request.output_limit < 1024:
        raise InvalidRequest("output_limit", "takes 1024 bytes or more")
    if request.cwd is not None and not _is_argument(request.cwd):
        raise InvalidRequest("cwd", f"takes text without NUL bytes, not {request.cwd!r}")
    check_env(request.env)


def check_seconds(field: str, value: object) -> None:
    """InvalidRequest unless it is a time that a clock can be set to, or None."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < _SECONDS_MAX
    if value is not None and not good:
        raise InvalidRequest(field, f"takes seconds above 0, or None for no limit, not {value!r}")


def check_env(env: object) -> None:
    """InvalidRequest unless it maps names to texts as the kernel can hand them over."""
    if not hasattr(env, "items"):
        raise InvalidRequest("env", f"maps names to texts; {env!r} does not")
    for name, value in env.items():
        if not _is_argument(name) or not name or "=" in name:
            raise InvalidRequest("env", f"{name!r} is no name of a variable")
        if not _is_argument(value):
            raise InvalidRequest("env", f"the value of {name} is text without NUL bytes, not {value!r}")


def _is_argument(value: object) -> bool:
    """Text that has bytes; the surrogates of `os.fsdecode` stand for those that are not UTF-8."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True
