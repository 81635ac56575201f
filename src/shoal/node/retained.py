"""What a background command wrote last, in order of arrival, for readers that each have a place of their own.

A byte of output is named by its offset in all that the command wrote, both streams together. The rules:

- A command waits for a reader: nothing that a reader has not asked past is thrown away, and with a channel's window of
  a stream unread (1 MiB) the command stands still when it writes. A reader that has not asked for `PATIENCE` seconds
  has gone away, and is not waited for any more. Whoever started the command counts as a reader from then on.
- Without readers the command is never held up. The last `KEEP` bytes stay for those who come later.
- What has fallen out is said: OutputLost names the offset from which on there is output.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from shoal.errors import InvalidRequest, OutputLost
from shoal.node.interface import Output

KEEP: Final = 512 << 10
"""Bytes that stay though nobody waits for them."""
PATIENCE: Final = 30.0
"""Seconds that a command waits for a reader who does not ask."""
_RUNS_KEPT: Final = 8192
_GIVEN: Final = 256 << 10
"""Bytes for one asking."""
_GIVEN_RUNS: Final = 64


class _Place:
    def __init__(self, offset: int, deadline: float) -> None:
        self.offset = offset
        self.deadline = deadline


class Retained:
    """One command's output. `grant(stream, bytes)` is called for what was thrown away: so much more may come."""

    def __init__(self, grant: Callable[[int, int], None], *, hold: bool) -> None:
        """`hold`: the reader "" is waited for without end, and nothing stays behind it."""
        self.start = 0
        """Offset of the first byte that is kept."""
        self.end = 0
        self._grant = grant
        self._hold = hold
        self._keep = 0 if hold else KEEP
        self._data = bytearray()
        # Bytes that came on one stream in a row, times two, plus 1 for stderr. Small numbers are shared objects: a
        # command that writes byte by byte to both in turn must not cost a hundred times what it wrote.
        self._runs: deque[int] = deque()
        self._ended = False
        self._arrived = asyncio.Event()
        self._clock: asyncio.TimerHandle | None = None
        self._places = {"": _Place(0, self._deadline(""))}

    def _deadline(self, reader: str) -> float:
        return math.inf if self._hold and reader == "" else time.monotonic() + PATIENCE

    def add(self, stream: int, data: bytes) -> None:
        self._data += data
        self.end += len(data)
        if self._runs and self._runs[-1] % 2 == stream - 1:
            self._runs[-1] += 2 * len(data)
        else:
            self._runs.append(2 * len(data) + stream - 1)
        self._arrived.set()
        self._trim()

    def finish(self) -> None:
        """No more will come."""
        self._ended = True
        self._arrived.set()
        if self._clock is not None:
            self._clock.cancel()

    async def read(self, reader: str, offset: int) -> list[Output]:
        """See `Node.output`."""
        if not 0 <= offset <= self.end:
            raise InvalidRequest(
                "offset", f"takes 0 to {self.end}, which is all that was written so far, not {offset!r}"
            )
        if offset < self.start:
            raise OutputLost(offset, self.start)
        place = self._places[reader] = _Place(offset, math.inf)
        self._trim()
        try:
            while offset == self.end and not self._ended:
                self._arrived.clear()
                await self._arrived.wait()
            return self._from(offset)
        finally:
            place.deadline = self._deadline(reader)

    def leave(self, reader: str) -> None:
        """That reader is not waited for."""
        if self._places.pop(reader, None) is not None:
            self._trim()

    def _from(self, offset: int) -> list[Output]:
        pieces: list[Output] = []
        at, room = self.start, _GIVEN
        with memoryview(self._data) as data:
            for run in self._runs:
                first, at = max(at, offset), at + run // 2
                last = min(at, first + room)
                if first < last:
                    pieces.append(Output(run % 2 + 1, bytes(data[first - self.start : last - self.start])))
                    room -= last - first
                if not room or len(pieces) == _GIVEN_RUNS:
                    break
        return pieces

    def _trim(self) -> None:
        """Throws away what nobody waits for and what is more than is kept."""
        now = time.monotonic()
        held = min((place.offset for place in self._places.values() if place.deadline > now), default=self.end)
        while self._runs and self.start < held:
            more = max(self.end - self.start - self._keep, 1 if len(self._runs) > _RUNS_KEPT else 0)
            run = self._runs[0]
            count = min(run // 2, more, held - self.start)
            if not count:
                break
            del self._data[:count]
            self.start += count
            if 2 * count == run - run % 2:
                self._runs.popleft()
            else:
                self._runs[0] = run - 2 * count
            self._grant(run % 2 + 1, count)
        if self.end - self.start > self._keep and held < self.end:
            self._expect_departure()

    def _expect_departure(self) -> None:
        """Looks again when the patience with a reader ends: a command that stands still wakes nobody."""
        deadline = min((place.deadline for place in self._places.values()), default=math.inf)
        if self._clock is not None:
            self._clock.cancel()
        if deadline < math.inf and not self._ended:
            left = max(deadline - time.monotonic(), 0.0) + 0.01
            self._clock = asyncio.get_running_loop().call_later(left, self._forget_departed)

    def _forget_departed(self) -> None:
        now = time.monotonic()
        self._places = {reader: place for reader, place in self._places.items() if place.deadline > now}
        self._trim()
