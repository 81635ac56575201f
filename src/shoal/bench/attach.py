"""Jobs about an environment as a layer: numpy, pandas and pytest."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from shoal import Sandbox
from shoal.bench.figures import Sample
from shoal.bench.job import Job, Place
from shoal.sdk.environments import build_environment
from shoal.types import Layer

REQUIREMENTS: Final = ("numpy==2.3.5", "pandas==2.3.3", "pytest==8.4.2")
_REFILL_SECONDS: Final = 0.5


def _environment() -> Layer:
    """Found, or built once for all workers that ask for it."""
    python = ".".join(platform.python_version_tuple()[:2])
    return asyncio.run(build_environment(REQUIREMENTS, python))


def _create(stack: ExitStack, *layers: Layer) -> float:
    """Milliseconds of a create; the sandbox lives as long as `stack`."""
    start = time.perf_counter()
    stack.enter_context(Sandbox.create(layers=layers))
    return (time.perf_counter() - start) * 1e3


@contextmanager
def env_attach(_: Place) -> Iterator[Job]:
    """In slots that have had it before, which is what a busy node's slots are. The order alternates."""
    layer = _environment()
    turn = 0

    def once() -> Sample:
        nonlocal turn
        turn += 1
        with ExitStack() as stack:
            if turn % 2:
                return _difference(_create(stack, layer), _create(stack))
            without = _create(stack)
            return _difference(_create(stack, layer), without)

    yield Job("Sandbox.create(layers=[env]) less Sandbox.create()", once)


def _difference(with_layer: float, without: float) -> Sample:
    return Sample(with_layer - without, {"with": with_layer, "without": without})


@contextmanager
def env_attach_unseen(_: Place) -> Iterator[Job]:
    """In ready slots that have never had the layer. Sandboxes live on, so that no slot comes a second time."""
    layer = _environment()
    with ExitStack() as stack:
        _create(stack)
        time.sleep(_REFILL_SECONDS)
        for _spawner in range(os.cpu_count() or 1):
            _create(stack, layer)  # each opens it once

        def once() -> Sample:
            return _difference(_create(stack, layer), _create(stack))

        yield Job("Sandbox.create(layers=[env]) less Sandbox.create(), new slots", once)


@contextmanager
def env_create(_: Place) -> Iterator[Job]:
    layer = _environment()

    def once() -> Sample:
        with ExitStack() as stack:
            return Sample(_create(stack, layer))

    yield Job("Sandbox.create(layers=[env])", once)
