"""One sandbox of the namespace tier, from its launch to its end."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal

from shoal.errors import PlatformError, SandboxGone, Unsupported
from shoal.sandbox.access import ALL, MEMORY, Access, check_tighter, executable, inspect, show, visit
from shoal.sandbox.audit import AuditLog
from shoal.sandbox.cgroup import Limits
from shoal.sandbox.channel import Channel, FileOperation, Process, Receiver, Request
from shoal.sandbox.fanotify import FileWatch
from shoal.sandbox.frame import Kind
from shoal.sandbox.interface import BoxSpec
from shoal.sandbox.listener import Listener
from shoal.sandbox.plan import Plan
from shoal.sandbox.shard import Seat, Shard
from shoal.sandbox.values import encode_list

if TYPE_CHECKING:
    from shoal.sandbox.namespace import NamespaceTier

_DEATH_SECONDS: Final = 30.0
_DYING_MS: Final = 500
"""How long init's death may be on the way."""
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
