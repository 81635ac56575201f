"""The node's side of a spawner process: one datagram out with a plan, one back with what came of it."""

from __future__ import annotations

import array
import asyncio
import os
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Final

from msgspec import Struct

from shoal.errors import PlatformError, SetupFailed
from shoal.sandbox.plan import Plan

_HEADER = struct.Struct("<IiII")
_EXIT_NOTICE = 0xFFFFFFFF
DESCRIPTORS_MAX: Final = 32
"""That one answer can carry."""


class Reply(Struct, frozen=True):
    """What a plan gave: the pid of the sandbox's init if it made one, and the descriptors it sent, in order.

    With a sandbox the last descriptor is a pidfd of its init."""

    pid: int
    descriptors: tuple[int, ...]


def binary() -> Path:
    """The compiled helper of this installation."""
    path = Path(str(files("shoal._bin") / "init"))
    if not os.access(path, os.X_OK):
        raise PlatformError(f"{path} is missing: run `make setup`, or reinstall shoal with a C compiler at hand")
    return path


class Spawner:
    """One long-lived process that makes sandboxes. Not started twice; `close` ends all it made."""

    def __init__(self, on_exit: Callable[[int, int], None], on_lost: Callable[[], None]) -> None:
        """`on_exit(pid, wait status)` for each sandbox's init; `on_lost()` if the spawner itself dies unasked."""
        self._on_exit = on_exit
        self._on_lost = on_lost
        self._waiting: dict[int, tuple[Plan, asyncio.Future[Reply]]] = {}
        self._next = 0
        self._socket: socket.socket | None = None
        self._pid = 0
        self._ended: asyncio.Future[None] | None = None

    async def start(self, cleanup: Sequence[str] = (), users: int | None = None) -> None:
        """`cleanup`: directories that the process removes at its end. `users`: an ordinary user's namespace to join."""
        program = binary()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            # A plan with its network messages and seccomp program must fit in one datagram.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        ours.setblocking(False)
        # argv[0] shows in /proc/1/cmdline of every sandbox and the environment would too: neither tells of the host.
        actions = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), 3)]
        if users is not None:
            actions.append((os.POSIX_SPAWN_DUP2, users, 4))
        joined = "-1" if users is None else "4"
        self._pid = os.posix_spawn(program, ["shoal-init", "spawner", "3", joined, *cleanup], {}, file_actions=actions)
        theirs.close()
        self._socket = ours
        loop = asyncio.get_running_loop()
        try:
            await self._greet(ours)
        except BaseException:
            ours.close()
            os.waitpid(self._pid, 0)
            raise
        self._ended = loop.create_future()
        loop.add_reader(ours.fileno(), self._readable)

    async def _greet(self, ours: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        hello = await loop.sock_recv(ours, 16)
        if hello == b"u":
            write_id_maps(self._pid)
            await loop.sock_sendall(ours, b"m")
            hello = await loop.sock_recv(ours, 16)
        error = int.from_bytes(hello, "little") if len(hello) == 4 else 0
        if error or len(hello) != 4:
            raise SetupFailed("start of the spawner", error or 1, "run `shoal doctor` for what is missing")

    def open_users(self) -> int:
        """A descriptor of the user namespace it lives in."""
        return os.open(f"/proc/{self._pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)

    def open_cgroups(self) -> int:
        """A descriptor of the cgroup namespace it lives in."""
        return os.open(f"/proc/{self._pid}/ns/cgroup", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def running(self) -> bool:
        return self._socket is not None

    async def run(self, plan: Plan, descriptors: Sequence[int] = (), *, give: bool = False) -> Reply:
        """Carries out a plan. SetupFailed names the step that failed; nothing of it is left then.

        `give`: the descriptors are closed here as soon as they are sent, so that the spawner's are the last ones."""
        number = self._next = (self._next + 1) % _EXIT_NOTICE
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (plan, future)
        try:
            await self._send(number.to_bytes(4, "little") + plan.wire(), descriptors)
        except BaseException:
            self._waiting.pop(number, None)
            raise
        finally:
            for descriptor in descriptors if give else ():
                os.close(descriptor)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # The sandbox may be made already; whoever gave up must not leak it.
            future.add_done_callback(_discard)
            raise

    async def _send(self, message: bytes, descriptors: Sequence[int]) -> None:
        while self._socket is not None:
            try:
                socket.send_fds(self._socket, [message], list(descriptors))
            except BlockingIOError:
                await asyncio.sleep(0.001)
            except OSError as error:
                raise PlatformError(f"the spawner takes no plan: {error.strerror}") from error
            else:
                return
        raise PlatformError("the spawner is not running")

    def _readable(self) -> None:
        assert self._socket is not None
        for _ in range(64):
            try:
                data, descriptors = _receive(self._socket)
            except BlockingIOError:
                return
            except OSError:
                data, descriptors = b"", ()
            if not data:
                self._lost()
                return
            self._take(data, descriptors)

    def _take(self, data: bytes, descriptors: tuple[int, ...]) -> None:
        number, error, step, pid = _HEADER.unpack_from(data)
        if number == _EXIT_NOTICE:
            self._on_exit(pid, error)
            return
        plan, future = self._waiting.pop(number)
        if error:
            detail = data[_HEADER.size :].decode("utf-8", "replace")
            future.set_exception(SetupFailed(plan.describe(step), error, detail))
        else:
            future.set_result(Reply(pid, descriptors))

    def _lost(self) -> None:
        asked = self._ended is None
        self._disconnect()
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(PlatformError("the spawner died"))
        self._waiting.clear()
        if not asked:
            self._on_lost()

    def _disconnect(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def forsake(self) -> None:
        """In a forked child of the node: lets go of the connection, which is the parent's."""
        if self._socket is not None:
            os.close(self._socket.detach())
            self._socket = None

    async def close(self) -> None:
        """Ends every sandbox it made, and it; returns when all are gone. Idempotent."""
        if self._ended is None:
            return
        self._ended = None
        self._disconnect()
        for _ in range(500):
            with suppress(ChildProcessError):
                if os.waitpid(self._pid, os.WNOHANG)[0] == 0:
                    await asyncio.sleep(0.01)
                    continue
            return
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _receive(sock: socket.socket) -> tuple[bytes, tuple[int, ...]]:
    """A datagram and its descriptors, which no program we start inherits: `recv_fds` drops the flag for that."""
    room = socket.CMSG_SPACE(DESCRIPTORS_MAX * 4)
    data, extra, _, _ = sock.recvmsg(4096, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for _, _, passed in extra:
        descriptors.frombytes(passed)
    return data, tuple(descriptors)


def _discard(future: asyncio.Future[Reply]) -> None:
    if future.cancelled() or future.exception():
        return
    reply = future.result()
    if reply.pid:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(reply.descriptors[-1], signal.SIGKILL)
    for descriptor in reply.descriptors:
        os.close(descriptor)


def write_id_maps(pid: int) -> None:
    """Maps an ordinary user's namespace: root inside is the user, and there is no other id."""
    Path(f"/proc/{pid}/setgroups").write_text("deny")
    Path(f"/proc/{pid}/uid_map").write_text(f"0 {os.geteuid()} 1")
    Path(f"/proc/{pid}/gid_map").write_text(f"0 {os.getegid()} 1")
