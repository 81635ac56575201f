"""The worker process of a row, seen from the run."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self, cast

import msgspec

from shoal.bench.figures import Sample
from shoal.bench.worker import Failed, Measured, Message, Ready
from shoal.errors import PlatformError

_SET_UP_SECONDS: Final = 900.0
_SAMPLE_SECONDS: Final = 300.0
_END_SECONDS: Final = 60.0
_OWN_MOUNTS: Final = ("unshare", "--mount", "--propagation", "private")
_WITH_OWN_MOUNTS: Final = ("crun_oneshot", "runc_oneshot")


class RowProcess:
    """Started by the constructor; `wait_ready` before the first `measure`."""

    def __init__(self, row: str, folder: Path, *, many: int, cycles: int) -> None:
        """`folder` is made for the worker and removed by `close`."""
        self.row = row
        self.command = ""
        self._folder = folder
        self._folder.mkdir()
        self._errors = (folder / "stderr").open("w+b")
        self._process = subprocess.Popen(
            [*worker_arguments(row), str(folder), str(many), str(cycles)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            # Ctrl-C is for the run, which then ends its workers in order.
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        """PlatformError with the worker's reason if it cannot measure here."""
        answer = self._receive(_SET_UP_SECONDS)
        if not isinstance(answer, Ready):
            raise PlatformError(f"{self.row}: unexpected answer {answer}")
        self.command = answer.command

    def measure(self) -> Sample:
        """One sample. PlatformError if the worker fails or takes too long."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"\n")
        except BrokenPipeError:
            raise PlatformError(f"{self.row}: {self._last_words()}") from None
        answer = self._receive(_SAMPLE_SECONDS)
        if not isinstance(answer, Measured):
            raise PlatformError(f"{self.row}: unexpected answer {answer}")
        return Sample(answer.value, answer.parts)

    def _receive(self, seconds: float) -> Message:
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], seconds)[0]:
            raise PlatformError(f"{self.row}: no answer within {seconds:g} s")
        line = stdout.readline()
        if not line:
            raise PlatformError(f"{self.row}: {self._last_words()}")
        answer = msgspec.json.decode(line, type=cast("type[Message]", Ready | Measured | Failed))
        if isinstance(answer, Failed):
            raise PlatformError(answer.why)
        return answer

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "the worker ended without a word"

    def close(self) -> None:
        """Ends it: by the end of its stdin, so that it tidies up, or by force if that takes too long."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def worker_arguments(row: str) -> list[str]:
    """Workers of runtimes that must not see the host's cgroup tree get mounts of their own."""
    worker = [sys.executable, "-P", "-m", "shoal.bench.worker", row]
    isolate = row in _WITH_OWN_MOUNTS and os.geteuid() == 0 and shutil.which("unshare") is not None
    return [*_OWN_MOUNTS, *worker] if isolate else worker
