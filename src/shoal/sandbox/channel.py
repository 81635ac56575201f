"""The connection to one sandbox's init: many commands at a time over one socket, each stream with its own credit."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol

from shoal.errors import (
    Interrupted,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    PlatformError,
    SandboxGone,
    SetupFailed,
)
from shoal.sandbox.frame import (
    DATA_MAX,
    PAYLOAD_MAX,
    RECEIVE,
    Decoder,
    Exit,
    FileOperation,
    Flag,
    Kind,
    Report,
    Request,
    decode_exit,
    decode_report,
    encode,
    encode_header,
)
from shoal.sandbox.plan import Plan

__all__ = ["Channel", "Exit", "FileOperation", "Flag", "Process", "Report", "Request"]

WINDOW: Final = 1 << 20
"""Bytes of output that may be on the way for each stream of a command."""
INPUT_WINDOW: Final = 512 << 10
"""Bytes of input that may wait in init for a command to read."""
_RECEIVES: Final = 16
"""Pieces of a large payload that are received at one wake-up, before other sandboxes have their turn."""

_SO_SNDBUFFORCE: Final = 32

_STEPS: Final = ("", "request", "pipes", "process", "cgroup", "terminal", "user", "cwd", "program")

Receiver = Callable[[int, bytes], None]
"""Called with stream (1 or 2) and bytes, on the node's loop."""


class Sender(Protocol):
    """Who carries what a process is told."""

    def send(self, kind: Kind, id: int, payload: bytes | memoryview = b"", stream: int = 0) -> None: ...


class Process:
    """A command or file operation that init was asked to start."""

    def __init__(self, channel: Sender, id: int, receive: Receiver, auto_credit: bool) -> None:
        loop = asyncio.get_running_loop()
        self.id = id
        self.pid: asyncio.Future[int] = loop.create_future()
        self.ended: asyncio.Future[Exit] = loop.create_future()
        self._channel = channel
        self._receive = receive
        self._auto_credit = auto_credit
        self._owed = [0, 0, 0]
        self._in_flight = 0
        self._room = asyncio.Event()
        self._input_closed = False
        self.on_report: Callable[[Report], None] | None = None
        """What a session's shell says goes here."""

    async def send_input(self, data: bytes | memoryview) -> None:
        """Waits while more than `INPUT_WINDOW` is unread. What is sent to a command that has ended is lost."""
        view = memoryview(data)
        for start in range(0, len(view), DATA_MAX):
            part = view[start : start + DATA_MAX]
            while self._in_flight >= INPUT_WINDOW and not self.ended.done():
                self._room.clear()
                await self._room.wait()
            if self.ended.done() or self._input_closed:
                return
            self._in_flight += len(part)
            self._channel.send(Kind.INPUT, self.id, part)

    def close_input(self) -> None:
        """The command reads EOF after what was sent."""
        if not self._input_closed and not self.ended.done():
            self._channel.send(Kind.INPUT, self.id)
        self._input_closed = True

    def kill(self, signal: int, *, tree: bool) -> None:
        """To the process group, or with `tree` to everything the command started, however it hid."""
        if not self.ended.done():
            self._channel.send(Kind.SIGNAL, self.id, struct.pack("<iI", signal, tree))

    def interrupt(self, signal: int) -> None:
        """Of a session: the signal to its shell alone, SIGKILL to what that started since it was sent something."""
        if not self.ended.done():
            self._channel.send(Kind.SIGNAL, self.id, struct.pack("<iI", signal, 2))

    def resize(self, rows: int, cols: int) -> None:
        if not self.ended.done():
            self._channel.send(Kind.RESIZE, self.id, struct.pack("<II", rows, cols))

    def grant(self, stream: int, count: int) -> None:
        """`count` bytes of `stream` have been used up; granted in large pieces to save frames."""
        self._owed[stream] += count
        if self._owed[stream] >= WINDOW // 4 and not self.ended.done():
            self._channel.send(Kind.CREDIT, self.id, struct.pack("<I", self._owed[stream]), stream)
            self._owed[stream] = 0

    def take_output(self, stream: int, data: bytes) -> None:
        self._receive(stream, data)
        if self._auto_credit:
            self.grant(stream, len(data))

    def take_report(self, report: Report) -> None:
        if self.on_report is not None:
            self.on_report(report)
        if not self.ended.done():
            self._channel.send(Kind.CREDIT, self.id, bytes(4))

    def take_consumed(self, count: int) -> None:
        self._in_flight -= count
        self._room.set()

    def finish(self, outcome: Exit | Exception) -> None:
        if isinstance(outcome, Exit):
            self.ended.set_result(outcome)
        else:
            for future in (self.pid, self.ended):
                if not future.done():
                    future.set_exception(outcome)
                    future.exception()  # somebody may only wait for the other one
        self._room.set()


