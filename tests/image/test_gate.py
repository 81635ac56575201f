"""The gate lets in as many as it has slots, in order, and loses no slot whatever becomes of those that wait."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from shoal.image.gate import Gate
from shoal.image.store import Store
from shoal.image.throughput import Throughput, read_throughput


def test_no_more_than_the_slots_and_in_order() -> None:
    async def main() -> None:
        gate, order, most = Gate(2), list[int](), 0

        async def work(number: int) -> None:
            nonlocal most
            async with gate.slot(f"job {number}"):
                order.append(number)
                most = max(most, len(gate.look().running))
                await asyncio.sleep(0.001)

        jobs = [asyncio.create_task(work(number)) for number in range(20)]
        await asyncio.sleep(0)
        assert [each.what for each in gate.look().running] == ["job 0", "job 1"]
        assert [each.what for each in gate.look().waiting][:2] == ["job 2", "job 3"]
        await asyncio.gather(*jobs)
        assert order == list(range(20))
        assert most == 2
        assert gate.look() == Gate(2).look()

    asyncio.run(main())


def test_the_cancelled_and_the_failed_give_their_slot_back() -> None:
    async def main() -> None:
        gate = Gate(3)

        async def work(number: int) -> None:
            async with gate.slot("same"):
                await asyncio.sleep(random.random() / 200)
                if number % 3 == 0:
                    raise ValueError

        jobs = [asyncio.create_task(work(number)) for number in range(60)]
        for job in random.sample(jobs, 20):
            await asyncio.sleep(0.0005)
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        assert gate.look() == Gate(3).look()
        async with asyncio.timeout(5), gate.slot("a"), gate.slot("b"), gate.slot("c"):
            pass

    asyncio.run(main())


@pytest.mark.parametrize(("peak", "slots"), [(100, 1), (399, 3), (50, 1), (1e9, 8)])
def test_slots_follow_the_measured_throughput(peak: float, slots: int) -> None:
    assert Throughput(peak=peak, measured=0, device=0).slots(100, processors=4) == slots


def test_the_measurement_is_kept_until_it_is_asked_for_anew(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    first = read_throughput(store)
    assert first.peak > 0
    assert read_throughput(Store(store.root)) == first
    assert read_throughput(store, anew=True).measured > first.measured
    assert not list((store.root / "tmp").iterdir())
