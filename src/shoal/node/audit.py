"""What is written down of one sandbox: the latest records, and how many had to go."""

from __future__ import annotations

import time
from collections import deque

from shoal.errors import InvalidRequest, Unsupported
from shoal.sandbox.fanotify import Opened
from shoal.types import Audit, AuditRecord


class AuditLog:
    """Bounded. `dropped` counts what is not there: records that made room, and events that the kernel had to drop."""

    def __init__(self, limit: int) -> None:
        self.records: deque[AuditRecord] = deque(maxlen=limit)
        self.dropped = 0

    def add(self, record: AuditRecord) -> None:
        self.dropped += len(self.records) == self.records.maxlen
        self.records.append(record)

    def lose(self) -> None:
        """Some, nobody knows how many, were lost on the way here."""
        self.dropped += 1

    def opened(self, event: Opened) -> None:
        detail = f"{'execute' if event.executed else 'open'} {event.path}"
        self.add(
            AuditRecord(time=event.time, kind="file", pid=event.pid, program=event.program, detail=detail, allowed=True)
        )

    def refused(self, program: str, why: str) -> None:
        """A command that could not be started."""
        self.add(AuditRecord(time=time.time(), kind="denied", pid=0, program=program, detail=why, allowed=False))


def check_audit(audit: Audit | None) -> Audit:
    """What was asked for, by default no more than refusals. InvalidRequest names the field."""
    if audit is None:
        return Audit()
    if not isinstance(audit, Audit):
        raise InvalidRequest("audit", f"takes an Audit, not {audit!r}")
    if isinstance(audit.limit, bool) or not isinstance(audit.limit, int) or not 0 < audit.limit <= 1_000_000:
        raise InvalidRequest("audit.limit", f"takes 1 to 1,000,000 records, not {audit.limit!r}")
    if audit.syscalls:
        raise Unsupported("audit.syscalls: system calls are not in this version")
    return audit
