"""The blocking SDK is the async one with its awaits taken out: the file, and what it offers."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.sdk import sandbox, sync

GENERATOR = Path(__file__).parents[2] / "scripts" / "generate_sync.py"
TYPES = ("AsyncIterator", "AsyncContent")
PAIRS = [(name, name.removeprefix("Async")) for name in vars(sandbox) if name.startswith("Async") and name not in TYPES]


def test_the_file_is_what_the_generator_writes() -> None:
    done = subprocess.run([sys.executable, GENERATOR, "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_class_has_its_twin() -> None:
    assert {blocking for _, blocking in PAIRS} == {"Sandbox", "Commands", "Command", "Files", "Watch"}


def signatures(kind: type) -> dict[str, str]:
    """Public methods as text, with what only one half has taken out."""
    found = {}
    for name, value in inspect.getmembers(kind, lambda value: inspect.isfunction(value) or inspect.ismethod(value)):
        if not name.startswith("_"):
            text = str(inspect.signature(value))
            found[name] = text.replace("Async", "").replace("sandbox.", "sync.")
    return found


@pytest.mark.parametrize(("asynchronous", "blocking"), PAIRS)
def test_both_halves_take_the_same(asynchronous: str, blocking: str) -> None:
    assert signatures(getattr(sandbox, asynchronous)) == signatures(getattr(sync, blocking))


@pytest.mark.parametrize(("asynchronous", "blocking"), PAIRS)
def test_one_half_awaits_and_the_other_blocks(asynchronous: str, blocking: str) -> None:
    for name in signatures(getattr(sandbox, asynchronous)):
        assert inspect.iscoroutinefunction(inspect.unwrap(getattr(getattr(sandbox, asynchronous), name)))
        assert not inspect.iscoroutinefunction(inspect.unwrap(getattr(getattr(sync, blocking), name)))


def test_nothing_of_asyncio_is_left_in_it() -> None:
    text = Path(sync.__file__).read_text()
    for word in ("async ", "await ", "acall", "Async", "__aenter__", "__aiter__"):
        assert word not in text
