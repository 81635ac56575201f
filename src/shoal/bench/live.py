"""Jobs with one sandbox, or a few at once."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from shoal import AsyncSandbox, Sandbox
from shoal.bench.figures import Sample
from shoal.bench.job import Job, Place, milliseconds

_AT_ONCE: Final = 16
_SECONDS: Final = 3.0
_SIZE: Final = 64 << 10


@contextmanager
def python_floor(_: Place) -> Iterator[Job]:
    """What starting a process costs from Python on this machine: nothing below can be cheaper by much."""
    true = shutil.which("true") or "/bin/true"

    def once() -> None:
        os.waitpid(os.posix_spawn(true, ["true"], {}), 0)

    yield Job(f"os.posix_spawn({true!r}, ['true'], {{}}); os.waitpid", lambda: milliseconds(once))


@contextmanager
def oneshot(_: Place) -> Iterator[Job]:
    """No sandbox is ready; network namespaces and cgroups are, a few."""

    def once() -> None:
        with Sandbox.create() as box:
            box.commands.run(["true"], check=True)

    yield Job("with Sandbox.create() as box: box.commands.run(['true'])", lambda: milliseconds(once))


@contextmanager
def oneshot_16(_: Place) -> Iterator[Job]:
    """A rate over some seconds, so that what is put off to the background counts as well."""

    async def one_after_another(end: float) -> int:
        done = 0
        while time.perf_counter() < end:
            async with await AsyncSandbox.create() as box:
                await box.commands.run(["true"], check=True)
            done += 1
        return done

    async def once() -> Sample:
        start = time.perf_counter()
        done = await asyncio.gather(*(one_after_another(start + _SECONDS) for _ in range(_AT_ONCE)))
        return Sample(sum(done) / (time.perf_counter() - start))

    command = f"{_AT_ONCE} at once for {_SECONDS:g} s: async with await AsyncSandbox.create() as box: run(['true'])"
    yield Job(command, lambda: asyncio.run(once()))


@contextmanager
def exec_true(_: Place) -> Iterator[Job]:
    with Sandbox.create() as box:
        command = "box.commands.run(['true'])"
        yield Job(command, lambda: milliseconds(lambda: box.commands.run(["true"], check=True)))


@contextmanager
def exec_shell(_: Place) -> Iterator[Job]:
    """As one types it; what bash needs to start is in it."""
    with Sandbox.create() as box:
        command = "box.commands.run('true')"
        yield Job(command, lambda: milliseconds(lambda: box.commands.run("true", check=True)))


@contextmanager
def files_64k(_: Place) -> Iterator[Job]:
    data = os.urandom(_SIZE)
    with Sandbox.create() as box:

        def once() -> None:
            box.files.write("/workspace/data", data)
            box.files.read("/workspace/data", format="bytes")

        yield Job("box.files.write(path, data); box.files.read(path, 'bytes')", lambda: milliseconds(once))
