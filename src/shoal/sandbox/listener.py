"""The process that answers a sandbox's audited system calls (init/audit.c), and what it tells."""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from shoal.errors import InvalidRequest
from shoal.sandbox.audit import AuditLog
from shoal.sandbox.seccomp import responses
from shoal.sandbox.spawner import binary

_WATCHED: Final = struct.Struct("<IiBBBx")
_RECORD: Final = struct.Struct("<QIIII6QI")
"""Time, number, pid, records missing before this one, allowed, arguments, length of the program's path."""
_RECORD_MAX: Final = 1024
_TURN: Final = 256
"""Records taken before others on the loop have their turn."""
_NO_CALL: Final = 0xFFFFFFFF
_ARGUMENTS, _TEXT, _BUFFER = range(3)

_PATHS: Final = {
    0: "access chdir chmod chown chroot creat execve getxattr lchown link lstat mkdir mknod mount open readlink"
    " removexattr rename rmdir setxattr stat statfs symlink truncate umount2 unlink utime utimes memfd_create",
    1: "execveat faccessat faccessat2 fchmodat fchownat fsopen inotify_add_watch linkat mkdirat mknodat newfstatat"
    " open_tree openat openat2 readlinkat renameat renameat2 statx symlinkat unlinkat utimensat name_to_handle_at",
}
_ADDRESSES: Final = {"connect": (1, 2), "bind": (1, 2), "sendto": (4, 5)}
"""Arguments that hold an address and its length."""
_NOT_AUDITED: Final = frozenset({"sendmsg"})
"""A sandbox's init hands the listener out by it."""
CALLS_MAX: Final = 512


def check(names: Collection[str]) -> None:
    """InvalidRequest for what can't be audited."""
    for name in _NOT_AUDITED & set(names):
        raise InvalidRequest("audit.syscalls", f"{name} can't be audited: the audit itself begins with it")
    if len(set(names)) > CALLS_MAX:
        raise InvalidRequest("audit.syscalls", f"takes {CALLS_MAX} calls at most")
    responses(names)


class Listener:
    """Of one sandbox. Ends with it; `on_lost()` if it ends before `close`."""

    def __init__(self, names: Collection[str], log: AuditLog, on_lost: Callable[[], None]) -> None:
        self._responses = responses(names)
        self._names = {response.number: name for name, response in self._responses.items()}
        self._looks = {name: _looks_at(name) for name in names}
        self._helper = os.fsencode(binary())
        self._log = log
        self._on_lost = on_lost
        self._socket: socket.socket | None = None
        self._pid = 0
        self._reaping: asyncio.Task[None] | None = None
        log.add_source(self._drain)

    async def start(self, channel: socket.socket, init: int) -> None:
        """Waits for what init sends first: the listener, or what it has to say of its failure, which stays there."""
        descriptor = await _take_descriptor(channel)
        if descriptor is None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        # Both far from the numbers that they get there, whatever a daemon had closed.
        given = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 16) for number in (descriptor, theirs.fileno())]
        os.close(descriptor)
        theirs.close()
        try:
            ours.send(self._table())
            actions = [(os.POSIX_SPAWN_DUP2, number, place) for place, number in enumerate(given, start=3)]
            self._pid = os.posix_spawn(
                self._helper, ["shoal-init", "audit", "3", "4", str(init)], {}, file_actions=actions
            )
        except BaseException:
            ours.close()
            raise
        finally:
            for number in given:
                os.close(number)
        self._socket = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._readable)

    def _table(self) -> bytes:
        return b"".join(
            _WATCHED.pack(response.number, -1 if response.error is None else response.error, *self._looks[name])
            for name, response in self._responses.items()
        )

    def _readable(self) -> None:
        if self._take() is None:
            self._disconnect()
            self._on_lost()

    def _drain(self) -> None:
        """All that was told before now: a call goes on only after that."""
        while self._socket is not None and self._take():
            pass

    def _take(self) -> int | None:
        """How many records came, of a few at the most; None at the end."""
        assert self._socket is not None
        for count in range(_TURN):
            try:
                data = self._socket.recv(_RECORD_MAX)
            except BlockingIOError:
                return count
            except OSError:
                return None
            if not data:
                return None
            self._write_down(data)
        return _TURN

    def _write_down(self, data: bytes) -> None:
        nanoseconds, number, pid, missing, allowed, *rest = _RECORD.unpack_from(data)
        *arguments, length = rest
        time = nanoseconds / 1e9
        if missing:
            self._log.add_gap(time, missing)
        if number == _NO_CALL:
            return
        name = self._names[number]
        end = _RECORD.size + length
        program = data[_RECORD.size : end]
        # A child of init before its exec is still our helper, whose place on the host is nobody's business.
        shown = "shoal-init" if program == self._helper else _text(program)
        detail = self._detail(name, arguments, data[end:])
        self._log.add(time, name, pid, shown, detail, allowed=bool(allowed))

    def _detail(self, name: str, arguments: list[int], data: bytes) -> str:
        match self._looks[name][0]:
            case 1:  # _TEXT
                return _text(data)
            case 2:  # _BUFFER
                return _address(data)
            case _:
                return ", ".join(f"{argument:#x}" for argument in arguments)

    def _disconnect(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """Once no process of the sandbox is left. What was told is taken first."""
        self._drain()
        self._disconnect()
        if self._pid and self._reaping is None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._reaping = asyncio.get_running_loop().create_task(asyncio.to_thread(_reap, self._pid))

    async def closed(self) -> None:
        if self._reaping is not None:
            await self._reaping

    def forsake(self) -> None:
        """In a forked child of the node."""
        if self._socket is not None:
            os.close(self._socket.detach())
            self._socket = None


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


async def _take_descriptor(channel: socket.socket) -> int | None:
    """A byte with a descriptor is taken. Anything else stays for whoever reads the channel."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def ready() -> None:
        loop.remove_reader(channel.fileno())
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(channel.fileno(), ready)
    try:
        await readable
    finally:
        loop.remove_reader(channel.fileno())
    try:
        _, extra, _, _ = channel.recvmsg(1, socket.CMSG_SPACE(4), socket.MSG_PEEK | socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return None
    descriptors = array.array("i")
    for _, _, passed in extra:
        descriptors.frombytes(passed)
    if not descriptors:
        return None
    channel.recv(1)
    return descriptors[0]


def _looks_at(name: str) -> tuple[int, int, int]:
    """What the listener reads of a call: its kind, and which arguments say where and how much."""
    if name in _ADDRESSES:
        return (_BUFFER, *_ADDRESSES[name])
    for argument, names in _PATHS.items():
        if name in names.split():
            return (_TEXT, argument, 0)
    return (_ARGUMENTS, 0, 0)


def _text(data: bytes) -> str:
    """On one line, whatever the sandbox wrote."""
    text = data.decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _address(data: bytes) -> str:
    family = int.from_bytes(data[:2], "little")
    if family == socket.AF_INET and len(data) >= 8:
        return f"{socket.inet_ntop(family, data[4:8])}:{int.from_bytes(data[2:4], 'big')}"
    if family == socket.AF_INET6 and len(data) >= 24:
        return f"[{socket.inet_ntop(family, data[8:24])}]:{int.from_bytes(data[2:4], 'big')}"
    if family == socket.AF_UNIX:
        path = data[2:]
        return f"@{_text(path[1:])}" if path[:1] == b"\0" else _text(path.partition(b"\0")[0])
    return f"family {family}"
