"""One line a rollout: what happened, and the file it is kept in."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec
from msgspec import Struct

from shoal.errors import InvalidRequest, StorageFull
from shoal.rollouts.reward import Count
from shoal.types import Verdict

RESULTS, REPORT = "results.jsonl", "report.json"


class Failure(Struct, frozen=True):
    """Why the platform failed."""

    code: str
    """That of the error, or the name of an exception from outside Shoal."""
    message: str


class Rollout(Struct, kw_only=True):
    """One agent's turn at one task, and its reward."""

    task: str
    agent: str
    group: int
    """Which of the task's rollouts, from 0."""
    reward: float | None = None
    """None where the platform failed."""
    verdict: Verdict = "ok"
    fail_to_pass: Count = Count()
    """Tests that must start passing. Of a task whose tests never end before the fix: all that must pass."""
    pass_to_pass: Count = Count()
    seconds: dict[str, float] = {}
    """By phase: prepare (shared, so it may be all waiting), acquire, init, agent, grade, release."""
    sandbox: str | None = None
    """The agent's."""
    session: str | None = None
    missed: tuple[str, ...] = ()
    """The first few tests that had to pass and did not."""
    note: str = ""
    error: Failure | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        return (self.agent, self.task, self.group)


class ResultsFile:
    """`results.jsonl` in a folder. Each line is flushed, so it is valid whenever the program ends."""

    def __init__(self, folder: Path, *, resume: bool) -> None:
        self._folder = folder
        self._resume = resume
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        file = (self._folder / RESULTS).open("a+b")
        try:
            self._claim(file)
        except BaseException:
            file.close()
            raise
        self._file = file
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def _claim(self, file: IO[bytes]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidRequest("out", f"another run is writing to {self._folder}") from None
        if not self._resume and file.tell():
            raise InvalidRequest("out", f"{self._folder} has results already; resume them or give another folder")

    def read(self) -> dict[tuple[str, str, int], Rollout]:
        """What was finished before, the last line for each. A line that a kill cut short is taken away."""
        assert self._file is not None
        self._file.seek(0)
        whole, _, _ = self._file.read().rpartition(b"\n")
        self._file.truncate(len(whole) + 1 if whole else 0)
        try:
            rollouts = msgspec.json.Decoder(Rollout).decode_lines(whole)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest("out", f"{self._folder / RESULTS}: {error}; give another folder") from None
        return {rollout.key: rollout for rollout in rollouts}

    def append(self, rollout: Rollout) -> None:
        assert self._file is not None
        try:
            self._file.write(msgspec.json.encode(rollout) + b"\n")
            self._file.flush()
        except OSError as error:
            raise StorageFull(f"{self._folder / RESULTS}: {error.strerror}") from error


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces a file so that a reader sees the old one or the new one."""
    fd, aside = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            os.fchmod(fd, 0o644)
            os.fsync(fd)
        Path(aside).rename(path)
    except BaseException:
        Path(aside).unlink()
        raise
