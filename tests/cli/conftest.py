from __future__ import annotations

from collections.abc import Iterator

import pytest

import residue


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """After each test nothing of its sandboxes runs; orphans are children of the test run."""
    before = set(residue.sandbox_processes())
    yield
    left = residue.settled(lambda: {process.pid for process in residue.sandbox_processes()} - {p.pid for p in before})
    assert not left
