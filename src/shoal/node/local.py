"""A node in this process: sandboxes, layers and environments of this machine."""

from __future__ import annotations

import asyncio
import functools
import os
import resource
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from shoal.errors import InvalidRequest, LimitExceeded, NotFound, SandboxGone, SetupFailed, Unsupported
from shoal.image.catalog import Catalog
from shoal.image.garbage import Policy, Removal, collect
from shoal.image.store import Store
from shoal.network.index import PackageIndex, read_package_index
from shoal.node.access import plain_access, refused
from shoal.node.changes import Changes, Trees, changes_between, count_changes, find_changes
from shoal.node.commands import check_env, check_seconds
from shoal.node.diff import DIFF_MAX, make_diff
from shoal.node.files import READ_MAX, Files, check_path
from shoal.node.images import Images, environment
from shoal.node.interface import CommandRequest, CreateRequest, Output, ShellCommand, ShellEnd, ShellRequest
from shoal.node.marks import take_mark
from shoal.node.networks import sandbox_network
from shoal.node.sandboxes import Sandbox
from shoal.node.tiers import Tiers, machine_image, tier_makers
from shoal.node.watch import WATCHES_MAX, Watch
from shoal.sandbox.interface import Box, BoxSpec, Tier
from shoal.types import (
    PROFILES,
    AccessPolicy,
    Audit,
    AuditRecord,
    Change,
    CommandInfo,
    FileEvent,
    FileInfo,
    Layer,
    Profile,
    Result,
    SandboxInfo,
    Unclaimed,
)

T = TypeVar("T")

_REMEMBERED: Final = 10_000
"""Ended sandboxes whose reason is still known."""


AUDIT_RECORDS_MAX: Final = 1_000_000
"""Of one sandbox; one takes up to a kilobyte."""


