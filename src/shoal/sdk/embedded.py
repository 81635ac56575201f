"""The node inside this process: one event loop in a thread of its own, started by the first call.

A loop of its own keeps leases and timeouts right while the user's code blocks, and gives the blocking and the async
SDK the same engine. It ends with the process, and every sandbox with it, however the process ends.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import uvloop

from shoal.config import data_dir, run_dir
from shoal.node.environments import Builds
from shoal.node.local import LocalNode

T = TypeVar("T")

_CLOSE_SECONDS = 30.0


class Engine:
    """A node and the loop it runs on."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self.node = LocalNode(data_dir(), run_dir())
        self.builds = Builds(self.node)
        self.pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="shoal-node", daemon=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def start(self) -> None:
        self._thread.start()
        try:
            self.submit(self.node.open()).result()
        except BaseException:
            self.stop()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        with suppress(TimeoutError):
            self.submit(self.node.close()).result(_CLOSE_SECONDS)
        self.stop()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self.loop.close()


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
    """The embedded node, started if need be. SetupFailed or Unsupported where it can't run; `shoal doctor` says why."""
    return _current.get()


def close() -> None:
    """Ends the embedded node and all its sandboxes; the next call starts a new one."""
    _current.close()


def call(work: Coroutine[Any, Any, T]) -> T:
    """Runs it on the node's loop and waits. If the wait is interrupted (Ctrl-C), so is the work."""
    future = engine().submit(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def acall(work: Coroutine[Any, Any, T]) -> T:
    """The same from a running asyncio loop."""
    return await asyncio.wrap_future(engine().submit(work))
