"""Commands of the fake tier: child processes whose streams follow the same rules as those of a sandbox."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from shoal.sandbox.channel import WINDOW, Exit, Flag, Process, Request
from shoal.sandbox.frame import DATA_MAX

_MAXRSS_UNIT: Final = {"darwin": 1}.get(sys.platform, 1024)


class CommandRun:
    """A child process in a process group of its own. What leaves the group is out of reach."""

    def __init__(self, request: Request, cwd: Path, env: Mapping[str, str], process: Process) -> None:
        """OSError if it cannot be started."""
        self._loop = asyncio.get_running_loop()
        self.dead: asyncio.Future[None] = self._loop.create_future()
        self._process = process
        self._end: Exit | None = None
        self._started = time.monotonic_ns()
        self._child, write, first, second = _spawn(list(map(os.fsdecode, request.argv)), cwd, env)
        self.group = self._child.pid
        self._out = [Stream(first, 1, process, self._conclude), Stream(second, 2, process, self._conclude)]
        self._in = Feed(write, process)
        if not request.flags & Flag.STDIN:
            self._in.finish()
        process.pid.set_result(self.group)
        threading.Thread(target=self._wait, name="shoal-fake", daemon=True).start()

    def _wait(self) -> None:
        """A thread, since no way to hear of a child's death is to be had on every system and on any loop."""
        _, status, usage = os.wait4(self._child.pid, 0)
        self._child.returncode = os.waitstatus_to_exitcode(status)
        cpu = round((usage.ru_utime + usage.ru_stime) * 1e6)
        duration = time.monotonic_ns() - self._started
        end = Exit(status, 0, duration, cpu, usage.ru_maxrss * _MAXRSS_UNIT)
        with suppress(RuntimeError):  # the node has ended
            self._loop.call_soon_threadsafe(self._exited, end)

    def _exited(self, end: Exit) -> None:
        self._end = end
        self.dead.set_result(None)
        self._in.close()
        for stream in self._out:
            stream.bound()
        self._conclude()

    def _conclude(self) -> None:
        """The end is told once all that the command itself had written was taken."""
        if self._end is None or self._process.ended.done() or not all(stream.drained for stream in self._out):
            return
        self._process.finish(self._end)
        for stream in self._out:
            stream.discard()

    def input(self, data: bytes) -> None:
        self._in.add(data)

    def close_input(self) -> None:
        self._in.finish()

    def credit(self, stream: int, count: int) -> None:
        self._out[stream - 1].grant(count)

    def kill(self, signal: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.group, signal)

    def lives(self) -> bool:
        """Whether it, or a child that it left in its group, may still be there."""
        if not self.dead.done():
            return True
        try:
            os.killpg(self.group, 0)
        except (ProcessLookupError, PermissionError):  # gone, or the number is another user's by now
            return False
        return True

    def close(self) -> None:
        self._in.close()
        for stream in self._out:
            stream.close()


def _spawn(argv: list[str], cwd: Path, env: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], int, int, int]:
    """The child and our ends of its three streams."""
    (stdin, write), (first, stdout), (second, stderr) = (os.pipe() for _ in range(3))
    try:
        child = subprocess.Popen(
            argv, stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd, env=env, start_new_session=True
        )
    except BaseException:
        for descriptor in (write, first, second):
            os.close(descriptor)
        raise
    finally:
        for descriptor in (stdin, stdout, stderr):
            os.close(descriptor)
    return child, write, first, second


class Stream:
    """An output of a command: read as far as there is credit, and thrown away once its end was told."""

    def __init__(self, descriptor: int, number: int, process: Process, on_change: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = descriptor
        self._number = number
        self._process = process
        self._on_change = on_change
        self._credit = WINDOW
        self._left: int | None = None
        """Bytes until the end of what the command itself wrote, once it has ended."""
        self._discarding = False
        self._watched = False
        os.set_blocking(descriptor, False)
        self._watch()

    @property
    def drained(self) -> bool:
        return self._descriptor < 0 or self._left == 0

    @property
    def _room(self) -> int:
        """Bytes that may be read now."""
        if self._discarding:
            return DATA_MAX
        return min(DATA_MAX, self._credit, DATA_MAX if self._left is None else self._left)

    def _watch(self) -> None:
        wanted = self._descriptor >= 0 and self._room > 0
        if wanted and not self._watched:
            self._loop.add_reader(self._descriptor, self._readable)
        elif self._watched and not wanted:
            self._loop.remove_reader(self._descriptor)
        self._watched = wanted

    def _readable(self) -> None:
        try:
            data = os.read(self._descriptor, self._room)
        except BlockingIOError:
            return
        if not data:
            self.close()
        elif not self._discarding:
            self._credit -= len(data)
            if self._left is not None:
                self._left -= len(data)
            self._process.take_output(self._number, data)
        self._watch()
        self._on_change()

    def grant(self, count: int) -> None:
        self._credit += count
        self._watch()

    def bound(self) -> None:
        """The command has ended: what is in the pipe now is the last of its own."""
        if self._descriptor >= 0:
            size = fcntl.ioctl(self._descriptor, termios.FIONREAD, b"\0" * 4)
            self._left = int.from_bytes(size, sys.byteorder)
            self._watch()

    def discard(self) -> None:
        """Children that hold the pipe live on: what they write is taken, so that writing does not end them."""
        self._discarding = True
        self._watch()

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            if self._watched:
                self._loop.remove_reader(descriptor)
                self._watched = False
            os.close(descriptor)


class Feed:
    """The input of a command."""

    def __init__(self, descriptor: int, process: Process) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = descriptor
        self._process = process
        self._waiting = bytearray()
        self._finished = False
        self._watched = False
        os.set_blocking(descriptor, False)

    def add(self, data: bytes) -> None:
        self._waiting += data
        self._write()

    def finish(self) -> None:
        """EOF, after what waits."""
        self._finished = True
        self._write()

    def _write(self) -> None:
        try:
            while self._waiting and self._descriptor >= 0:
                self._take(os.write(self._descriptor, self._waiting))
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.close()
        if self._descriptor < 0:
            self._take(len(self._waiting))  # it closed its stdin: lost, as in any pipe
        elif self._finished and not self._waiting:
            self.close()
        elif self._waiting and not self._watched:
            self._loop.add_writer(self._descriptor, self._write)
            self._watched = True
        elif self._watched and not self._waiting:
            self._unwatch()

    def _take(self, count: int) -> None:
        if count:
            del self._waiting[:count]
            self._process.take_consumed(count)

    def _unwatch(self) -> None:
        self._loop.remove_writer(self._descriptor)
        self._watched = False

    def close(self) -> None:
        if self._descriptor >= 0:
            if self._watched:
                self._unwatch()
            os.close(self._descriptor)
            self._descriptor = -1
