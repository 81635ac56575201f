"""The channel against a peer that plays init, and against a real one: credit, order, ends."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import residue
import shoal
from shoal.errors import InvalidRequest, NotFound, PermissionDenied, PlatformError, SandboxGone, SetupFailed
from shoal.node.interface import CommandRequest
from shoal.sandbox.channel import INPUT_WINDOW, WINDOW, Channel, Exit, Request, refusal
from shoal.sandbox.frame import DATA_MAX, PAYLOAD_MAX, Decoder, Frame, Kind, encode
from shoal.sandbox.plan import Plan
from shoal.sdk.embedded import call, engine

REQUEST = Request(["true"], [], "/")
EXIT = struct.pack("<iIQQQI", 0, 0, 1, 2, 3, 0)


class Peer:
    """The other end of a channel, as init would hold it."""

    def __init__(self) -> None:
        ours, self.socket = socket.socketpair()
        self.socket.setblocking(False)
        self.closed: list[str] = []
        plan = Plan()
        plan.add("hostname", "box")
        self.channel = Channel("sb-1", ours, plan, self.closed.append)
        self._decoder, self._sent = Decoder(), 0
        self.output: list[tuple[int, bytes]] = []

    def receive(self, stream: int, data: bytes) -> None:
        self.output.append((stream, data))

    async def send(self, kind: int, id: int, payload: bytes = b"", stream: int = 0) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, encode(kind, id, payload, stream, self._sent))
        self._sent += 1
        await settle()

    async def frames(self) -> list[Frame]:
        """What has come until now."""
        found: list[Frame] = []
        await settle()
        try:
            while data := self.socket.recv(1 << 20):
                found += self._decoder.feed(data)
                await settle()
        except BlockingIOError:
            return found
        return found


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def with_peer(use: Callable[[Peer], Awaitable[None]]) -> None:
    async def main() -> None:
        peer = Peer()
        try:
            await use(peer)
        finally:
            peer.channel.close("killed")
            peer.socket.close()

    asyncio.run(main())


def test_a_command_from_start_to_end() -> None:
    async def use(peer: Peer) -> None:
        process = peer.channel.start(REQUEST, peer.receive)
        assert await peer.frames() == [Frame(Kind.SPAWN, 0, process.id, REQUEST.wire(WINDOW))]
        await peer.send(Kind.STARTED, process.id, struct.pack("<i", 7))
        await peer.send(Kind.OUTPUT, process.id, b"out", 1)
        await peer.send(Kind.OUTPUT, process.id, b"err", 2)
        await peer.send(Kind.EXIT, process.id, EXIT)
        assert await process.pid == 7
        assert await process.ended == Exit(0, 0, 1, 2, 3)
        assert peer.output == [(1, b"out"), (2, b"err")]

    with_peer(use)


def test_credit_is_given_back_in_large_pieces_as_output_is_used() -> None:
    async def use(peer: Peer) -> None:
        process = peer.channel.start(REQUEST, peer.receive)
        await peer.frames()
        for _ in range(WINDOW // DATA_MAX):
            await peer.send(Kind.OUTPUT, process.id, bytes(DATA_MAX), 1)
        granted = [int.from_bytes(frame.payload, "little") for frame in await peer.frames()]
        assert granted == [WINDOW // 4] * 4

    with_peer(use)


def test_without_credit_nothing_is_given_back() -> None:
    async def use(peer: Peer) -> None:
        process = peer.channel.start(REQUEST, peer.receive, auto_credit=False)
        await peer.frames()
        for _ in range(WINDOW // DATA_MAX):
            await peer.send(Kind.OUTPUT, process.id, bytes(DATA_MAX), 1)
        assert await peer.frames() == []
        process.grant(1, WINDOW)
        (frame,) = await peer.frames()
        assert frame[:3] == (Kind.CREDIT, 1, process.id)

    with_peer(use)


def test_input_waits_for_room() -> None:
    async def use(peer: Peer) -> None:
        process = peer.channel.start(REQUEST, peer.receive)
        sending = asyncio.create_task(process.send_input(bytes(4 * INPUT_WINDOW)))
        sent = sum(len(frame.payload) for frame in await peer.frames() if frame.kind == Kind.INPUT)
        assert INPUT_WINDOW <= sent <= INPUT_WINDOW + DATA_MAX
        assert not sending.done()
        for _ in range(100):
            if sending.done():
                break
            await peer.send(Kind.TAKEN, process.id, struct.pack("<I", DATA_MAX))
            await peer.frames()
        assert sending.done()

    with_peer(use)


def test_input_for_one_that_ends_does_not_wait_for_ever() -> None:
    async def use(peer: Peer) -> None:
        process = peer.channel.start(REQUEST, peer.receive)
        sending = asyncio.create_task(process.send_input(bytes(4 * INPUT_WINDOW)))
        await peer.frames()
        await peer.send(Kind.EXIT, process.id, EXIT)
        async with asyncio.timeout(2):
            await sending
        await process.send_input(b"more")
        process.close_input()
        process.kill(9, tree=True)
        assert [frame for frame in await peer.frames() if frame.kind != Kind.INPUT] == []

    with_peer(use)


def test_closing_input_twice_says_it_once() -> None:
    async def use(peer: Peer) -> None:
        process = peer.channel.start(REQUEST, peer.receive)
        process.close_input()
        process.close_input()
        await process.send_input(b"late")
        assert [frame.kind for frame in await peer.frames()] == [Kind.SPAWN, Kind.INPUT]

    with_peer(use)


def test_the_end_of_the_connection_ends_all_commands() -> None:
    async def use(peer: Peer) -> None:
        processes = [peer.channel.start(REQUEST, peer.receive) for _ in range(3)]
        peer.socket.close()
        for process in processes:
            with pytest.raises(SandboxGone) as caught:
                await process.ended
            assert caught.value.reason == "init_died"
        assert peer.closed == ["init_died"]
        with pytest.raises(SandboxGone):
            peer.channel.start(REQUEST, peer.receive)

    with_peer(use)


@pytest.mark.parametrize(
    "frame",
    [
        encode(99, 1),
        encode(Kind.READY, 0, number=5),
        encode(Kind.OUTPUT, 77, b"x", 1),
        encode(Kind.EXIT, 1, b"short"),
        encode(Kind.EXIT, 77, EXIT),
        encode(Kind.STARTED, 77, bytes(4)),
        encode(Kind.REFUSED, 1, struct.pack("<iI", 2, 99)),
        encode(Kind.READY, 0) + encode(Kind.READY, 0, number=1),
    ],
)
def test_what_makes_no_sense_ends_the_connection_and_not_the_node(frame: bytes) -> None:
    async def use(peer: Peer) -> None:
        process = peer.channel.start(REQUEST, peer.receive)
        await asyncio.get_running_loop().sock_sendall(peer.socket, frame)
        await settle()
        assert peer.closed == ["lost"]
        with pytest.raises(SandboxGone) as caught:
            await process.ended
        assert caught.value.reason == "lost"

    with_peer(use)


def test_a_set_up_that_failed_names_its_step() -> None:
    async def use(peer: Peer) -> None:
        await peer.send(Kind.FAILED, 0, struct.pack("<Ii", 0, errno.EPERM) + b"the kernel's words")
        with pytest.raises(
            SetupFailed, match=r"step 0, hostname\('box'\): Operation not permitted \(the kernel's words\)"
        ):
            await peer.channel.ready

    with_peer(use)


def test_a_request_that_no_frame_can_hold() -> None:
    async def use(peer: Peer) -> None:
        with pytest.raises(InvalidRequest) as caught:
            peer.channel.start(Request(["x" * PAYLOAD_MAX], [], "/"), peer.receive)
        assert caught.value.field == "cmd"
        assert await peer.frames() == []

    with_peer(use)


@pytest.mark.parametrize(
    ("step", "error", "kind", "text"),
    [
        ("cwd", errno.ENOENT, NotFound, "cwd: "),
        ("cwd", errno.ENOTDIR, NotFound, "cwd: "),
        ("cwd", errno.EACCES, PermissionDenied, "cwd: "),
        ("program", errno.ENOENT, NotFound, "cmd: "),
        ("program", errno.EACCES, PermissionDenied, "cmd: "),
        ("program", errno.E2BIG, InvalidRequest, "cmd: "),
        ("program", errno.ENOEXEC, InvalidRequest, "cmd: "),
        ("user", errno.EINVAL, InvalidRequest, "user: "),
        ("pipes", errno.EMFILE, PlatformError, "pipes"),
        ("cgroup", errno.ENOENT, PlatformError, "cgroup"),
    ],
)
def test_refusals_blame_the_argument(step: str, error: int, kind: type[Exception], text: str) -> None:
    refused = refusal(error, step)
    assert type(refused) is kind
    assert text in str(refused)


# With a real init


async def started(box: shoal.Sandbox, cmd: str, **more: Any) -> Any:
    """The node's command object."""
    node = engine().node
    id, _ = await node.start(box.id, CommandRequest(cmd=cmd, **more))
    return node._find(box.id).command(id)


