"""The namespace tier: Linux namespaces, overlay on read-only layers, cgroups and seccomp, with no container engine."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from shoal.errors import InvalidRequest, PlatformError
from shoal.sandbox import apparmor
from shoal.sandbox.box import NamespaceBox
from shoal.sandbox.cgroup import Cgroups, Limits, find_hierarchies
from shoal.sandbox.compose import MOUNTS_MAX, Devices, Mount, Parts, compose
from shoal.sandbox.delegation import take_place
from shoal.sandbox.disk import make_upper
from shoal.sandbox.interface import BoxSpec
from shoal.sandbox.leftovers import claim, sweep
from shoal.sandbox.listener import Listener, check
from shoal.sandbox.machine import fill, processors
from shoal.sandbox.mill import Mill
from shoal.sandbox.plan import Plan
from shoal.sandbox.processors import Processors, as_mask
from shoal.sandbox.room import Rooms
from shoal.sandbox.seccomp import compile_filter
from shoal.sandbox.shard import Seat, Shard
from shoal.sandbox.slots import Slots
from shoal.sandbox.trees import DEVICES, MountPoints
from shoal.types import KiB, Layer, MiB

_TMPFS_INODE: Final = 1 * KiB
"""What an empty file on a tmpfs costs; charged to the sandbox like everything in it."""
CHANNEL: Final = 0
"""Register of init's end of the channel: the first descriptor that is sent along."""


