"""The background commands of one sandbox: all that run, and for a while those that have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Final

from shoal.node.commands import Command

ENDED_SECONDS: Final = 600.0
ENDED_COMMANDS: Final = 1024
ENDED_BYTES: Final = 64 << 20
"""Of output that ended commands hold together. What ended first is forgotten first, by whichever bound comes first."""


class Register:
    """Finds commands by their id."""

    def __init__(self) -> None:
        self._running: dict[int, Command] = {}
        self._ended: dict[int, Command] = {}
        self._clocks: dict[int, asyncio.TimerHandle] = {}
        self._sizes: dict[int, int] = {}
        self._bytes = 0

    def add(self, command: Command) -> None:
        id = command.process.id
        self._running[id] = command
        command.process.ended.add_done_callback(lambda _: self._end(id))

    def __iter__(self) -> Iterator[Command]:
        return iter([*self._running.values(), *self._ended.values()])

    def find(self, id: int) -> Command | None:
        return self._running.get(id) or self._ended.get(id)

    def _end(self, id: int) -> None:
        command = self._running.pop(id, None)
        if command is None:
            return
        self._ended[id] = command
        self._sizes[id] = command.size  # as it was added: readers that leave make it less
        self._bytes += self._sizes[id]
        self._clocks[id] = asyncio.get_running_loop().call_later(ENDED_SECONDS, partial(self.forget, id))
        while len(self._ended) > ENDED_COMMANDS or (self._bytes > ENDED_BYTES and len(self._ended) > 1):
            self.forget(next(iter(self._ended)))

    def forget(self, id: int) -> None:
        """One that has ended."""
        if self._ended.pop(id, None) is not None:
            self._bytes -= self._sizes.pop(id)
            self._clocks.pop(id).cancel()

    def clear(self) -> None:
        """The sandbox has ended."""
        for clock in self._clocks.values():
            clock.cancel()
        self._clocks.clear()
        self._running.clear()
        self._ended.clear()
