"""Calls that cross into the node's thread, and what becomes of those that nobody waits for any more."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import shoal
from shoal.sdk.embedded import Call, acall, call, engine


async def value(number: int, seconds: float = 0) -> int:
    await asyncio.sleep(seconds)
    return number


class Work:
    """Something to be made, and a record of whether it was and whether it was taken back."""

    def __init__(self) -> None:
        self.events: list[str] = []

    async def make(self) -> str:
        self.events.append("made")
        return "thing"

    def undo(self, thing: str) -> Coroutine[Any, Any, None]:
        async def take_back() -> None:
            self.events.append(f"{thing} taken back")

        return take_back()

    def call(self) -> Call[str]:
        return Call(self.make(), lambda _: None, self.undo)


def test_what_is_given_up_before_it_was_begun_is_not_begun() -> None:
    work = Work()

    async def main() -> None:
        handed = work.call()
        handed.abandon()
        handed.start()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert work.events == []


def test_what_was_made_and_not_yet_delivered_is_taken_back() -> None:
    work = Work()

    async def main() -> None:
        handed = work.call()
        handed.start()
        await asyncio.sleep(0.01)
        handed.abandon()
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert work.events == ["made", "thing taken back"]


def test_what_fails_or_is_cancelled_needs_no_taking_back() -> None:
    undone: list[int] = []

    async def fail() -> int:
        raise ValueError

    async def undo(number: int) -> None:
        undone.append(number)

    async def main() -> None:
        for work in (fail(), value(1, 60)):
            handed = Call(work, lambda _: None, undo)
            handed.start()
            await asyncio.sleep(0.01)
            handed.abandon()
            await asyncio.sleep(0.01)

    asyncio.run(main())
    assert undone == []


def test_errors_cross_as_they_are() -> None:
    with pytest.raises(shoal.NotFound):
        call(engine().node.info("sb-none"))

    async def main() -> None:
        with pytest.raises(shoal.NotFound):
            await acall(engine().node.info("sb-none"))

    asyncio.run(main())


def test_many_threads_get_their_own_answers() -> None:
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda number: call(value(number, 0.001 * (number % 7))), range(300)))
    assert found == list(range(300))


def test_many_calls_of_one_loop_get_their_own_answers() -> None:
    async def main() -> list[int]:
        return await asyncio.gather(*(acall(value(number, 0.001 * (number % 7))) for number in range(300)))

    assert asyncio.run(main()) == list(range(300))


def test_a_loop_that_is_closed_while_it_waits_does_no_harm() -> None:
    async def main() -> None:
        task = asyncio.create_task(acall(value(1, 0.2)))
        await asyncio.sleep(0.01)
        task.cancel()

    for _ in range(3):
        asyncio.run(main())
    assert call(value(7)) == 7


def test_there_is_one_engine_however_many_ask_for_it() -> None:
    with ThreadPoolExecutor(8) as pool:
        assert len(set(map(id, pool.map(lambda _: engine(), range(32))))) == 1
