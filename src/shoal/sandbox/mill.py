"""Makes what sandboxes need to have ready, and takes apart what they leave: network namespaces and cgroups.

A spawner of its own, so that neither ever stands in the way of a sandbox that somebody waits for.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from shoal.errors import PlatformError
from shoal.sandbox.cgroup import Cgroups, Group, Limits
from shoal.sandbox.plan import FIRST_FREE_KEY, HOME_GROUP, HOST_MOUNTS, NONE, OWN_MOUNTS, Plan
from shoal.sandbox.slots import FIRST, IDS
from shoal.sandbox.spawner import Reply, Spawner

_NETWORK_OWNER: Final = FIRST - IDS
"""Ids of the user namespace that owns all network namespaces and that no sandbox enters."""
_SWEEP_SECONDS: Final = 0.1
_BATCH: Final = 10
"""Each brings up to five descriptors, and a plan takes 64."""
_CLOSE_SECONDS: Final = 5.0
_NEWCGROUP: Final = 0x2000000
_SPARE: Final = 64
"""Used cgroups that are kept for the next sandboxes."""


class Ready(Struct, frozen=True):
    """A network namespace that nobody used before, and a cgroup as good as that."""

    network: int
    """Descriptor of the namespace."""
    listeners: tuple[int, ...]
    group: Group


class Mill:
    """The process, and what waits to be taken apart by it."""

    def __init__(self, networks: Mapping[str, Plan], cgroups: Cgroups, *, root: bool) -> None:
        """`networks`: how a namespace of each kind is set up from inside."""
        self._spawner = _new_spawner()
        self._starting = asyncio.Lock()
        self._closed = False
        self.users: int | None = None
        """The namespace that all spawners of an ordinary user's node share."""
        self._networks = networks
        self._cgroups = cgroups
        self._owner = FIRST_FREE_KEY if root else NONE
        self._keys = {name: FIRST_FREE_KEY + 1 + index for index, name in enumerate(cgroups.roots())}
        self._leftovers: deque[tuple[Group, tuple[int, ...]]] = deque()
        self._sweeping: asyncio.Task[None] | None = None
        self._spare: deque[Group] = deque()

    async def start(self) -> None:
        """Starts the process; also in place of one that died."""
        self._spawner = _new_spawner()
        await self._spawner.start(self._cgroups.directories, self.users)
        if self._owner == NONE and self.users is None:
            self.users = self._spawner.open_users()
        plan = Plan()
        keep_roots(plan, self._cgroups, self._keys)
        if self._owner != NONE:
            mapping = f"0 {_NETWORK_OWNER} {IDS}"
            plan.add("userns", 0, mapping, mapping)
            plan.add("keep", 0, self._owner)
        await self._spawner.run(plan)
        await house(self._spawner, self._cgroups, self._keys)

    async def _run(self, plan: Plan, descriptors: Sequence[int] = ()) -> Reply:
        async with self._starting:
            if not self._spawner.running and not self._closed:
                await self.start()
        return await self._spawner.run(plan, descriptors, give=True)

    async def make(self, kind: str, owner: int, limits: Limits | None) -> Ready:
        """`owner`: the uid that is root in the sandbox. Without `limits` the cgroup need not have any yet."""
        group = self._cgroups.renew(self._spare.popleft()) if self._spare else self._cgroups.new()
        plan = Plan()
        plan.add("netns", 0, self._owner, self._networks[kind].wire())
        plan.add("send", 0)
        self._cgroups.create(plan, self._keys, group, owner)
        if limits is not None:
            self._cgroups.limit(plan, self._keys, group, limits)
        try:
            reply = await self._run(plan)
        except BaseException:
            group.limits = None  # nobody knows how much of it was done
            self.take_apart(group)
            raise
        group.limits = limits or group.limits
        *listeners, network = reply.descriptors
        return Ready(network, tuple(listeners), group)

    def take_apart(self, group: Group, *descriptors: int) -> None:
        """Of a sandbox that has ended: removes its cgroup, closes what it alone held open. Nobody waits for it."""
        self._leftovers.append((group, descriptors))
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = asyncio.get_running_loop().create_task(self._sweep_later())

    async def _sweep_later(self) -> None:
        while self._leftovers and not self._closed:
            # Deaths come in bursts, and what has just died may take a moment to leave its cgroup.
            await asyncio.sleep(_SWEEP_SECONDS)
            await self._sweep()

    async def _sweep(self) -> None:
        """Several in one plan. If a process is still on its way out of one, that one ends the plan; all of it is tried
        again, one by one."""
        tried: set[str] = set()
        while self._leftovers and self._leftovers[0][0].name not in tried:
            batch = [self._leftovers.popleft() for _ in range(min(len(self._leftovers), _BATCH))]
            tried |= {group.name for group, _ in batch}
            if not await self._retire([group for group, _ in batch], [each for _, held in batch for each in held]):
                for group, _ in batch:
                    if not await self._retire([group], []):
                        self._leftovers.append((group, ()))

    async def _retire(self, groups: Sequence[Group], descriptors: Sequence[int]) -> bool:
        plan = Plan()
        for group in groups:
            self._cgroups.retire(plan, self._keys, group)
        try:
            # Given away, the descriptors end with the plan: freeing a full tree's pages is the mill's work.
            await self._run(plan, descriptors)
        except PlatformError:
            return False
        keep = [group for group in groups if self._cgroups.renewable(group)][: _SPARE - len(self._spare)]
        self._spare += keep
        await self._remove([group for group in groups if group not in keep])
        return True

    async def _remove(self, groups: Sequence[Group]) -> None:
        plan = Plan()
        for group in groups:
            self._cgroups.remove(plan, self._keys, group)
            group.limits = None
        try:
            await self._run(plan)
        except PlatformError:
            self._leftovers += [(group, ()) for group in groups]

    def forsake(self) -> None:
        """See `NamespaceTier.forsake`."""
        self._spawner.forsake()

    async def close(self) -> None:
        """Takes apart what is left and ends the process. What a process stuck in the kernel holds stays."""
        if self._sweeping is not None:
            # Not cut off in the middle: what it has in hand would be nobody's.
            await asyncio.wait([self._sweeping], timeout=_CLOSE_SECONDS)
            self._sweeping.cancel()
            await asyncio.wait([self._sweeping])
        while self._spare:
            await self._remove([self._spare.popleft()])
        self._closed = True
        await self._spawner.close()
        if self.users is not None:
            os.close(self.users)
            self.users = None


