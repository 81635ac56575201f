"""The blocking SDK is the async one with its awaits taken out: the file, and what it offers."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.sdk import commands, sandbox, shells, sync, sync_commands, sync_shells

GENERATOR = Path(__file__).parents[2] / "scripts" / "generate_sync.py"
FILES = ((sandbox, sync), (commands, sync_commands), (shells, sync_shells))
PAIRS = [
    (value, getattr(blocking, name.removeprefix("Async")))
    for module, blocking in FILES
    for name, value in vars(module).items()
    if name.startswith("Async") and inspect.isclass(value) and value.__module__ == module.__name__
]


def test_the_file_is_what_the_generator_writes() -> None:
    done = subprocess.run([sys.executable, GENERATOR, "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_class_has_its_twin() -> None:
    names = {"Sandbox", "Commands", "Command", "Files", "Watch", "Shell", "Pty", "Ptys"}
    assert {blocking.__name__ for _, blocking in PAIRS} == names


def signatures(kind: type) -> dict[str, str]:
    """Public methods as text, with what only one half has taken out."""
    found = {}
    for name, value in inspect.getmembers(kind, lambda value: inspect.isfunction(value) or inspect.ismethod(value)):
        if not name.startswith("_"):
            text = str(inspect.signature(value))
            found[name] = re.sub(r"shoal\.sdk\.\w+\.|Async", "", text)
    return found


@pytest.mark.parametrize(("asynchronous", "blocking"), PAIRS)
def test_both_halves_take_the_same(asynchronous: type, blocking: type) -> None:
    assert signatures(asynchronous) == signatures(blocking)


@pytest.mark.parametrize(("asynchronous", "blocking"), PAIRS)
def test_one_half_awaits_and_the_other_blocks(asynchronous: type, blocking: type) -> None:
    for name in signatures(asynchronous):
        assert inspect.iscoroutinefunction(inspect.unwrap(getattr(asynchronous, name)))
        assert not inspect.iscoroutinefunction(inspect.unwrap(getattr(blocking, name)))


def test_nothing_of_asyncio_is_left_in_it() -> None:
    for _, blocking in FILES:
        text = Path(str(blocking.__file__)).read_text()
        for word in ("async ", "await ", "acall", "Async", "__aenter__", "__aiter__"):
            assert word not in text