class Channel:
    """Owns the socket. `on_close(reason)` is called once, when the connection ends for whatever cause."""

    def __init__(self, sandbox: str, sock: socket.socket, plan: Plan, on_close: Callable[[str], None]) -> None:
        self._sandbox = sandbox
        self._socket = sock
        self._plan = plan
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._decoder = Decoder()
        self._processes: dict[int, Process] = {}
        self._next = 1
        self._sent = 0
        self._backlog = bytearray()
        self._closed: str | None = None
        self.ready: asyncio.Future[None] = self._loop.create_future()
        sock.setblocking(False)
        _widen(sock)
        self._loop.add_reader(sock.fileno(), self._readable)

    def start(self, request: Request, receive: Receiver, *, auto_credit: bool = True) -> Process:
        """Sends the request; `pid` and `ended` of the process tell what became of it."""
        if self._closed is not None:
            raise SandboxGone(self._sandbox, self._closed)
        payload = request.wire(WINDOW)
        if len(payload) > PAYLOAD_MAX:
            raise InvalidRequest("cmd", f"arguments and environment take {len(payload)} bytes; {PAYLOAD_MAX} at most")
        process = Process(self, self._next, receive, auto_credit)
        self._processes[process.id] = process
        self._next = self._next % 0xFFFFFFFF + 1
        self.send(Kind.FILE if request.operation > 0 else Kind.SPAWN, process.id, payload)
        return process

    def send(self, kind: Kind, id: int, payload: bytes | memoryview = b"", stream: int = 0) -> None:
        """Never blocks; what the socket does not take waits here, bounded by the windows of the commands."""
        if self._closed is not None:
            return
        header = encode_header(kind, id, len(payload), stream, self._sent)
        self._sent = (self._sent + 1) & 0xFFFFFFFF
        done = 0
        if not self._backlog:
            try:
                done = self._socket.sendmsg((header, payload))
            except BlockingIOError:
                pass
            except OSError:
                return  # the reader notices, and knows why
            if done == len(header) + len(payload):
                return
            self._loop.add_writer(self._socket.fileno(), self._writable)
        self._backlog += header[done:]
        self._backlog += payload[max(done - len(header), 0) :]

    async def give(self, kind: Kind, payload: bytes, descriptors: Sequence[int]) -> None:
        """Sends a frame of init's own with descriptors, which are closed here. What is sent later arrives later."""
        try:
            while self._closed is None:
                if not self._backlog:
                    with suppress(BlockingIOError):
                        frame = encode(kind, 0, payload, 0, self._sent)
                        done = socket.send_fds(self._socket, [frame], descriptors)
                        self._sent = (self._sent + 1) & 0xFFFFFFFF
                        if done < len(frame):  # the descriptors go with the first byte
                            self._loop.add_writer(self._socket.fileno(), self._writable)
                            self._backlog += frame[done:]
                        return
                await asyncio.sleep(0.001)
            raise SandboxGone(self._sandbox, self._closed)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _writable(self) -> None:
        try:
            done = self._socket.send(self._backlog)
        except BlockingIOError:
            return
        except OSError:
            self._loop.remove_writer(self._socket.fileno())
            return
        del self._backlog[:done]
        if not self._backlog:
            self._loop.remove_writer(self._socket.fileno())

    def _readable(self) -> None:
        for _ in range(_RECEIVES):
            if not self._receive() or self._decoder.wanted == RECEIVE:
                return

    def _receive(self) -> bool:
        """False if there was nothing, or there is nothing to come any more."""
        try:
            data = self._socket.recv(self._decoder.wanted)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.close("init_died")
            return False
        try:
            for kind, stream, id, payload in self._decoder.feed(data):
                self._handle(kind, stream, id, payload)
        except (PlatformError, LookupError, struct.error, asyncio.InvalidStateError):
            # Nothing inside can write to this socket, so this is a fault of ours; what it said can't be relied on.
            self.close("lost")
        return self._closed is None

    def _handle(self, kind: int, stream: int, id: int, payload: bytes) -> None:
        match kind:
            case Kind.OUTPUT:
                self._processes[id].take_output(stream, payload)
            case Kind.EXIT:
                end = decode_exit(payload)
                self._processes.pop(id).finish(end)
            case Kind.STARTED:
                self._processes[id].pid.set_result(int.from_bytes(payload, "little"))
            case Kind.REFUSED:
                error, step = struct.unpack("<iI", payload)
                why = refusal(error, _STEPS[step])
                self._processes.pop(id).finish(why)
            case Kind.TAKEN:
                if id in self._processes:
                    self._processes[id].take_consumed(int.from_bytes(payload, "little"))
            case Kind.REPORT:
                self._processes[id].take_report(decode_report(payload))
            case Kind.READY:
                self.ready.set_result(None)
            case Kind.FAILED:
                step, error = struct.unpack_from("<Ii", payload)
                detail = payload[8:].decode("utf-8", "replace")
                self.ready.set_exception(SetupFailed(self._plan.describe(step), error, detail))

    def hold(self) -> None:
        """Takes nothing from init until `resume`."""
        if self._closed is None:
            self._loop.remove_reader(self._socket.fileno())

    def resume(self) -> None:
        if self._closed is None:
            self._loop.add_reader(self._socket.fileno(), self._readable)

    def forsake(self) -> None:
        """In a forked child of the node: lets go of the connection, which is the parent's."""
        if self._closed is None:
            self._closed = "lost"
            os.close(self._socket.detach())

    def close(self, reason: str) -> None:
        """Ends every command with SandboxGone(reason). Idempotent; the first reason stands."""
        if self._closed is not None:
            return
        self._closed = reason
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        gone = SandboxGone(self._sandbox, reason)
        if not self.ready.done():
            self.ready.set_exception(gone)
            self.ready.exception()
        for process in list(self._processes.values()):
            process.finish(gone)
        self._processes.clear()
        self._on_close(reason)


