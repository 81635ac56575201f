"""Admission of work that is hard on the disk: builds, fetches, unpacking. First come, first served, and seen.

Eight environments that are unpacked at once take longer than one after the other, and everything else on the disk
stands still meanwhile. So no more begin than the disk was measured to carry (`throughput`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec import Struct


class Waiting(Struct, frozen=True):
    """Something that is under way, or waits for its turn."""

    what: str
    since: float
    """Seconds since the epoch."""


class Queue(Struct, frozen=True):
    """A gate as it is now."""

    slots: int
    running: tuple[Waiting, ...]
    waiting: tuple[Waiting, ...]
    """In the order in which they will get their turn."""


class Gate:
    """So many at once. The same number is the resource `io_slot` of a cluster's engine."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._running: list[Waiting] = []
        self._waiting: deque[tuple[Waiting, asyncio.Future[None]]] = deque()

    def look(self) -> Queue:
        return Queue(self.slots, tuple(self._running), tuple(waiting for waiting, _ in self._waiting))

    @asynccontextmanager
    async def slot(self, what: str) -> AsyncIterator[None]:
        """Waits for a turn and holds it."""
        mine = Waiting(what, time.time())
        if len(self._running) < self.slots and not self._waiting:
            self._running.append(mine)
        else:
            await self._wait(mine)
        try:
            yield
        finally:
            self._leave(mine)

    async def _wait(self, mine: Waiting) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((mine, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(mine)  # it had just been given the turn
            else:
                self._waiting.remove((mine, turn))
            raise

    def _leave(self, mine: Waiting) -> None:
        """By identity: two may wait for the same since the same moment."""
        self._running = [each for each in self._running if each is not mine]
        while self._waiting and len(self._running) < self.slots:
            waiting, turn = self._waiting.popleft()
            if not turn.done():
                self._running.append(waiting)
                turn.set_result(None)
