"""One spawner and what is kept ready with it: layers as detached mounts, and seats for the next sandboxes."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Final

from msgspec import Struct

from shoal.errors import PlatformError, SetupFailed, ShoalError
from shoal.sandbox.cgroup import Cgroups, Limits
from shoal.sandbox.compose import NODEV, NOSUID, RDONLY, Accounting
from shoal.sandbox.mill import Mill, Ready, house, keep_roots
from shoal.sandbox.plan import FIRST_FREE_KEY, HOST_MOUNTS, NONE, OWN_MOUNTS, Plan
from shoal.sandbox.processors import Processors
from shoal.sandbox.slots import IDS, Slots
from shoal.sandbox.spawner import DESCRIPTORS_MAX, Spawner
from shoal.types import Layer

_REFILL_SECONDS: Final = 0.01
"""How long a refill waits while more than half of the seats are ready."""
READY: Final = 8
"""Isolated seats that a shard keeps ready."""
_LAYERS_PER_SEAT: Final = 128
_BASES: Final = 512
"""Layers that a spawner keeps open."""
_SPARE: Final = 64
"""Seats that are kept with their mapped layers when their sandboxes have ended."""


class Seat(Struct):
    """Where a sandbox is put: ids of its own, mapped layers, and a network namespace and cgroup nobody used before."""

    owner: int
    """First id of its slot; 0 without root."""
    users: int
    layers: OrderedDict[str, int]
    """Digest to the kept, id-mapped mount, the most recently used last."""
    ready: Ready | None = None
    """Its network namespace and cgroup."""
    draft: tuple[object, Plan] | None = None
    """A plan written ahead for a sandbox like the last one, and what it is for."""
    processors: tuple[int, ...] = ()
    """Of the machine, that its live sandbox runs on; empty for all."""


class Shard:
    """A spawner process with its caches."""

    def __init__(
        self,
        *,
        cgroups: Cgroups,
        mill: Mill,
        processors: Processors,
        slots: Slots | None,
        on_exit: Callable[[int, int], None],
        on_lost: Callable[[], None],
    ) -> None:
        """`slots` None: an ordinary user's node."""
        self.spawner = Spawner(on_exit, on_lost)
        self.live = 0
        self._cgroups = cgroups
        self._mill = mill
        self._processors = processors
        self._slots = slots
        self._keys = iter(range(FIRST_FREE_KEY, 1 << 16))
        self._free_keys: deque[int] = deque()
        self._dropped: list[int] = []
        self._bases: OrderedDict[str, int] = OrderedDict()
        self._roots: dict[str, int] = {}
        self._seats: list[Seat] = []
        self._spare: list[Seat] = []
        self._ready: deque[Seat] = deque()
        self.usual: Limits | None = None
        """Those of the last sandbox; the next seats are made with them."""
        self.prepare: Callable[[Seat], Awaitable[None]] | None = None
        """What is done with a seat so that a sandbox like the last one finds everything mapped and written."""
        self._refill: asyncio.Task[None] | None = None
        self._base_lock = asyncio.Lock()

    async def start(self) -> None:
        await self.spawner.start(self._cgroups.directories, self._mill.users)
        self._roots = {name: self._key() for name in self._cgroups.roots()}
        plan = Plan()
        keep_roots(plan, self._cgroups, self._roots)
        await self.spawner.run(plan)
        await house(self.spawner, self._cgroups, self._roots)

    # Descriptors kept in the spawner

    def _key(self) -> int:
        return self._free_keys.popleft() if self._free_keys else next(self._keys)

    def _drop(self, keys: Iterable[int]) -> None:
        self._dropped += keys

    def _flush_drops(self, plan: Plan) -> list[int]:
        """Adds the drops that are due; their numbers may be used again once the plan has run."""
        keys, self._dropped = self._dropped, []
        for key in keys:
            plan.add("drop", key)
        return keys

    # Layers

    async def layer_keys(self, seat: Seat, layers: Iterable[Layer]) -> list[int]:
        """Kept mounts of the layers, mapped for the seat, made where they are missing."""
        wanted = list(layers)
        missing = [layer for layer in wanted if layer.digest not in seat.layers]
        if missing:
            await self._open_bases(missing)
            await self._map_layers(seat, missing)
        for layer in wanted:
            seat.layers.move_to_end(layer.digest)
        while seat.users != NONE and len(seat.layers) > max(_LAYERS_PER_SEAT, len(wanted)):
            self._drop([seat.layers.popitem(last=False)[1]])
        return [seat.layers[layer.digest] for layer in wanted]

    async def _open_bases(self, layers: Iterable[Layer]) -> None:
        async with self._base_lock:
            for layer in layers:
                if layer.digest not in self._bases:
                    self._bases[layer.digest] = await self._open_base(layer)
                self._bases.move_to_end(layer.digest)
            self._forget_bases()

    def _forget_bases(self) -> None:
        """Those not used for long are opened anew when wanted. An ordinary user's seats have no copies of their own."""
        for digest in list(self._bases)[: max(0, len(self._bases) - _BASES)] if self._slots is not None else ():
            if not digest.startswith(("tree:", "device:")):
                self._drop([self._bases.pop(digest)])

    async def _open_base(self, layer: Layer) -> int:
        key = self._key()
        plan = Plan()
        plan.add("enter", HOST_MOUNTS)
        if layer.format == "erofs":
            plan.add("mount", 0, "erofs", RDONLY, [f"source={layer.source}", "ro"])
        else:
            plan.add("clone_tree", 0, NONE, layer.source)
        plan.add("enter", OWN_MOUNTS)
        if layer.format == "directory":
            plan.add("attributes", 0, RDONLY, 0)
        plan.add("keep", 0, key)
        await self.spawner.run(plan)
        return key

    async def _map_layers(self, seat: Seat, layers: Iterable[Layer]) -> None:
        if seat.users == NONE:
            seat.layers.update((layer.digest, self._bases[layer.digest]) for layer in layers)
            return
        for layer in layers:
            try:
                seat.layers[layer.digest] = await self._map_layer(seat, layer, idmap=True)
            except SetupFailed as error:
                if error.errno != errno.EINVAL:
                    raise
                # A file system without id-mapped mounts: its files show as nobody's, as `doctor` says.
                seat.layers[layer.digest] = await self._map_layer(seat, layer, idmap=False)

    async def _map_layer(self, seat: Seat, layer: Layer, *, idmap: bool) -> int:
        key = self._key()
        plan = Plan()
        dropped = self._flush_drops(plan)
        # A detached copy may only be copied again from the mount namespace that it was first taken from.
        plan.add("enter", HOST_MOUNTS)
        plan.add("clone_tree", 0, self._bases[layer.digest], "")
        plan.add("enter", OWN_MOUNTS)
        if idmap:
            plan.add("idmap", 0, seat.users)
        plan.add("keep", 0, key)
        await self.spawner.run(plan)
        self._free_keys.extend(dropped)
        return key

    async def forget(self, digests: Iterable[str]) -> None:
        """Unmounts layers that no sandbox uses; a ready seat that was made for them is written anew."""
        await self._stop_refill()
        self.prepare = None
        for digest in digests:
            if digest in self._bases:
                self._drop([self._bases.pop(digest)])
            for seat in self._seats:
                if (key := seat.layers.pop(digest, None)) is not None and seat.users != NONE:
                    self._drop([key])
                    seat.draft = None
        plan = Plan()
        dropped = self._flush_drops(plan)
        await self.spawner.run(plan)
        self._free_keys.extend(dropped)

    async def share(self, layers: Iterable[Layer]) -> list[int]:
        """Descriptors, in this process, of layers that are in use."""
        found: list[int] = []
        wanted = list(layers)
        await self._open_bases(wanted)
        for batch in _batches(wanted, DESCRIPTORS_MAX):
            plan = Plan()
            for layer in batch:
                plan.add("send", self._bases[layer.digest])
            found += (await self.spawner.run(plan)).descriptors
        return found

    async def add_tree(self, digest: str, fill: Callable[[int], None]) -> Layer:
        """A small tree in memory, made once; read-only when `fill` has written it by the descriptor it is given."""
        async with self._base_lock:
            if digest not in self._bases:
                self._bases[digest] = await self._make_tree(fill)
            self._bases.move_to_end(digest)
            self._forget_bases()
        return Layer(digest=digest, source="")

    async def _make_tree(self, fill: Callable[[int], None]) -> int:
        key = self._key()
        plan = Plan()
        plan.add("mount", 0, "tmpfs", NOSUID | NODEV, ["size=8m", "mode=755"])
        plan.add("keep", 0, key)
        plan.add("send", 0)
        (descriptor,) = (await self.spawner.run(plan)).descriptors
        try:
            root = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=descriptor)
            try:
                fill(root)
            finally:
                os.close(root)
        finally:
            os.close(descriptor)
        plan = Plan()
        plan.add("attributes", key, RDONLY, 0)
        await self.spawner.run(plan)
        return key

    async def open_device(self, path: str) -> int:
        """A device node of the host as a kept mount, for sandboxes whose layers cannot have any."""
        return await self._open_base(Layer(digest=f"device:{path}", source=path))

    # Seats

    @property
    def ready(self) -> int:
        """Seats that can be taken at once."""
        return len(self._ready)

    async def take(self, kind: str) -> Seat:
        """A ready seat, or one made now. `kind`: of its network."""
        self.refill()
        if kind == "isolated" and self._ready:
            return self._ready.popleft()
        seat = await self._make_seat()
        await self._equip(seat, kind)
        return seat

    async def _make_seat(self) -> Seat:
        if self._spare:
            return self._spare.pop()
        if self._slots is None:
            return self._new_seat(0, NONE)
        owner = self._slots.take()
        users = self._key()
        plan = Plan()
        plan.add("userns", 0, f"0 {owner} {IDS}", f"0 {owner} {IDS}")
        plan.add("keep", 0, users)
        try:
            await self.spawner.run(plan)
        except BaseException:
            self._slots.give(owner)
            raise
        return self._new_seat(owner, users)

    def _new_seat(self, owner: int, users: int) -> Seat:
        self._seats.append(Seat(owner=owner, users=users, layers=OrderedDict()))
        return self._seats[-1]

    async def _equip(self, seat: Seat, kind: str) -> None:
        try:
            seat.ready = await self._mill.make(kind, seat.owner, self.usual)
        except BaseException:
            self.give(seat)
            raise

    def give(self, seat: Seat, *descriptors: int) -> None:
        """A seat whose sandbox has ended, or never was. Its ids and layers serve again; network and cgroup never do.

        `descriptors`: of the sandbox, closed when it is taken apart."""
        if seat.ready is not None:
            self._mill.take_apart(seat.ready.group, seat.ready.network, *seat.ready.listeners, *descriptors)
        seat.ready = seat.draft = None
        self.spread(seat, 0)
        if self.spawner.running and len(self._spare) < _SPARE:
            self._spare.append(seat)
        elif self.spawner.running:
            self._dissolve(seat)
        elif self._slots is not None:
            self._slots.give(seat.owner)  # its namespace and mounts went with the spawner

    def _dissolve(self, seat: Seat) -> None:
        """After a peak not every seat that there was is kept."""
        self._seats = [each for each in self._seats if each is not seat]
        if self._slots is not None:
            self._drop([seat.users, *seat.layers.values()])
            self._slots.give(seat.owner)

    def refill(self) -> None:
        """Starts the background task that makes seats ready, unless it runs."""
        if self._refill is None or self._refill.done():
            self._refill = asyncio.get_running_loop().create_task(self._fill())

    async def _fill(self) -> None:
        """A moment later, and few at a time: whoever has just taken a seat is to have the processors first."""
        await asyncio.sleep(_REFILL_SECONDS if len(self._ready) > READY // 2 else 0)
        if self._dropped:
            plan = Plan()
            dropped = self._flush_drops(plan)
            with suppress(PlatformError):  # it died; the keys went with it
                await self.spawner.run(plan)
            self._free_keys.extend(dropped)
        while len(self._ready) < READY:
            few = 1 if len(self._ready) > READY // 2 else 4
            results = await asyncio.gather(*(self._prepare_one() for _ in range(few)), return_exceptions=True)
            if any(isinstance(result, BaseException) for result in results):
                return  # whoever needs a seat next will meet the error and can say it

    async def _prepare_one(self) -> None:
        seat = await self._make_seat()
        await self._equip(seat, "isolated")
        try:
            if self.prepare is not None:
                await self.prepare(seat)
        except ShoalError:
            self.give(seat)
            raise
        self._ready.append(seat)

    def limit(self, plan: Plan, seat: Seat, limits: Limits) -> None:
        """Adds the operations that set the seat's cgroup to these limits, if it is not."""
        assert seat.ready is not None
        self._cgroups.limit(plan, self._roots, seat.ready.group, limits)

    def spread(self, seat: Seat, count: int) -> tuple[int, ...]:
        """Chooses the processors that the seat's sandbox runs on, in place of those it had; empty for all."""
        self._processors.give(seat.processors)
        seat.processors = self._processors.take(count) if count else ()
        return seat.processors

    def accounting(self, seat: Seat) -> Accounting:
        """The seat's cgroup files, by kept descriptors."""
        assert seat.ready is not None
        groups, group = self._cgroups, seat.ready.group

        def named(place: tuple[str, str] | None) -> tuple[int, str] | None:
            return (self._roots[place[0]], place[1]) if place else None

        return Accounting(
            init_group=named(groups.init_group(group)),
            init_joins=tuple((self._roots[c], path) for c, path in groups.init_joins(group)),
            leaves=tuple((self._roots[c], path) for c, path in groups.leaves()),
            command_joins=tuple((self._roots[c], path) for c, path in groups.command_joins(group)),
            commands_group=named(groups.commands_group(group)),
            oom_events=named(groups.oom_events(group)),
            process_events=named(groups.process_events(group)),
            own_namespace=groups.own_namespaces,
        )

    async def abandon(self) -> None:
        """After the death of its spawner: ids that no sandbox has are free again. Those of live ones stay taken."""
        await self._stop_refill()
        for seat in (*self._ready, *self._spare):
            if seat.ready is not None:
                self._mill.take_apart(seat.ready.group, seat.ready.network, *seat.ready.listeners)
            if self._slots is not None:
                self._slots.give(seat.owner)
        self._ready.clear()
        self._spare.clear()

    async def _stop_refill(self) -> None:
        if self._refill is not None:
            self._refill.cancel()
            with suppress(asyncio.CancelledError):
                await self._refill

    async def close(self) -> None:
        await self._stop_refill()
        while self._ready:
            self.give(self._ready.popleft())
        await self.spawner.close()


def _batches(layers: list[Layer], most: int) -> Iterable[list[Layer]]:
    return (layers[start : start + most] for start in range(0, len(layers), most))
