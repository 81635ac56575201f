"""The kinds of sandboxes that a node can make. Each is started when it is first asked for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from shoal.errors import Unsupported
from shoal.node.interface import CreateRequest
from shoal.node.networks import network_plans
from shoal.sandbox.fake import FakeTier
from shoal.sandbox.interface import Tier
from shoal.sandbox.slots import IDS
from shoal.types import Image

Maker = Callable[[], Tier]


def tier_makers(data: Path, run: Path) -> dict[str, Maker]:
    """By the name that `Sandbox.create(tier=...)` takes."""

    def namespace() -> Tier:
        from shoal.sandbox.namespace import NamespaceTier  # names what only Linux has

        return NamespaceTier(run, data / "uppers", network_plans(IDS if os.geteuid() == 0 else 1))

    return {"namespace": namespace, "fake": FakeTier}


class Tiers:
    """Those that were started stay until the node ends."""

    def __init__(self, makers: Mapping[str, Maker]) -> None:
        self._makers = makers
        self._lock = asyncio.Lock()
        self.started: dict[str, Tier] = {}

    async def get(self, name: str) -> Tier:
        """Unsupported for a name that is none; SetupFailed or PlatformError where it can't run."""
        if name not in self._makers:
            raise Unsupported(f"tier {name!r}: this version has {', '.join(map(repr, self._makers))}")
        if name not in self.started:
            async with self._lock:
                if name not in self.started:
                    self.started[name] = await self._start(name)
        return self.started[name]

    async def _start(self, name: str) -> Tier:
        tier = self._makers[name]()
        try:
            await tier.start()
        except BaseException:
            await tier.close()
            raise
        return tier

    def forsake(self) -> None:
        """See `Tier.forsake`."""
        for tier in self.started.values():
            tier.forsake()

    async def close(self) -> None:
        async with self._lock:  # one that is being started is not half there
            for tier in self.started.values():
                await tier.close()


def machine_image(request: CreateRequest) -> Image:
    """What stands for an image in a tier without layers. Unsupported if the request needs more than this machine."""
    for field, default in (("image", "host"), ("layers", ()), ("workspace", None), ("network", None)):
        if getattr(request, field) != default:
            raise Unsupported(f"{field}: the tier {request.tier!r} runs on this machine as it is; use tier='namespace'")
    return Image("host", "machine", (), {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"})
