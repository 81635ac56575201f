from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.errors import CapacityError
from shoal.sandbox import slots
from shoal.sandbox.slots import BLOCK, FIRST, IDS, Slots

TAKE = """
import sys
from pathlib import Path
from shoal.sandbox.slots import Slots
slots = Slots(Path(sys.argv[1]))
print(*(slots.take() for _ in range(int(sys.argv[2]))), flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(folder: Path, count: int) -> Iterator[tuple[subprocess.Popen[str], set[int]]]:
    """Another process with so many slots."""
    command = [sys.executable, "-c", TAKE, str(folder), str(count)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        try:
            yield process, set(map(int, process.stdout.readline().split()))
        finally:
            process.kill()


def test_ranges_do_not_overlap_and_stay_below_the_last_id(tmp_path: Path) -> None:
    mine = Slots(tmp_path)
    taken = [mine.take() for _ in range(3 * BLOCK)]
    assert len(set(taken)) == len(taken)
    assert all((slot - FIRST) % IDS == 0 and FIRST <= slot < 1 << 31 for slot in taken)
    mine.close()


def test_what_is_given_is_taken_first(tmp_path: Path) -> None:
    mine = Slots(tmp_path)
    first, second = mine.take(), mine.take()
    mine.give(first)
    assert mine.take() == first != second
    mine.close()


def test_two_processes_never_share_one(tmp_path: Path) -> None:
    mine = Slots(tmp_path)
    own = {mine.take() for _ in range(BLOCK + 1)}
    with holder(tmp_path, BLOCK + 1) as (_, others):
        assert len(others) == BLOCK + 1
        assert not own & others
        assert not {mine.take() for _ in range(BLOCK)} & others
    mine.close()


def test_a_crash_gives_them_back(tmp_path: Path) -> None:
    with holder(tmp_path, 1) as (process, others):
        process.send_signal(signal.SIGKILL)
        process.wait()
        mine = Slots(tmp_path)
        assert others <= {mine.take() for _ in range(BLOCK)}
        mine.close()


def test_closing_gives_them_back(tmp_path: Path) -> None:
    first = Slots(tmp_path)
    slot = first.take()
    first.close()
    second = Slots(tmp_path)
    assert second.take() == slot
    second.close()


def test_when_all_are_taken_the_caller_is_told_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "BLOCKS", 1)
    mine, late = Slots(tmp_path), Slots(tmp_path)
    mine.take()
    with pytest.raises(CapacityError) as caught:
        late.take()
    assert caught.value.retry_after > 0
    mine.close()
    assert late.take() == FIRST
    late.close()
