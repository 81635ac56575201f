"""The bounded log of an audit: its order, and that nothing is missing from it unsaid."""

from __future__ import annotations

from shoal.sandbox.audit import AuditLog
from shoal.types import AuditRecord


def add(log: AuditLog, time: float, detail: str) -> None:
    log.add(time, "connect", 2, "/bin/x", detail, allowed=True)


def shown(records: list[AuditRecord]) -> list[str]:
    return [f"{record.kind} {record.detail}" for record in records]


def test_records_come_in_order_and_from_a_time_on() -> None:
    log = AuditLog(10)
    for number in range(3):
        add(log, 5.0, str(number))
    records = log.since(0)
    assert shown(records) == ["connect 0", "connect 1", "connect 2"]
    assert records[0].time < records[1].time < records[2].time
    assert log.since(records[1].time) == records[2:]
    assert log.since(records[2].time) == []


def test_what_had_to_make_room_is_counted() -> None:
    log = AuditLog(3)
    for number in range(10):
        add(log, number + 1, str(number))
    assert shown(log.since(0)) == ["dropped 7", "connect 7", "connect 8", "connect 9"]
    assert shown(log.since(8)) == ["connect 8", "connect 9"]


def test_a_gap_that_is_forgotten_still_counts() -> None:
    log = AuditLog(2)
    log.add_gap(1, 40)
    for number in range(3):
        add(log, number + 2, str(number))
    assert shown(log.since(0)) == ["dropped 41", "connect 1", "connect 2"]


def test_sources_are_asked_first() -> None:
    log = AuditLog(2)
    log.add_source(lambda: add(log, 1, "late"))
    assert shown(log.since(0)) == ["connect late"]
