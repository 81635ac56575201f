"""Seats: what a sandbox is put on is fresh, and whoever gives up half-way leaves nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import residue
import shoal
from shoal.node.interface import CreateRequest
from shoal.node.local import LocalNode
from shoal.sdk.embedded import call, engine


def spawner_descriptors() -> int:
    """Of all spawners of this process's node."""
    spawners = [process.pid for process in residue.sandbox_processes() if process.name == "shoal-spawner"]
    return sum(len(residue.descriptors(pid)) for pid in spawners)


async def held() -> tuple[int, int]:
    """Descriptors of the spawners and ours, once seats are ready again and what was taken apart is gone."""
    last = (-1, -1)
    for _ in range(50):
        now = (spawner_descriptors(), len(residue.descriptors()))
        if now == last:
            break
        last = now
        await asyncio.sleep(0.4)
    return last


async def leak_of(once: Callable[[LocalNode], Awaitable[None]], times: int) -> tuple[int, int]:
    """What doing it so often again takes for good; the first time the caches of the seats fill."""
    node = engine().node
    for _ in range(times):
        await once(node)
    before = await held()
    for _ in range(times):
        await once(node)
    after = await held()
    assert await node.list_sandboxes() == []
    assert not residue.settled(lambda: [p for p in residue.sandbox_processes() if p.name == "shoal-init"])
    return after[0] - before[0], after[1] - before[1]


def test_a_create_that_is_cancelled_at_any_moment_leaks_nothing() -> None:
    chance = random.Random(1)

    async def once(node: LocalNode) -> None:
        task = asyncio.create_task(node.create(CreateRequest()))
        await asyncio.sleep(chance.uniform(0, 0.008))
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(result, shoal.SandboxInfo):
            await node.kill(result.id)

    spawners, ours = call(leak_of(once, 60))
    assert spawners < 30
    assert ours < 10


def test_what_cannot_be_made_leaks_nothing() -> None:
    missing = shoal.Layer(digest="host:/not/there", source="/not/there")

    async def once(node: LocalNode) -> None:
        with pytest.raises(shoal.SetupFailed, match="/not/there"):
            await node.create(CreateRequest(layers=(missing,)))

    spawners, ours = call(leak_of(once, 30))
    assert spawners < 15
    assert ours < 10


RECEIVED = "awk '/lo:/ {print $2}' /proc/net/dev"


def test_a_network_is_never_used_twice() -> None:
    """It would still count what the one before received."""
    busy = "import socket; s = socket.socket(2, 2); [s.sendto(bytes(1000), ('127.0.0.1', 9)) for _ in range(1000)]"
    for _ in range(30):
        with shoal.Sandbox.create() as box:
            assert int(box.commands.run(RECEIVED).stdout) < 100_000
            box.commands.run(["python3", "-c", busy])
            assert int(box.commands.run(RECEIVED).stdout) > 1_000_000


@pytest.mark.root
def test_a_cgroup_is_never_used_twice() -> None:
    """It would still know the most that the one before had in memory, and its pages."""
    seen: list[str] = []
    for _ in range(30):
        before = inits()
        with shoal.Sandbox.create() as box:
            running = box.commands.run(["sleep", "60"], background=True)
            (init,) = inits() - before
            seen += {cgroup(pid) for pid in sleepers(init)}
            running.kill()
    assert len(seen) == len(set(seen)) == 30


def inits() -> set[int]:
    """Pids of the sandboxes' inits; a command is called so too until it execs, but is not a spawner's child."""
    table = residue.sandbox_processes()
    spawners = {process.pid for process in table if process.name == "shoal-spawner"}
    return {process.pid for process in table if process.name == "shoal-init" and process.parent in spawners}


def sleepers(init: int) -> list[int]:
    return [process.pid for process in residue.descendants(init) if process.name == "sleep"]


def cgroup(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


@pytest.mark.root
def test_live_sandboxes_have_ids_and_namespaces_of_their_own() -> None:
    boxes = [shoal.Sandbox.create() for _ in range(12)]
    try:
        maps = {box.commands.run("cat /proc/self/uid_map").stdout for box in boxes}
        namespaces = {box.commands.run("readlink /proc/self/ns/*").stdout for box in boxes}
        assert len(maps) == len(namespaces) == len(boxes)
        each = [set(text.split()) for text in namespaces]
        shared = set.intersection(*each)
        assert {name.split(":")[0] for name in shared} <= {"time"}
    finally:
        for box in boxes:
            box.kill()