def _widen(sock: socket.socket) -> None:
    """Room for all input that may be on the way, so that none of it waits in a copy here."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, INPUT_WINDOW)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, INPUT_WINDOW)


def refusal(error: int, step: str) -> Exception:
    """Why a command could not be started, as the error of the argument that is to blame."""
    text = os.strerror(error)
    match step, error:
        case "cwd", _:
            return (
                NotFound(f"cwd: {text}") if error in (errno.ENOENT, errno.ENOTDIR) else PermissionDenied(f"cwd: {text}")
            )
        case "program", errno.ENOENT | errno.ENOTDIR:
            return NotFound(f"cmd: {text}")
        case "program", errno.EACCES | errno.EPERM:
            return PermissionDenied(f"cmd: {text}")
        case "program", errno.E2BIG:
            return InvalidRequest("cmd", f"{text}; the kernel's limit is a quarter of the stack, 2 MiB as a rule")
        case "program", errno.ENOEXEC:
            return InvalidRequest("cmd", "not a program this machine can run (ENOEXEC)")
        case "process" | "cgroup", errno.EAGAIN | errno.ENOMEM:
            return Interrupted("a command could not be started: the sandbox is at its limit of processes or memory")
        case "user", _:
            return InvalidRequest("user", f"cannot become that user: {text}")
    return PlatformError(f"a command could not be started ({step}): {text}")
