"""Tiers start when they are first asked for, once, and not at all where they can't."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

import shoal
from shoal.node.tiers import Tiers
from shoal.sandbox.interface import Tier


class Recorded:
    """What a tier was asked."""

    def __init__(self, log: list[str], *, fails: bool = False) -> None:
        self._log = log
        self._fails = fails

    async def start(self) -> None:
        self._log.append("start")
        await asyncio.sleep(0.01)
        if self._fails:
            raise shoal.PlatformError("cannot")

    async def close(self) -> None:
        self._log.append("close")


def maker(log: list[str], *, fails: bool = False) -> Callable[[], Tier]:
    return lambda: cast(Tier, Recorded(log, fails=fails))


def test_each_is_started_once_and_by_need() -> None:
    used: list[str] = []
    unused: list[str] = []

    async def look() -> None:
        tiers = Tiers({"used": maker(used), "unused": maker(unused)})
        first, second = await asyncio.gather(tiers.get("used"), tiers.get("used"))
        assert first is second is await tiers.get("used")
        await tiers.close()

    asyncio.run(look())
    assert used == ["start", "close"]
    assert unused == []


def test_one_that_cannot_start_is_closed_and_tried_again() -> None:
    log: list[str] = []

    async def look() -> None:
        tiers = Tiers({"broken": maker(log, fails=True), "whole": maker([])})
        for _ in range(2):
            with pytest.raises(shoal.PlatformError, match="cannot"):
                await tiers.get("broken")
        assert await tiers.get("whole")
        assert list(tiers.started) == ["whole"]

    asyncio.run(look())
    assert log == ["start", "close"] * 2


def test_a_name_that_is_none() -> None:
    with pytest.raises(shoal.Unsupported, match="'namespace', 'fake'"):
        shoal.Sandbox.create(tier="vm")
