"""Jobs about many sandboxes at once."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from shoal import AsyncSandbox
from shoal.bench import memory
from shoal.bench.figures import Sample
from shoal.bench.footprint import Footprint, footprint, remaining, surroundings
from shoal.bench.job import Job, Place
from shoal.config import data_dir, run_dir
from shoal.sdk import embedded
from shoal.types import MiB

_AT_ONCE: Final = 16
_SETTLE_SECONDS: Final = 1.0


async def _each(count: int, work: Callable[[int], Awaitable[None]]) -> None:
    """`work` for 0 to `count` - 1, some at a time."""
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await work(number)

    await asyncio.gather(*(worker() for _ in range(_AT_ONCE)))


async def _create(count: int) -> list[AsyncSandbox]:
    boxes: list[AsyncSandbox] = []

    async def create(_: int) -> None:
        boxes.append(await AsyncSandbox.create())

    await _each(count, create)
    return boxes


async def _kill(boxes: Sequence[AsyncSandbox]) -> None:
    await _each(len(boxes), lambda number: boxes[number].kill())


async def _cycle(_: int) -> None:
    async with await AsyncSandbox.create() as box:
        await box.commands.run(["true"], check=True)


@contextmanager
def create_many(place: Place) -> Iterator[Job]:
    async def once() -> Sample:
        await _cycle(0)
        start = time.perf_counter()
        boxes = await _create(place.many)
        seconds = time.perf_counter() - start
        await _kill(boxes)
        return Sample(seconds)

    yield Job(f"{place.many} x AsyncSandbox.create(), {_AT_ONCE} at once", lambda: asyncio.run(once()))


# Idle memory


@contextmanager
def idle(place: Place) -> Iterator[Job]:
    """The machine's used memory with that many alive, less without, divided by their number.

    See `memory.used` for what counts: the processes, what the node itself remembers of each, and all kernel memory,
    of which network namespaces and cgroups are the most. Everything that a node has anyway (ready seats, opened
    layers) is there before. Parts are kinds of memory, each measured on its own: their sum shows whether other
    programs disturbed the whole. `after_a_command` is the whole once each sandbox has run `true`.
    """
    yield Job(f"{place.many} x AsyncSandbox.create(); used memory each", lambda: asyncio.run(_idle(place.many)))


async def _idle(many: int) -> Sample:
    await _each(2 * _AT_ONCE, _cycle)
    await asyncio.sleep(_SETTLE_SECONDS)
    before = memory.read()
    boxes = await _create(many)
    await asyncio.sleep(_SETTLE_SECONDS)
    alive = memory.read()
    await _each(many, lambda number: _true(boxes[number]))
    await asyncio.sleep(_SETTLE_SECONDS)
    later = memory.read()
    await _kill(boxes)
    parts = {kind: size - before.kinds[kind] for kind, size in alive.kinds.items()}
    parts["after_a_command"] = later.used - before.used
    return Sample((alive.used - before.used) / many / MiB, {kind: size / many / MiB for kind, size in parts.items()})


async def _true(box: AsyncSandbox) -> None:
    await box.commands.run(["true"], check=True)


# Leftovers


@contextmanager
def leftovers(place: Place) -> Iterator[Job]:
    """Counts what is there after the node has ended and was not before it began."""
    command = f"{place.many} alive at once, then {place.cycles} x create, run true, kill; what is left"
    yield Job(command, lambda: _leftovers(place))


def _leftovers(place: Place) -> Sample:
    os.environ["SHOAL_HOME"] = str(place.folder / "home")  # where no other node makes files at the same time
    asyncio.run(_cycle(0))  # makes what stays on purpose: the layers of the image
    embedded.close()
    before = surroundings(data_dir(), run_dir(), os.getpid())
    traces = asyncio.run(_live(place))
    embedded.close()
    processes, namespaces = remaining(traces, os.getpid())
    after = surroundings(data_dir(), run_dir(), os.getpid())
    left = {
        "processes": processes,
        "namespaces": namespaces,
        "mounts": len(after.mounts - before.mounts),
        "cgroups": len(after.cgroups - before.cgroups),
        "files": len(after.files - before.files),
        "descriptors": max(after.descriptors - before.descriptors, 0),
    }
    return Sample(sum(left.values()), {kind: float(count) for kind, count in left.items()})


async def _live(place: Place) -> Footprint:
    boxes = await _create(place.many)
    traces = footprint(os.getpid())
    await _kill(boxes)
    await _each(place.cycles, _cycle)
    return traces
