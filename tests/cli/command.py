"""The installed `shoal`, run as users run it: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCRIPT = Path(sys.executable).with_name("shoal")
SHOAL = (
    [str(SCRIPT)] if os.access(SCRIPT, os.X_OK) else [sys.executable, "-c", "from shoal.cli.main import main; main()"]
)
PATIENCE = 30.0
"""Seconds that a command may take on a busy machine."""

Outcome = subprocess.CompletedProcess[bytes]


def shoal(*arguments: str | Path, input: bytes = b"", **options: Any) -> Outcome:
    """One whole run, its streams as bytes."""
    return subprocess.run([*SHOAL, *arguments], input=input, capture_output=True, timeout=PATIENCE, **options)


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run under way, with pipes; killed at the end if it is still there."""
    pipe = subprocess.PIPE
    with subprocess.Popen([*SHOAL, *arguments], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            yield process
        finally:
            process.kill()


def complaint(outcome: Outcome) -> str:
    """The one line that it wrote to stderr, and nothing to stdout."""
    assert outcome.stdout == b""
    (line,) = outcome.stderr.decode().splitlines()
    assert line.startswith("shoal: ")
    return line.removeprefix("shoal: ")