def _new_spawner() -> Spawner:
    return Spawner(on_exit=lambda _pid, _status: None, on_lost=lambda: None)


def keep_roots(plan: Plan, cgroups: Cgroups, keys: Mapping[str, int]) -> None:
    """Adds the operations by which a spawner keeps the node's cgroup directories under these keys."""
    for name, path in cgroups.roots().items():
        plan.add("enter", HOST_MOUNTS)
        plan.add("open", 1, NONE, str(path), os.O_PATH | os.O_DIRECTORY)
        plan.add("enter", OWN_MOUNTS)
        plan.add("keep", 1, keys[name])


async def house(spawner: Spawner, cgroups: Cgroups, keys: Mapping[str, int]) -> None:
    """Moves a spawner into the node's unified directory where it must be there; `keep_roots` came before. The first one
    makes the cgroup namespace that all others enter, from within the directory that is to be its root."""
    if cgroups.home is None:
        return
    plan, space = Plan(), cgroups.space
    plan.add("enter", HOST_MOUNTS)
    plan.add("open", 1, NONE, f"{cgroups.home}/cgroup.procs", os.O_WRONLY)
    plan.add("enter", OWN_MOUNTS)
    plan.add("open", 2, keys["unified"], f"{cgroups.spawners}/cgroup.procs", os.O_WRONLY)
    plan.add("keep", 1, HOME_GROUP)
    if space is not None:
        plan.add("join", 2)
        plan.add("enter", 0)
        await spawner.run(plan, [space])
        return
    plan.add("open", 3, keys["unified"], "cgroup.procs", os.O_WRONLY)
    plan.add("join", 3)
    plan.add("unshare", _NEWCGROUP)
    plan.add("join", 2)
    await spawner.run(plan)
    cgroups.enable(spawner.open_cgroups())