class LocalNode:
    """Implements `node.interface.Node`. All of it runs on one event loop."""

    def __init__(self, data: Path, run: Path) -> None:
        """`data`: where layers are kept. `run`: locks and small trees, shared with other nodes of this machine."""
        self.data = data
        self._run = run
        self._sandboxes: dict[str, Sandbox] = {}
        self._gone: OrderedDict[str, str] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Tiers are started by the first sandbox of each: a machine that can't run one may run another."""
        _raise_open_files()
        self.store = await asyncio.to_thread(Store, self.data / "store")
        self.images = Images(self.store, await asyncio.to_thread(Catalog, self.store))
        self.index: PackageIndex = await asyncio.to_thread(read_package_index)
        self.tiers = Tiers(tier_makers(self.data, self._run))

    def forsake(self) -> None:
        """In a forked child of this process: the sandboxes are the parent's, and must end with it."""
        self.tiers.forsake()
        self.images.holds.close()

    async def close(self) -> None:
        """Ends every sandbox; returns when nothing of them is left."""
        await self.tiers.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.images.holds.close()

    # Sandboxes

    async def create(self, request: CreateRequest) -> SandboxInfo:
        profile = _profile(request)
        _check(request)
        tier = await self.tiers.get(request.tier)
        image = await self.images.get(request.image) if tier.layered else machine_image(request)
        layers = self.images.resolve(request)
        network = sandbox_network(request.network, self.index)
        id = f"{tier.prefix}-{secrets.token_hex(8)}"
        spec = BoxSpec(
            id=id,
            hostname="sandbox",
            layers=tuple(layer for layer in (*layers, *image.layers) if layer.format != "stack"),
            profile=profile,
            network="isolated" if network is None else "filtered",
            access=None if request.access is None else plain_access(request.access),
            audit=request.audit,
        )
        held = (*layers, *image.layers)
        box = await self._make(tier, spec, held)
        info = SandboxInfo(
            id=id,
            state="running",
            image=image.digest,
            layers=tuple(layer.digest for layer in layers),
            profile=msgspec.structs.replace(profile, disk=box.writable, upper=box.storage),
            tier=request.tier,
            created=time.time(),
            metadata=dict(request.metadata),
            unenforced=tier.unenforced,
            capabilities=tier.capabilities,
        )
        sandbox = Sandbox(box, info, request, environment(image, layers), network)
        sandbox.layers = held
        self._sandboxes[id] = sandbox
        if network is not None:
            network.start(box.listeners)
        if request.ttl is not None:
            sandbox.clock = asyncio.get_running_loop().call_later(request.ttl, self._expire, box)
        return info

    async def _make(self, tier: Tier, spec: BoxSpec, held: tuple[Layer, ...]) -> Box:
        """Its layers stay in the store from before it is made until it has ended."""
        self.images.holds.take(held)
        try:
            box = await tier.create(spec, self._ended)
            if spec.id in self._gone:  # its init died before we were told that it lives
                raise SandboxGone(spec.id, self._gone[spec.id])
        except BaseException as error:
            self.images.holds.give(held)
            if isinstance(error, SetupFailed):
                raise refused(error) from None
            raise
        return box

    def _expire(self, box: Box) -> None:
        self._keep(box.kill("lease_expired"))

    def _ended(self, id: str, reason: str) -> None:
        self._gone[id] = reason
        while len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)
        if (sandbox := self._sandboxes.pop(id, None)) is not None:
            self._keep(self._clear(sandbox))

    async def _clear(self, sandbox: Sandbox) -> None:
        await sandbox.close()
        self.images.holds.give(sandbox.layers)
        if superfluous := self.images.superfluous():
            await self._release(superfluous)

    async def _release(self, digests: list[str]) -> None:
        """Layers that no sandbox uses: unmounted first, so that they may be removed."""
        for tier in self.tiers.started.values():
            await tier.forget(digests)
        self.images.holds.release(digests)

    async def collect(self, policy: Policy) -> Removal:
        """Removes layers that the policy lets go, also those that this node kept for the next sandbox."""
        await self._release(self.images.holds.idle())
        return await asyncio.to_thread(collect, self.store, policy)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _find(self, id: str) -> Sandbox:
        if (sandbox := self._sandboxes.get(id)) is not None:
            return sandbox
        if (reason := self._gone.get(id)) is not None:
            raise SandboxGone(id, reason)
        raise NotFound(f"no sandbox {id} on this node")

    async def info(self, sandbox: str) -> SandboxInfo:
        return self._find(sandbox).info

    async def list_sandboxes(self) -> list[SandboxInfo]:
        return [sandbox.info for sandbox in self._sandboxes.values()]

    async def kill(self, sandbox: str) -> None:
        """NotFound for one that never was; one that has ended is no error."""
        if sandbox not in self._gone:
            await self._find(sandbox).box.kill("killed")

    async def set_access(self, sandbox: str, policy: AccessPolicy) -> None:
        try:
            holder = self._find(sandbox)
            access = plain_access(policy)
            await holder.box.set_access(access)
            holder.access = policy
        except SetupFailed as error:
            raise refused(error) from None

    def upper(self, sandbox: str) -> int:
        """A directory descriptor of what it wrote; closed when it ends."""
        return self._find(sandbox).box.upper

    # Commands

    async def run(self, sandbox: str, request: CommandRequest) -> Result:
        holder = self._find(sandbox)
        if not request.changes:
            return await holder.run(request)
        before = await self._changes(sandbox)
        result = await holder.run(request)
        counts = count_changes(before, await self._changes(sandbox))
        return msgspec.structs.replace(result, changes=counts)

    async def start(self, sandbox: str, request: CommandRequest) -> tuple[int, int]:
        command = await self._find(sandbox).start_in_background(request)
        return command.process.id, command.process.pid.result()

    async def output(self, sandbox: str, command: int, offset: int = 0, reader: str = "") -> list[Output]:
        return await self._find(sandbox).command(command).retained.read(reader, offset)

    async def leave_output(self, sandbox: str, command: int, reader: str = "") -> None:
        self._find(sandbox).command(command).retained.leave(reader)

    async def wait(self, sandbox: str, command: int, reader: str = "") -> Result:
        running = self._find(sandbox).command(command)
        running.retained.leave(reader)
        result = await running.wait()
        if running.held:
            self._find(sandbox).commands.forget(command)
        return result

    async def list_commands(self, sandbox: str) -> list[CommandInfo]:
        return [command.info() for command in self._find(sandbox).commands if not command.held]

    async def find_command(self, sandbox: str, command: int) -> CommandInfo:
        return self._find(sandbox).command(command).info()

    async def signal(self, sandbox: str, command: int, signal: int) -> None:
        if not 0 < signal < 65:
            raise InvalidRequest("signal", f"takes 1 to 64, not {signal!r}")
        self._find(sandbox).command(command).process.kill(signal, tree=signal == 9)

    async def send_stdin(self, sandbox: str, command: int, data: bytes) -> None:
        await self._find(sandbox).command(command).process.send_input(data)

    async def close_stdin(self, sandbox: str, command: int) -> None:
        self._find(sandbox).command(command).process.close_input()

    async def resize(self, sandbox: str, command: int, cols: int, rows: int) -> None:
        self._find(sandbox).command(command).process.resize(rows, cols)

    # Sessions

    async def open_shell(self, sandbox: str, request: ShellRequest) -> tuple[int, int]:
        return await self._find(sandbox).open_shell(request)

    async def run_in_shell(self, sandbox: str, shell: int, command: ShellCommand) -> ShellEnd:
        return await self._find(sandbox).shell(shell).run(command)

    async def stream_in_shell(
        self, sandbox: str, shell: int, command: ShellCommand
    ) -> AsyncIterator[Output | ShellEnd]:
        async for piece in self._find(sandbox).shell(shell).stream(command):
            yield piece

    async def unclaimed(self, sandbox: str, shell: int) -> Unclaimed:
        return self._find(sandbox).shell(shell).take_unclaimed()

    async def close_shell(self, sandbox: str, shell: int) -> None:
        await self._find(sandbox).shell(shell).close()

    # Files

    async def _files(self, sandbox: str, user: str | int | None) -> Files:
        holder = self._find(sandbox)
        return holder.files(await holder.account(user))

    async def read_file(self, sandbox: str, path: str, user: str | int | None = None, limit: int = READ_MAX) -> bytes:
        return await (await self._files(sandbox, user)).read(path, limit)

    async def stream_file(self, sandbox: str, path: str, user: str | int | None = None) -> AsyncIterator[bytes]:
        async with aclosing((await self._files(sandbox, user)).stream(path)) as pieces:
            async for piece in pieces:
                yield piece

    async def write_file(
        self,
        sandbox: str,
        path: str,
        data: bytes | AsyncIterator[bytes],
        mode: int | None = None,
        user: str | int | None = None,
    ) -> None:
        await (await self._files(sandbox, user)).write(path, data, mode)

    async def append_file(
        self, sandbox: str, path: str, data: bytes | AsyncIterator[bytes], user: str | int | None = None
    ) -> None:
        await (await self._files(sandbox, user)).append(path, data)

    async def pack_files(self, sandbox: str, path: str, user: str | int | None = None) -> AsyncIterator[bytes]:
        async with aclosing((await self._files(sandbox, user)).pack(path)) as pieces:
            async for piece in pieces:
                yield piece

    async def unpack_files(
        self,
        sandbox: str,
        path: str,
        data: AsyncIterator[bytes],
        user: str | int | None = None,
        owners: bool = False,
    ) -> None:
        await (await self._files(sandbox, user)).unpack(path, data, owners=owners)

    async def watch_files(self, sandbox: str, path: str, recursive: bool = False, user: str | int | None = None) -> int:
        watches = self._find(sandbox).watches
        if len(watches) >= WATCHES_MAX:
            raise LimitExceeded(f"watches of sandbox {sandbox}", WATCHES_MAX)
        files = await self._files(sandbox, user)
        id = secrets.randbits(53)
        watches[id] = watch = Watch(path)
        try:
            await watch.open(files, recursive=recursive)
        except BaseException:
            del watches[id]
            raise
        return id

    async def file_events(self, sandbox: str, watch: int, timeout: float | None = None) -> list[FileEvent]:
        check_seconds("timeout", timeout)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                return await self._find(sandbox).watch(watch).events()
        return []

    async def end_watch(self, sandbox: str, watch: int) -> None:
        """One that has ended, or whose sandbox has, is no error."""
        holder = self._sandboxes.get(sandbox)
        if holder is not None and (found := holder.watches.pop(watch, None)) is not None:
            found.close()

    async def list_files(self, sandbox: str, path: str, depth: int = 1) -> list[FileInfo]:
        return await (await self._files(sandbox, None)).list(path, depth)

    async def stat_file(self, sandbox: str, path: str) -> FileInfo:
        return await (await self._files(sandbox, None)).stat(path)

    async def make_dir(self, sandbox: str, path: str, mode: int = 0o755) -> None:
        await (await self._files(sandbox, None)).make_dir(path, mode)

    async def remove_file(self, sandbox: str, path: str) -> None:
        await (await self._files(sandbox, None)).remove(path)

    async def rename_file(self, sandbox: str, old: str, new: str) -> None:
        await (await self._files(sandbox, None)).rename(old, new)

    async def symlink_file(self, sandbox: str, path: str, target: str) -> None:
        await (await self._files(sandbox, None)).symlink(path, target)

    async def changes(self, sandbox: str, since: int | None = None) -> list[Change]:
        before: Changes = {} if since is None else self._find(sandbox).marks.get(since).changes
        now = await self._changes(sandbox)
        return sorted(changes_between(before, now))

    async def audit(self, sandbox: str, since: float = 0.0) -> list[AuditRecord]:
        return self._find(sandbox).box.audit.since(since)

    async def _changes(self, sandbox: str) -> Changes:
        return await self._look(sandbox, find_changes)

    async def mark(self, sandbox: str) -> int:
        return self._find(sandbox).marks.add(await self._look(sandbox, take_mark))

    async def diff(self, sandbox: str, since: int | None = None, path: str = "/", limit: int = DIFF_MAX) -> str:
        check_path(path)
        mark = None if since is None else self._find(sandbox).marks.get(since)
        return await self._look(sandbox, functools.partial(make_diff, mark, path, limit))

    async def _look(self, sandbox: str, look: Callable[[Trees], T]) -> T:
        """At what it wrote, and at its layers below that, in a thread of its own."""
        box = self._find(sandbox).box
        upper = os.dup(box.upper)
        lowers = await box.lowers()
        try:
            return await asyncio.to_thread(look, Trees(upper, box.mounts, lowers))
        finally:
            for descriptor in (upper, *(layer for layers in lowers for layer in layers)):
                os.close(descriptor)


