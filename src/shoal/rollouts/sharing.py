"""One computation for many that ask for it at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Once(Generic[K, V]):
    """Runs what makes a value once for each key; all that ask get the same value or the same error.

    Who asks may be cancelled without harm to the others. `close()` ends what still runs.
    """

    def __init__(self) -> None:
        self._made: dict[K, asyncio.Task[V]] = {}

    async def get(self, key: K, make: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """The value of `key`, made by `make()` if nobody asked before."""
        if key not in self._made:
            self._made[key] = asyncio.create_task(make())
        return await asyncio.shield(self._made[key])

    async def close(self) -> None:
        """Cancels what still runs and waits for it."""
        tasks = list(self._made.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
