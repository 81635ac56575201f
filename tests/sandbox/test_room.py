from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import InvalidRequest, Unsupported
from shoal.sandbox import disk
from shoal.sandbox.room import Rooms
from shoal.types import GiB, Profile


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rooms:
    """Of a machine with 16 GiB of memory and 100 GiB free on disk."""
    monkeypatch.setattr(disk, "missing", lambda: None)
    monkeypatch.setattr(disk, "free", lambda _folder: 100 * GiB)
    return Rooms(tmp_path, memory=16 * GiB)


@pytest.mark.parametrize(
    ("asked", "upper", "given"),
    [
        (1, "memory", 1),
        (8, "memory", 8),
        (9, "memory", 8),
        (16, "memory", 8),
        (17, "disk", 17),
        (100, "disk", 100),
        (500, "disk", 100),
    ],
)
def test_auto(rooms: Rooms, asked: int, upper: str, given: int) -> None:
    settled = rooms.settle(Profile(disk=asked * GiB))
    assert (settled.upper, settled.disk) == (upper, given * GiB)


def test_auto_gives_memory_where_there_is_no_disk_to_give(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "free", lambda _folder: 5 * GiB)
    assert rooms.settle(Profile(disk=500 * GiB)).disk == 8 * GiB
    monkeypatch.setattr(disk, "missing", lambda: "loop devices")
    settled = rooms.settle(Profile(disk=500 * GiB))
    assert (settled.upper, settled.disk) == ("memory", 8 * GiB)


def test_who_insists_gets_all_or_an_error(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rooms.settle(Profile(disk=15 * GiB, upper="memory")).disk == 15 * GiB
    assert rooms.settle(Profile(disk=500 * GiB, upper="disk")).disk == 500 * GiB
    with pytest.raises(InvalidRequest, match="disk"):
        rooms.settle(Profile(disk=17 * GiB, upper="memory"))
    monkeypatch.setattr(disk, "missing", lambda: "mke2fs: install e2fsprogs")
    with pytest.raises(Unsupported, match="e2fsprogs"):
        rooms.settle(Profile(disk=1 * GiB, upper="disk"))