class NamespaceTier:
    """Makes namespace sandboxes with one spawner for each processor."""

    capabilities: tuple[str, ...] = ("pty",)
    layered = True
    prefix = "sb"

    def __init__(self, run_dir: Path, disk: Path, networks: Mapping[str, Plan], *, shards: int | None = None) -> None:
        """`disk`: folder for writable layers on disk. `networks`: set-up of a network namespace by kind, as a plan."""
        self._disk = disk
        self._root = os.geteuid() == 0
        hierarchies = take_place(
            find_hierarchies(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
        )
        sweep(hierarchies, run_dir)
        name, self._claim = claim(run_dir)
        self.cgroups = Cgroups(hierarchies, name)
        self._mill = Mill(networks, self.cgroups, root=self._root)
        # Processes can be counted without a cgroup: by the one user that an ordinary user's sandbox has.
        self.unenforced = tuple(name for name in self.cgroups.unenforced if name != "processes")
        self._slots = Slots(run_dir / "slots") if self._root else None
        self._mount_points = MountPoints(run_dir / "trees")
        self._count = shards or min(os.cpu_count() or 1, 16)
        self._shards: list[Shard] = []
        self._devices: dict[int, Devices] = {}
        self._replacing: asyncio.Task[None] | None = None
        self._boxes: dict[int, NamespaceBox] = {}
        self._early_exits: set[int] = set()
        self._seccomp = b""
        self._apparmor = False
        self._closing: set[asyncio.Task[None]] = set()
        self._points: dict[tuple[str, ...], Layer] = {}
        self._rooms = Rooms(disk)
        self._processors = Processors()

    async def start(self) -> None:
        self._seccomp = compile_filter()
        self._apparmor = apparmor.is_loaded()
        await self._mill.start()
        for _ in range(self._count):
            shard = self._new_shard()
            await self._start(shard)

    async def _start(self, shard: Shard) -> None:
        await shard.start()
        if not self._root:
            keys = [(name, await shard.open_device(f"/dev/{name}")) for name in DEVICES]
            self._devices[id(shard)] = Devices(tuple(keys))
        self._shards.append(shard)
        shard.refill()

    def _new_shard(self) -> Shard:
        return Shard(
            cgroups=self.cgroups,
            mill=self._mill,
            processors=self._processors,
            slots=self._slots,
            on_exit=self._exited,
            on_lost=self._spawner_lost,
        )

    # Making

    async def create(self, spec: BoxSpec, on_end: Callable[[str, str], None]) -> NamespaceBox:
        try:
            return await self._create(spec, on_end)
        except PlatformError:
            if all(shard.spawner.running for shard in self._shards) and self._shards:
                raise
        return await self._create(spec, on_end)  # a spawner died under it, before anything of the caller's ran

    async def _create(self, spec: BoxSpec, on_end: Callable[[str, str], None]) -> NamespaceBox:
        # Refuses before anything is taken.
        spec = msgspec.structs.replace(spec, profile=self._rooms.settle(spec.profile))
        check(spec.audit.syscalls)
        shard = await self._choose()
        shard.live += 1
        try:
            seat = await shard.take(spec.network)
        except BaseException:
            shard.live -= 1
            raise
        box = NamespaceBox(self, spec, shard, seat, on_end)
        box.mounts = self._targets(spec.layers)
        launch = asyncio.get_running_loop().create_task(self._launch(box, spec, shard, seat))
        try:
            await asyncio.shield(launch)
            if spec.audit.files:
                await box.watch_files()
        except BaseException:
            # Also when the caller gave up: what was begun is finished first, so that there is something to end.
            await asyncio.wait([launch])
            if not launch.cancelled():
                launch.exception()  # told by what is raised here, or of no interest to who gave up
            await box.kill("killed")
            raise
        return box

    async def _launch(self, box: NamespaceBox, spec: BoxSpec, shard: Shard, seat: Seat) -> None:
        if spec.profile.upper == "disk":
            await self._launch_on_disk(box, spec, shard, seat)
            return
        kind = _kind(spec)
        if seat.draft is None or seat.draft[0] != kind:
            await self._draft(kind, spec, shard, seat)
        assert seat.draft is not None
        shard.prepare = functools.partial(self._draft, kind, spec, shard)
        await box.launch(self._placed(seat.draft[1], spec, shard, seat), self._limits(spec))

    async def _launch_on_disk(self, box: NamespaceBox, spec: BoxSpec, shard: Shard, seat: Seat) -> None:
        upper = await make_upper(self._disk, spec.profile.disk, spec.profile.inode_limit)
        try:
            plan = await self._plan(spec, shard, seat, upper.device)
            await box.launch(self._placed(plan, spec, shard, seat), self._limits(spec))
        finally:
            upper.close()

    def _placed(self, plan: Plan, spec: BoxSpec, shard: Shard, seat: Seat) -> Plan:
        """The plan on processors that are chosen now, when it is known how many sandboxes are on each."""
        chosen = shard.spread(seat, processors(spec.profile, self._processors.count))
        if not chosen:
            return plan
        placed = Plan()
        placed.add("affinity", as_mask(chosen))
        placed.extend(plan)
        return placed

    async def _draft(self, kind: object, spec: BoxSpec, shard: Shard, seat: Seat) -> None:
        seat.draft = (kind, await self._plan(spec, shard, seat))

    @staticmethod
    def _limits(spec: BoxSpec) -> Limits:
        in_memory = spec.profile.disk + spec.profile.inode_limit * _TMPFS_INODE
        return Limits(spec.profile, 0 if spec.profile.upper == "disk" else in_memory)

    async def _plan(self, spec: BoxSpec, shard: Shard, seat: Seat, device: str | None = None) -> Plan:
        targets = self._targets(spec.layers)
        if len(targets) > MOUNTS_MAX:
            raise InvalidRequest("layers", f"{len(targets)} of them have a place of their own; {MOUNTS_MAX} can")
        by_target = {target: [layer for layer in spec.layers if layer.target == target] for target in targets}
        by_target["/"].append(self._points_layer(targets))
        ordered = [layer for target in targets for layer in by_target[target]]
        count, memory = processors(spec.profile, self._processors.count), spec.profile.memory
        shown = await shard.add_tree(f"machine:{count}:{memory}", lambda root: fill(root, count, memory))
        needed = (*ordered, shown)
        found = await shard.layer_keys(seat, needed)
        keys = {layer.digest: key for layer, key in zip(needed, found, strict=True)}
        shard.usual = limits = self._limits(spec)
        plan = Plan()
        shard.limit(plan, seat, limits)
        compose(
            plan,
            Parts(
                hostname=spec.hostname,
                owner=seat.owner,
                users=seat.users,
                mounts=tuple(
                    Mount(target, tuple(keys[layer.digest] for layer in by_target[target])) for target in targets
                ),
                writable=max(spec.profile.disk, 1 * MiB),
                inodes=spec.profile.inode_limit,
                device=device,
                open_files=spec.profile.open_files,
                processes=spec.profile.processes if "processes" in self.cgroups.unenforced else 0,
                sys=keys[shown.digest],
                devices=self._devices.get(id(shard), Devices()),
                accounting=shard.accounting(seat),
                seccomp=b"" if spec.audit.syscalls else self._seccomp,
                access=spec.access,
            ),
        )
        if self._apparmor:
            apparmor.confine(plan)
        if spec.audit.syscalls:
            plan.add("seccomp_audited", CHANNEL, compile_filter(spec.audit.syscalls))
        return plan

    @staticmethod
    def _targets(layers: Iterable[Layer]) -> tuple[str, ...]:
        """The root first; a mount below another comes after it."""
        return tuple(sorted({"/", *(layer.target for layer in layers)}))

    def _points_layer(self, targets: tuple[str, ...]) -> Layer:
        if targets not in self._points:
            path = self._mount_points.tree(targets, devices=not self._root)
            self._points[targets] = Layer(digest=f"tree:{path}", source=str(path))
        return self._points[targets]

    # Ending

    def expect_exit(self, pid: int, box: NamespaceBox) -> None:
        if pid in self._early_exits:
            self._early_exits.discard(pid)
            box.exited()
        else:
            self._boxes[pid] = box

    def await_listener(self, listener: Listener) -> None:
        """Of a sandbox that has ended."""
        listener.close()
        task = asyncio.get_running_loop().create_task(listener.closed())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _exited(self, pid: int, _status: int) -> None:
        box = self._boxes.pop(pid, None)
        if box is not None:
            box.exited()
        else:
            self._early_exits.add(pid)

    def _spawner_lost(self) -> None:
        """Without it no death is reported. Its sandboxes are ended and said to be lost; another takes its place."""
        for shard in [shard for shard in self._shards if not shard.spawner.running]:
            self._shards.remove(shard)
            for pid, box in list(self._boxes.items()):
                if box.belongs_to(shard):
                    del self._boxes[pid]
                    box.lost()
            self._replacing = asyncio.get_running_loop().create_task(self._replace(shard))

    async def _replace(self, lost: Shard) -> None:
        await lost.abandon()
        await self._start(self._new_shard())

    async def _choose(self) -> Shard:
        """The one with the fewest sandboxes; of equals the one with more seats ready."""
        while not self._shards:
            if self._replacing is None:
                raise PlatformError("this node has no spawner: it was closed, or none could be started")
            await asyncio.shield(self._replacing)
        return min(self._shards, key=lambda shard: (shard.live, -shard.ready))

    async def forget(self, digests: Sequence[str]) -> None:
        for shard in list(self._shards):
            await shard.forget(digests)

    def forsake(self) -> None:
        """In a forked child of the node: lets go of everything that would keep sandboxes alive after their node."""
        self._mill.forsake()
        self.cgroups.forsake()
        for shard in self._shards:
            shard.spawner.forsake()
        for box in self._boxes.values():
            box.forsake()

    async def close(self) -> None:
        await asyncio.gather(*(box.kill("node_closed") for box in list(self._boxes.values())), return_exceptions=True)
        await asyncio.gather(*self._closing)
        for shard in self._shards:
            await shard.close()
        await self._mill.close()
        self.cgroups.close()
        self._claim.release()
        if self._slots is not None:
            self._slots.close()


def _kind(spec: BoxSpec) -> object:
    """Equal for sandboxes whose plans differ in nothing but the seat."""
    layers = tuple((layer.digest, layer.target) for layer in spec.layers)
    return spec.hostname, spec.profile, spec.network, spec.access, layers, spec.audit.syscalls