def _profile(request: CreateRequest) -> Profile:
    if isinstance(request.profile, Profile):
        found = request.profile
    elif request.profile in PROFILES:
        found = PROFILES[request.profile]
    else:
        raise InvalidRequest("profile", f"{request.profile!r} is not one of {', '.join(PROFILES)}")
    if found.gpu:
        raise Unsupported("profile.gpu: this version has no GPU sandboxes")
    for field, least in (
        ("cpu", 0.01),
        ("memory", 1 << 20),
        ("disk", 1 << 20),
        ("processes", 1),
        ("open_files", 16),
        ("output", 1 << 10),
    ):
        if getattr(found, field) < least:
            raise InvalidRequest(f"profile.{field}", f"takes {least} or more, not {getattr(found, field)!r}")
    return found


def _check(request: CreateRequest) -> None:
    if not request.cwd.startswith("/"):
        raise InvalidRequest("cwd", f"takes an absolute path, not {request.cwd!r}")
    check_seconds("ttl", request.ttl)
    check_env(request.env)
    _check_audit(request.audit)


def _check_audit(audit: Audit) -> None:
    names: object = audit.syscalls
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise InvalidRequest("audit.syscalls", f"takes names of system calls, not {names!r}")
    if not 0 < audit.records <= AUDIT_RECORDS_MAX:
        raise InvalidRequest("audit.records", f"takes 1 to {AUDIT_RECORDS_MAX}, not {audit.records!r}")


def _raise_open_files() -> None:
    """Three descriptors a sandbox: the soft limit of 1,024 would end at some 300."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
