from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InvalidRequest, OutputLost
from shoal.node import retained
from shoal.node.interface import Output
from shoal.node.retained import KEEP, Retained

WINDOW = 1 << 20


class Source:
    """A command within its credit, as init keeps it."""

    def __init__(self, *, hold: bool = False) -> None:
        self.credit = [WINDOW, WINDOW]
        self.retained = Retained(self.grant, hold=hold)

    def grant(self, stream: int, count: int) -> None:
        self.credit[stream - 1] += count

    def write(self, stream: int, data: bytes) -> int:
        """How much of it there was room for."""
        count = min(len(data), self.credit[stream - 1])
        self.credit[stream - 1] -= count
        if count:
            self.retained.add(stream, data[:count])
        return count


def on_a_loop(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await work()

    asyncio.run(bounded())


def join(pieces: list[Output]) -> bytes:
    return b"".join(piece.data for piece in pieces)


@given(st.lists(st.tuples(st.integers(1, 2), st.binary(min_size=1, max_size=50)), max_size=40), st.data())
def test_any_offset_gives_the_rest_with_its_streams(writes: list[tuple[int, bytes]], data: st.DataObject) -> None:
    whole = b"".join(text for _, text in writes)
    streams = b"".join(bytes([stream]) * len(text) for stream, text in writes)
    offset = data.draw(st.integers(0, len(whole)))

    async def work() -> None:
        source = Source()
        for stream, text in writes:
            source.write(stream, text)
        source.retained.finish()
        at, found, found_streams = offset, b"", b""
        while pieces := await source.retained.read("r", at):
            for piece in pieces:
                at += len(piece.data)
                found += piece.data
                found_streams += bytes([piece.stream]) * len(piece.data)
        assert (found, found_streams) == (whole[offset:], streams[offset:])

    on_a_loop(work)


@pytest.mark.parametrize("hold", [False, True])
def test_a_reader_that_keeps_up_gets_all_of_much(hold: bool) -> None:
    async def work() -> None:
        source, random_ = Source(hold=hold), random.Random(1)
        sent = got = 0
        while sent < 20 << 20:
            while count := source.write(random_.choice((1, 2)), bytes(random_.choice((1, 1000, 65536)))):
                sent += count
            for piece in await source.retained.read("", got):
                got += len(piece.data)
            assert source.retained.end - source.retained.start <= 2 * WINDOW
        source.retained.finish()
        while pieces := await source.retained.read("", got):
            got += len(join(pieces))
        assert got == sent

    on_a_loop(work)


def test_nobody_reads_and_the_last_bytes_stay() -> None:
    async def work() -> None:
        source = Source()
        source.retained.leave("")
        for _ in range(300):
            assert source.write(1, bytes(65536)) == 65536
        assert source.retained.end - source.retained.start == KEEP
        with pytest.raises(OutputLost) as caught:
            await source.retained.read("late", 0)
        assert caught.value.available == source.retained.start
        assert source.write(1, bytes(65536)) == 65536  # who asked in vain holds nothing up
        assert source.write(1, bytes(65536)) == 65536
        assert len(join(await source.retained.read("late", source.retained.start))) > 0

    on_a_loop(work)


def test_a_reader_holds_the_command_until_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retained, "PATIENCE", 0.3)

    async def work() -> None:
        source = Source()
        assert sum(source.write(1, bytes(65536)) for _ in range(40)) == WINDOW
        assert source.write(1, b"x") == 0
        assert len(join(await source.retained.read("other", 0))) > 0
        source.retained.leave("other")
        assert source.write(1, b"x") == 0  # the one who started it may still come
        await asyncio.sleep(0.5)
        assert source.write(1, b"x") == 1

    on_a_loop(work)


def test_the_reader_of_a_held_command_may_take_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retained, "PATIENCE", 0.05)

    async def work() -> None:
        source = Source(hold=True)
        assert sum(source.write(2, bytes(65536)) for _ in range(40)) == WINDOW
        await asyncio.sleep(0.3)
        assert source.write(2, b"x") == 0
        got = 0
        while got < WINDOW:
            got += len(join(await source.retained.read("", got)))
        source.retained.finish()
        assert await source.retained.read("", got) == []
        assert source.credit[1] == WINDOW

    on_a_loop(work)


def test_a_reader_waits_for_more_and_for_the_end() -> None:
    async def work() -> None:
        source = Source()
        waiting = [asyncio.ensure_future(source.retained.read(str(number), 0)) for number in range(3)]
        await asyncio.sleep(0.01)
        source.write(1, b"abc")
        assert [join(pieces) for pieces in await asyncio.gather(*waiting)] == [b"abc"] * 3
        end = asyncio.ensure_future(source.retained.read("0", 3))
        await asyncio.sleep(0.01)
        assert not end.done()
        source.retained.finish()
        assert await end == []

    on_a_loop(work)


def test_a_read_that_is_given_up_loses_nothing() -> None:
    async def work() -> None:
        source = Source()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(source.retained.read("", 0), 0.02)
        source.write(1, b"abc")
        assert join(await source.retained.read("", 0)) == b"abc"
        assert join(await source.retained.read("", 0)) == b"abc"

    on_a_loop(work)


@pytest.mark.parametrize("offset", [-1, 4])
def test_an_offset_that_is_none(offset: int) -> None:
    async def work() -> None:
        source = Source()
        source.write(1, b"abc")
        with pytest.raises(InvalidRequest, match="offset"):
            await source.retained.read("", offset)

    on_a_loop(work)


def test_single_bytes_in_turn_cost_little() -> None:
    """Each piece as an object of its own would be a hundred times what was written."""
    import tracemalloc

    async def work() -> None:
        source = Source(hold=True)
        tracemalloc.start()
        for _ in range(200_000):
            source.write(1, b"x")
            source.write(2, b"y")
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert used < 16 * 400_000

    on_a_loop(work)
