"""What is written down of a sandbox: the newest records, and how many are missing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from shoal.types import AuditRecord

_STEP = 1e-6
"""Seconds that a record is later than the one before it at the least, so that `since` can tell them apart."""
DROPPED = "dropped"


class AuditLog:
    """Bounded, in the order in which things were told."""

    def __init__(self, most: int) -> None:
        self._records: deque[AuditRecord] = deque(maxlen=most)
        self._last = 0.0
        self._forgotten = 0
        """Records that had to make room."""
        self._forgotten_at = 0.0
        self._sources: list[Callable[[], None]] = []

    def add_source(self, drain: Callable[[], None]) -> None:
        """`drain` adds what has come and was not taken yet; called before records are read."""
        self._sources.append(drain)

    def add(self, time: float, kind: str, pid: int, program: str, detail: str, *, allowed: bool) -> None:
        if len(self._records) == self._records.maxlen:
            self._forget(self._records[0])
        self._last = max(time, self._last + _STEP)
        self._records.append(AuditRecord(self._last, kind, pid, program, detail, allowed))

    def add_gap(self, time: float, count: int) -> None:
        """So many were not even told."""
        self.add(time, DROPPED, 0, "", str(count), allowed=True)

    def _forget(self, record: AuditRecord) -> None:
        self._forgotten += int(record.detail) if record.kind == DROPPED else 1
        self._forgotten_at = record.time

    def since(self, time: float) -> list[AuditRecord]:
        """Those later than this. If some of them are gone, the first one says how many were ever forgotten."""
        for drain in self._sources:
            drain()
        found = [record for record in self._records if record.time > time]
        if self._forgotten_at > time:
            gap = AuditRecord(self._forgotten_at, DROPPED, 0, "", str(self._forgotten), True)
            return [gap, *found]
        return found
