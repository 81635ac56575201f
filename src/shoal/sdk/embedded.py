"""The node inside this process: one event loop in a thread of its own, started by the first call.

A loop of its own keeps leases and timeouts right while the user's code blocks, and gives the blocking and the async
SDK the same engine. It ends with the process, and every sandbox with it, however the process ends.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

import uvloop

from shoal.config import data_dir, run_dir
from shoal.node.environments import Builds
from shoal.node.local import LocalNode

T = TypeVar("T")

_CLOSE_SECONDS = 30.0


Undo = Callable[[T], Coroutine[Any, Any, None]]
"""What is done with a result that nobody waits for any more: a sandbox that was made all the same is ended."""


class Call(Generic[T]):
    """Work handed to the node's loop. `done` is called there when it has ended."""

    def __init__(
        self, work: Coroutine[Any, Any, T], done: Callable[[asyncio.Task[T]], object], undo: Undo[T] | None
    ) -> None:
        self._work = work
        self._done = done
        self._undo = undo
        self._task: asyncio.Task[T] | None = None
        self._abandoned = False
        self._undoing: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._abandoned:
            self._work.close()
            return
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(self._done)

    def abandon(self) -> None:
        """On the loop: nobody waits for it any more. That may be said before it was begun."""
        self._abandoned = True
        if self._task is None:
            return
        self._task.cancel()
        self._task.add_done_callback(self._take_back)

    def _take_back(self, task: asyncio.Task[T]) -> None:
        if self._undo is not None and not task.cancelled() and task.exception() is None:
            self._undoing = asyncio.get_running_loop().create_task(self._undo(task.result()))

    def result(self) -> T:
        assert self._task is not None
        return self._task.result()


class Inbox:
    """Calls from other threads, waiting for the loop's.

    The wake-up is a byte on a Unix socket: unlike an eventfd's, its reader is woken on the processor of the writer, who
    is about to sleep, and no other one has to be roused. 110 us less for each call after a pause of 20 ms.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[Call[Any]] = deque()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)

    def open(self) -> None:
        """On the loop's thread."""
        self._loop.add_reader(self._reader.fileno(), self._take)

    def put(self, call: Call[Any]) -> None:
        self._calls.append(call)
        self._writer.send(b"c")

    def abandon(self, call: Call[Any]) -> None:
        """Ends the work; `done` is called all the same."""
        self._loop.call_soon_threadsafe(call.abandon)

    def _take(self) -> None:
        with suppress(BlockingIOError):
            self._reader.recv(4096)
        while self._calls:
            self._calls.popleft().start()

    def close(self) -> None:
        self._loop.remove_reader(self._reader.fileno())
        self._reader.close()
        self._writer.close()


class Bell:
    """Wakes one caller: a byte on a Unix socket again."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()

    def ring(self) -> None:
        with suppress(OSError):  # closed: the caller has given up
            self._far.send(b"d")

    def wait(self) -> None:
        self._near.recv(1)

    def close(self) -> None:
        self._near.close()
        self._far.close()


class Engine:
    """A node and the loop it runs on."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self.inbox = Inbox(self.loop)
        self.node = LocalNode(data_dir(), run_dir())
        self.builds = Builds(self.node)
        self.pid = os.getpid()
        self._bells: list[Bell] = []
        """Of callers that have their answer, for the next ones."""
        self._thread = threading.Thread(target=self._run, name="shoal-node", daemon=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.inbox.open()
        self.loop.run_forever()

    def start(self) -> None:
        self._thread.start()
        try:
            self.call(self.node.open())
        except BaseException:
            self.stop()
            raise

    def call(self, work: Coroutine[Any, Any, T], undo: Undo[T] | None = None) -> T:
        """Runs it on the loop and waits, from any other thread. If the wait is interrupted (Ctrl-C), so is the work."""
        bell = self._take_bell()
        call = Call(work, lambda _: bell.ring(), undo)
        self.inbox.put(call)
        try:
            bell.wait()
        except BaseException:
            bell.close()  # its ring is still to come, and for nobody
            self.inbox.abandon(call)
            raise
        self._bells.append(bell)
        return call.result()

    def _take_bell(self) -> Bell:
        try:
            return self._bells.pop()
        except IndexError:
            return Bell()

    async def acall(self, work: Coroutine[Any, Any, T], undo: Undo[T] | None = None) -> T:
        """The same from another loop, without blocking it."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        call = Call(work, lambda _: _tell(loop, ended), undo)
        self.inbox.put(call)
        try:
            await ended
        except asyncio.CancelledError:
            self.inbox.abandon(call)
            raise
        return call.result()

    def close(self) -> None:
        self.call(_within(_CLOSE_SECONDS, self.node.close()))
        self.stop()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            for bell in self._bells:
                bell.close()
            self.inbox.close()
            self.loop.close()


def _tell(loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
    with suppress(RuntimeError):  # the caller's loop has closed meanwhile
        loop.call_soon_threadsafe(_settle, ended)


def _settle(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


async def _within(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work


class _Current:
    """The engine of this process. There is one, because limits and id ranges are a machine's and not a caller's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engine: Engine | None = None

    def get(self) -> Engine:
        with self._lock:
            if self._engine is None or self._engine.pid != os.getpid():
                engine = Engine()
                engine.start()
                self._engine = engine
                atexit.register(self.close)
                os.register_at_fork(after_in_child=engine.node.forsake)
        return self._engine

    def close(self) -> None:
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None and engine.pid == os.getpid():
            engine.close()


_current = _Current()


def engine() -> Engine:
    """The embedded node, started if need be. Its tiers start with the first sandbox of each."""
    return _current.get()


def close() -> None:
    """Ends the embedded node and all its sandboxes; the next call starts a new one."""
    _current.close()


def call(work: Coroutine[Any, Any, T], undo: Undo[T] | None = None) -> T:
    """Runs it on the node's loop and waits. If the wait is interrupted (Ctrl-C), so is the work.

    `undo`: for what the work had made by then."""
    return engine().call(work, undo)


async def acall(work: Coroutine[Any, Any, T], undo: Undo[T] | None = None) -> T:
    """The same from a running asyncio loop."""
    return await engine().acall(work, undo)
