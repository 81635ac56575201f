"""The namespace tier: Linux namespaces, overlay on read-only layers, cgroups and seccomp, with no container engine."""

from __future__ import annotations

import asyncio
import functools
import os
import select
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import msgspec

from shoal.errors import InvalidRequest, PlatformError, SandboxGone, Unsupported
from shoal.sandbox import apparmor
from shoal.sandbox.access import ALL, MEMORY, Access, check_tighter, executable, inspect, show, visit
from shoal.sandbox.audit import AuditLog
from shoal.sandbox.cgroup import Cgroups, Limits, find_hierarchies
from shoal.sandbox.channel import Channel, FileOperation, Process, Receiver, Request
from shoal.sandbox.compose import MOUNTS_MAX, Devices, Mount, Parts, compose
from shoal.sandbox.delegation import take_place
from shoal.sandbox.disk import make_upper
from shoal.sandbox.fanotify import FileWatch
from shoal.sandbox.frame import Kind
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
from shoal.sandbox.values import encode_list
from shoal.types import KiB, Layer, MiB

_DEATH_SECONDS: Final = 30.0
_DYING_MS: Final = 500
"""How long init's death may be on the way."""
_TMPFS_INODE: Final = 1 * KiB
"""What an empty file on a tmpfs costs; charged to the sandbox like everything in it."""
CHANNEL: Final = 0
"""Register of init's end of the channel: the first descriptor that is sent along."""
_DOMAINS_MAX: Final = 12
"""Of the 16 that Landlock nests; the others are for programs that confine themselves."""
_LOOK: Final = Request(["/"], [], "/", operation=FileOperation.STAT)


