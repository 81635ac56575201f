"""The process of one row: `python -m shoal.bench.worker ROW FOLDER MANY CYCLES`.

It sets its job up, says so in a line on stdout, and answers each line on stdin with one measurement. It ends with its
stdin, so that nothing outlives the run however that ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

import msgspec

from shoal.bench import attach, bulk, crowd, live, many, peers, unpack
from shoal.bench.job import Job, Place, SetUp
from shoal.bench.rows import find


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The job can be asked for."""

    command: str


class Measured(msgspec.Struct, frozen=True, tag=True):
    """One sample."""

    value: float
    parts: dict[str, float]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The row cannot be measured; the worker ends."""

    why: str


Message = Ready | Measured | Failed


def jobs() -> Mapping[str, SetUp]:
    """Row to what sets it up."""
    return {
        "oneshot": live.oneshot,
        "bwrap_oneshot": peers.bwrap,
        "crun_oneshot": peers.crun,
        "runc_oneshot": peers.runc,
        "python_floor": live.python_floor,
        "exec": live.exec_true,
        "exec_shell": live.exec_shell,
        "files_64k": live.files_64k,
        "socket_copy": bulk.socket_copy,
        "output_200m": bulk.output_200m,
        "upload_64m": bulk.upload_64m,
        "download_64m": bulk.download_64m,
        "bulk_memory": bulk.bulk_memory,
        "neighbour": crowd.neighbour,
        "reap": crowd.reap,
        "oneshot_16": live.oneshot_16,
        "env_attach": attach.env_attach,
        "env_attach_unseen": attach.env_attach_unseen,
        "env_create": attach.env_create,
        "uv_hardlink": unpack.uv_hardlink,
        "tar_unpack": unpack.tar_unpack,
        "create_500": many.create_many,
        "idle": many.idle,
        "leftovers": many.leftovers,
    }


def main() -> None:
    name, folder, many_, cycles = sys.argv[1:]
    answers = _own_stdout()
    try:
        with _set_up(name, Place(Path(folder), int(many_), int(cycles))) as job:
            _serve(name, job, answers)
    except Exception as error:  # the border of the process: whoever reads the answers says it to the user
        _answer(answers, Failed(f"{type(error).__name__}: {error}"))
        sys.exit(1)


def _set_up(name: str, place: Place) -> AbstractContextManager[Job]:
    return jobs()[name](place)


def _own_stdout() -> IO[bytes]:
    """The stream for answers. What a child prints goes to stderr, which is kept for error messages."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def _serve(name: str, job: Job, answers: IO[bytes]) -> None:
    for _ in range(find(name).warm):
        job.once()
    _answer(answers, Ready(job.command))
    while sys.stdin.readline():
        sample = job.once()
        _answer(answers, Measured(sample.value, sample.parts))


def _answer(answers: IO[bytes], message: Message) -> None:
    answers.write(msgspec.json.encode(message) + b"\n")
    answers.flush()


if __name__ == "__main__":
    main()
