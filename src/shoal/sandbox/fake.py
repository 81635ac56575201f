"""The fake tier: a folder and plain child processes, for users' own tests on machines that cannot run sandboxes.

It isolates nothing. Commands are programs of this machine, run as the caller, and can do all that the caller can;
absolute paths in them are the machine's. File operations and working directories stay below the folder, which guards
against mistakes and not against malice.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import struct
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal, Protocol

from shoal.errors import SandboxGone, Unsupported
from shoal.sandbox.access import Access
from shoal.sandbox.audit import AuditLog
from shoal.sandbox.channel import FileOperation, Flag, Process, Receiver, Request, refusal
from shoal.sandbox.fake_commands import CommandRun
from shoal.sandbox.fake_files import FileRun, resolve
from shoal.sandbox.frame import Kind
from shoal.sandbox.interface import BoxSpec
from shoal.sandbox.values import decode_list

_FOLDERS: Final = ("workspace", "tmp", "root")
_FLAGS: Final = Flag.STDIN | Flag.REPORT_PID
_DEATH_SECONDS: Final = 10.0


class Run(Protocol):
    """What stands behind a process; the verbs are the frames that an init would get."""

    def input(self, data: bytes) -> None: ...
    def close_input(self) -> None: ...
    def credit(self, stream: int, count: int) -> None: ...
    def kill(self, signal: int) -> None: ...
    def close(self) -> None: ...


class FakeTier:
    """Makes fake boxes."""

    unenforced: tuple[str, ...] = (
        "isolation",
        "network",
        "user",
        "cpu",
        "memory",
        "disk",
        "processes",
        "inodes",
        "open_files",
    )
    capabilities: tuple[str, ...] = ()
    layered = False
    prefix = "fake"

    def __init__(self) -> None:
        self._boxes: dict[str, FakeBox] = {}

    async def start(self) -> None:
        """There is nothing to start."""

    async def create(self, spec: BoxSpec, on_end: Callable[[str, str], None]) -> FakeBox:
        if spec.access is not None:
            raise Unsupported("access: the fake tier keeps nobody from anything; use tier='namespace'")
        if spec.audit.syscalls or spec.audit.files:
            raise Unsupported("audit: the fake tier writes nothing down; use tier='namespace'")

        def ended(id: str, reason: str) -> None:
            self._boxes.pop(id, None)
            on_end(id, reason)

        box = self._boxes[spec.id] = FakeBox(spec, ended)
        return box

    async def forget(self, _digests: Sequence[str]) -> None:
        """It has no layers."""

    async def close(self) -> None:
        await asyncio.gather(*(box.kill("node_closed") for box in list(self._boxes.values())))

    def forsake(self) -> None:
        """In a forked child of the node: folders and processes are the parent's."""
        self._boxes.clear()


class FakeBox:
    """A folder, and the processes that were started for it."""

    def __init__(self, spec: BoxSpec, on_end: Callable[[str, str], None]) -> None:
        self.id = spec.id
        self.mounts: tuple[str, ...] = ("/",)
        self.listeners: tuple[int, ...] = ()
        self.writable = spec.profile.disk
        self.storage: Literal["memory", "disk"] = "disk"
        self.audit = AuditLog(spec.audit.records)
        self._on_end = on_end
        self._folder = Path(tempfile.mkdtemp(prefix=f"shoal-{spec.id}-"))
        for name in _FOLDERS:
            for tree in ("up0", "base"):  # what is there now, and what it is compared with
                (self._folder / tree / name).mkdir(parents=True)
        self._root = self._folder / "up0"
        self.upper = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._runs: dict[int, tuple[Process, Run]] = {}
        self._groups: dict[int, CommandRun] = {}
        self._next = 1
        self._reason: str | None = None
        self._dead = asyncio.get_running_loop().create_future()

    def start(self, request: Request, receive: Receiver, *, auto_credit: bool = True) -> Process:
        if self._reason is not None:
            raise SandboxGone(self.id, self._reason)
        _refuse(request)
        process = Process(self, self._next, receive, auto_credit)
        self._next += 1
        if request.operation > 0:
            self._add(process, FileRun(self._root, request, process))
        else:
            self._start_command(request, process)
        return process

    def _start_command(self, request: Request, process: Process) -> None:
        step = "cwd"
        try:
            cwd = resolve(self._root, request.cwd)
            os.listdir(cwd)
            step = "program"
            run = CommandRun(request, cwd, self._environment(request), process)
        except OSError as error:
            process.finish(refusal(error.errno or errno.EIO, step))
            return
        self._groups = {group: each for group, each in self._groups.items() if each.lives()}
        self._groups[run.group] = run
        self._add(process, run)

    def _add(self, process: Process, run: Run) -> None:
        self._runs[process.id] = (process, run)
        process.ended.add_done_callback(lambda _: self._runs.pop(process.id, None))

    def _environment(self, request: Request) -> dict[str, str]:
        """As asked for, but what programs take for their own folders is in this one and not the caller's."""
        items = decode_list(request.env) if isinstance(request.env, bytes) else map(os.fsencode, request.env)
        env = dict(os.fsdecode(item).split("=", 1) for item in items)
        env.setdefault("TMPDIR", f"{self._root}/tmp")
        return {**env, "HOME": f"{self._root}{env.get('HOME', '/root')}"}

    def send(self, kind: Kind, id: int, payload: bytes | memoryview = b"", stream: int = 0) -> None:
        """What a process of this box is told; see `channel.Sender`."""
        if id not in self._runs:
            return
        _, run = self._runs[id]
        match kind:
            case Kind.INPUT if payload:
                run.input(bytes(payload))
            case Kind.INPUT:
                run.close_input()
            case Kind.CREDIT:
                run.credit(stream, int.from_bytes(payload, "little"))
            case Kind.SIGNAL:
                run.kill(struct.unpack("<iI", payload)[0])

    async def lowers(self) -> list[list[int]]:
        return [[os.open("base", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.upper)]]

    async def set_access(self, _access: Access) -> None:
        raise Unsupported("access: the fake tier keeps nobody from anything; use tier='namespace'")

    async def kill(self, reason: str) -> None:
        if self._reason is not None:
            await asyncio.shield(self._dead)
            return
        self._reason = reason
        for process, _ in list(self._runs.values()):
            if not process.ended.done():
                process.finish(SandboxGone(self.id, reason))
        await self._end_all()
        os.close(self.upper)
        self.upper = -1
        shutil.rmtree(self._folder, ignore_errors=True)  # here: at the interpreter's exit no thread can be had
        self._dead.set_result(None)
        self._on_end(self.id, reason)

    async def _end_all(self) -> None:
        for _, run in self._runs.values():
            run.close()
        for run in self._groups.values():
            run.kill(signal.SIGKILL)
        if self._groups:
            await asyncio.wait([run.dead for run in self._groups.values()], timeout=_DEATH_SECONDS)
        for run in self._groups.values():
            run.close()


def _refuse(request: Request) -> None:
    """Unsupported for what this tier has not."""
    if request.flags & ~_FLAGS:
        raise Unsupported("terminals and shell sessions: the fake tier has none; use tier='namespace'")
    if request.operation == FileOperation.WATCH:
        raise Unsupported("watch: the fake tier has none; use tier='namespace'")
    if request.uid:
        raise Unsupported("user: the fake tier runs everything as you; use tier='namespace'")