class NamespaceBox:
    """One sandbox of this tier."""

    def __init__(
        self, tier: NamespaceTier, spec: BoxSpec, shard: Shard, seat: Seat, on_end: Callable[[str, str], None]
    ) -> None:
        self.id = spec.id
        self._layers = spec.layers
        self.upper = -1
        self.mounts: tuple[str, ...] = ()
        self.listeners = seat.ready.listeners if seat.ready else ()
        self.writable = spec.profile.disk
        self.storage: Literal["memory", "disk"] = "disk" if spec.profile.upper == "disk" else "memory"
        self.audit = AuditLog(spec.audit.records)
        names = spec.audit.syscalls
        self._listener = Listener(names, self.audit, self._audit_lost) if names else None
        self._tier = tier
        self._shard = shard
        self._seat = seat
        self._on_end = on_end
        self._access = spec.access
        self._viewed = spec.access is not None
        self._domains = int(self._viewed)
        self._narrowing = asyncio.Lock()
        self._pid = 0
        self._watch: FileWatch | None = None
        self._judging: asyncio.Task[None] | None = None
        self._reason: str | None = None
        self._pidfd = -1
        self._channel: Channel | None = None
        self._dead = asyncio.get_running_loop().create_future()

    async def launch(self, plan: Plan, limits: Limits) -> None:
        """Carries the plan out, which sets these limits; returns when init answers."""
        ready = self._seat.ready
        assert ready is not None
        ready.group.limits = None  # nobody knows which, if the plan fails
        ours, theirs = socket.socketpair()
        if self._listener is None:
            self._channel = Channel(self.id, ours, plan, self._disconnected)
        try:
            reply = await self._shard.spawner.run(plan, [theirs.fileno(), ready.network])
        except BaseException:
            if self._channel is None:
                ours.close()
            raise
        finally:
            theirs.close()
        self.upper, self._pidfd = reply.descriptors
        self._pid = reply.pid
        ready.group.limits = limits
        self._tier.expect_exit(reply.pid, self)
        if self._listener is not None:
            try:
                await self._listener.start(ours, reply.pid)
            except BaseException:
                ours.close()
                raise
            self._channel = Channel(self.id, ours, plan, self._disconnected)
        assert self._channel is not None
        await self._channel.ready

    def start(self, request: Request, receive: Receiver, *, auto_credit: bool = True) -> Process:
        if self._channel is None or self._reason is not None:
            raise SandboxGone(self.id, self._reason or "lost")
        return self._channel.start(request, receive, auto_credit=auto_credit)

    async def set_access(self, access: Access) -> None:
        async with self._narrowing:
            old = self._access or ALL
            check_tighter(old, access)
            if access == old:
                return
            if self._domains == _DOMAINS_MAX:
                raise Unsupported(f"access: tightened {_DOMAINS_MAX} times, which is all; make another sandbox")
            await self._settle()
            assert self._channel is not None
            look = await self._shard.spawner.run(inspect(self._pid, access, self.mounts, old))
            if self._viewed:
                os.close(*look.descriptors)
            else:
                await self._channel.give(Kind.NARROW, encode_list([]), look.descriptors)
                self._viewed = True
            await self._shard.spawner.run(visit(self._pid, access, self.mounts, old))
            # Each time a domain within the last: what starts now can't look into what has seen more.
            await self._channel.give(Kind.NARROW, encode_list(executable(access)), ())
            self._domains += 1
            self._access = access

    async def watch_files(self) -> None:
        """From now on every file that is opened or executed is written down. Unsupported where that can't be had."""
        await self._settle()
        self._watch = watch = FileWatch(self.audit)
        for number, path in enumerate((MEMORY, *self.mounts)):
            (descriptor,) = (await self._shard.spawner.run(show(self._pid, path))).descriptors
            try:
                watch.add(descriptor, whole=number > 0)
            finally:
                os.close(descriptor)

    async def _settle(self) -> None:
        """Once init does anything at all the spawner's tree is gone from on top of the sandbox's. Before, a plan that
        visits the sandbox would find that one."""
        await self.start(_LOOK, lambda _stream, _data: None).ended
        if self._channel is None or self._reason is not None:
            raise SandboxGone(self.id, self._reason or "lost")

    async def lowers(self) -> list[list[int]]:
        by_target = [[layer for layer in self._layers if layer.target == target] for target in self.mounts]
        descriptors = iter(await self._shard.share(layer for layers in by_target for layer in layers))
        return [[next(descriptors) for _ in layers] for layers in by_target]

    async def kill(self, reason: str) -> None:
        self._end(reason)
        if self._pidfd >= 0:
            try:
                async with asyncio.timeout(_DEATH_SECONDS):
                    await asyncio.shield(self._dead)
            except TimeoutError as error:
                raise PlatformError(f"sandbox {self.id}: a process of it is stuck in the kernel") from error
        else:
            self.exited()

    def _end(self, reason: str) -> None:
        """Once; the first reason stands."""
        if self._reason is not None:
            return
        self._reason = reason
        if self._pidfd >= 0 and not self._dead.done():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)  # with init all of its PID namespace dies
        if self._channel is not None:
            self._channel.close(reason)

    def _audit_lost(self) -> None:
        """The listener ended: alone, or because all whom it listened to are dead, which is told before init's death is.
        Until it is known no result counts: what was audited may have failed for want of a listener."""
        if self._channel is not None and self._pidfd >= 0:
            self._channel.hold()
            self._judging = asyncio.get_running_loop().create_task(self._judge(os.dup(self._pidfd), self._channel))

    async def _judge(self, init: int, channel: Channel) -> None:
        dead = select.poll()
        dead.register(init, select.POLLIN)
        try:
            if not await asyncio.to_thread(dead.poll, _DYING_MS):
                self._end("audit_lost")
        finally:
            os.close(init)
            channel.resume()

    def _disconnected(self, reason: str) -> None:
        self._end(reason)

    def forsake(self) -> None:
        """See `NamespaceTier.forsake`."""
        if self._listener is not None:
            self._listener.forsake()
        if self._channel is not None:
            self._channel.forsake()
        if self._watch is not None:
            self._watch.forsake()
            self._watch = None
        for descriptor in (self._pidfd, self.upper):
            if descriptor >= 0:
                os.close(descriptor)
        self._pidfd = self.upper = -1

    def belongs_to(self, shard: Shard) -> bool:
        return self._shard is shard

    def lost(self) -> None:
        """Its spawner died: the kernel tells of init's death by the pidfd then."""
        self._end("lost")
        loop = asyncio.get_running_loop()

        def dead() -> None:
            loop.remove_reader(self._pidfd)
            self.exited()

        loop.add_reader(self._pidfd, dead)

    def exited(self) -> None:
        """Its init is dead, and with it every process of its PID namespace."""
        if self._dead.done():
            return
        self._dead.set_result(None)
        self._end("init_died")
        if self._listener is not None:
            self._tier.await_listener(self._listener)
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        held = [descriptor for descriptor in (self._pidfd, self.upper) if descriptor >= 0]
        self._pidfd = self.upper = -1
        self._shard.live -= 1
        self._shard.give(self._seat, *held)
        self._on_end(self.id, self._reason or "init_died")


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