async def quiet(look: Callable[[], int]) -> int:
    """The number as soon as it has not changed for a while."""
    last = -1
    while (now := look()) != last:
        last = now
        await asyncio.sleep(0.2)
    return now


def test_a_consumer_that_takes_nothing_holds_one_window(box: shoal.Sandbox) -> None:
    async def use() -> int:
        command = await started(box, "yes", hold=True)
        return await quiet(lambda: command.retained.end - command.retained.start)

    assert 0 < call(use()) <= WINDOW


def test_init_does_not_grow_by_what_nobody_takes(box: shoal.Sandbox) -> None:
    def resident() -> int:
        inits = [found.pid for found in residue.sandbox_processes() if found.name == "shoal-init"]
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in inits) * os.sysconf("SC_PAGE_SIZE")

    before = resident()

    async def use() -> None:
        for _ in range(8):
            command = await started(box, "yes", hold=True)
            await quiet(lambda command=command: command.retained.end)  # type: ignore[misc]

    call(use())
    assert resident() - before < 8 << 20


def test_input_that_nobody_reads_waits_with_the_sender(box: shoal.Sandbox) -> None:
    async def use() -> int:
        command = await started(box, "sleep 60", feed=True)
        sending = asyncio.create_task(command.process.send_input(bytes(16 << 20)))
        held = await quiet(lambda: command.process._in_flight)
        assert not sending.done()
        sending.cancel()
        return held

    assert call(use()) <= INPUT_WINDOW + DATA_MAX


def test_a_slow_one_does_not_hold_up_the_others(box: shoal.Sandbox) -> None:
    async def use() -> None:
        await started(box, "yes")
        async with asyncio.timeout(5):
            for _ in range(20):
                result = await engine().node.run(box.id, CommandRequest(cmd=["echo", "through"]))
                assert result.stdout == "through\n"

    call(use())


def test_many_at_a_time_get_their_own_output() -> None:
    async def use(id: str) -> None:
        async def one(number: int) -> None:
            letter = chr(97 + number % 26)
            cmd = f"head -c {number * 1000} /dev/zero | tr '\\0' {letter}; echo {number} >&2; exit {number}"
            result = await engine().node.run(id, CommandRequest(cmd=cmd))
            assert result.stdout == letter * (number * 1000)
            assert (result.stderr, result.exit_code) == (f"{number}\n", number)

        await asyncio.gather(*map(one, range(100)))

    with shoal.Sandbox.create(profile=shoal.Profile(processes=1000)) as box:
        call(use(box.id))
