"""A real spawner: what it says of plans that fail, and what is left when it, its node or a plan goes down."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import residue
from shoal.errors import PlatformError, SetupFailed
from shoal.sandbox import spawner as spawners
from shoal.sandbox.plan import FIRST_FREE_KEY, HOST_MOUNTS, HOST_NETWORK, KEPT, NONE, OWN_MOUNTS, Plan
from shoal.sandbox.spawner import Spawner

NAMESPACES = 0x10000000 | 0x20000000 | 0x20000
OWNER = 0x6FF0_0000
MAP = f"0 {OWNER} 65536"


def with_spawner(use: Callable[[Spawner], Awaitable[None]], cleanup: tuple[str, ...] = ()) -> list[str]:
    """Runs `use` with a fresh spawner; what it reported: "lost", or "exit <pid>"."""
    events: list[str] = []

    async def main() -> None:
        spawner = Spawner(lambda pid, _: events.append(f"exit {pid}"), lambda: events.append("lost"))
        await spawner.start(cleanup)
        try:
            await use(spawner)
        finally:
            await spawner.close()

    asyncio.run(main())
    return events


def pids(spawner: Spawner) -> set[int]:
    return {process.pid for process in residue.descendants(spawner._pid)}


def namespace(pid: int | str, kind: str) -> Path:
    return Path(f"/proc/{pid}/ns/{kind}").readlink()


def alive(pids: Iterable[int]) -> set[residue.Process]:
    wanted = set(pids)
    return {process for process in residue.processes() if process.pid in wanted and process.state != "Z"}


def plan(*steps: tuple[object, ...]) -> Plan:
    made = Plan()
    for name, *arguments in steps:
        made.add(name, *arguments)  # type: ignore[arg-type]
    return made


async def failure(spawner: Spawner, wrong: Plan) -> SetupFailed:
    with pytest.raises(SetupFailed) as caught:
        await spawner.run(wrong)
    return caught.value


CLONE = ("clone", NAMESPACES, OWNER, MAP, MAP, NONE, HOST_NETWORK, 0, NONE)

FAILURES = {
    "a file that is missing": (plan(("enter", HOST_MOUNTS), ("open", 1, NONE, "/not/there", 0)), 1, errno.ENOENT),
    "a file system that is unknown": (plan(("mount", 1, "nofs", 0, [])), 0, errno.ENODEV),
    "an option that is unknown": (plan(("mount", 1, "tmpfs", 0, ["size=1m", "nonsense=1"])), 0, errno.EINVAL),
    "a register that is empty": (plan(("identity",), ("pivot", 7)), 1, errno.EBADMSG),
    "a register that there is not": (plan(("pivot", 999)), 0, errno.EBADMSG),
    "a kept descriptor that there is not": (plan(("enter", KEPT + 500)), 0, errno.EBADMSG),
    "a directory twice": (
        plan(("mount", 1, "tmpfs", 0, []), ("mkdir", 1, "a", 0o755), ("mkdir", 1, "a", 0o755)),
        2,
        errno.EEXIST,
    ),
    "a layer that is none": (
        plan(("enter", HOST_MOUNTS), ("mount", 1, "erofs", 1, ["source=/etc/passwd", "ro"])),
        1,
        None,
    ),
    "maps that overlap": (plan(("userns", 1, "0 1 10\n5 5 10", "0 1 10")), 0, errno.EINVAL),
}


@pytest.mark.root
@pytest.mark.parametrize("name", FAILURES)
def test_a_failing_step_is_named_and_leaves_nothing(name: str) -> None:
    wrong, step, error = FAILURES[name]

    async def use(spawner: Spawner) -> None:
        before = residue.descriptors(spawner._pid)
        children = pids(spawner)
        for _ in range(3):
            caught = await failure(spawner, wrong)
            assert caught.step == wrong.describe(step)
            assert error in (None, caught.errno)
            assert caught.step in str(caught)
        assert residue.settled(lambda: residue.descriptors(spawner._pid).keys() ^ before.keys()) == set()
        assert pids(spawner) == children
        await spawner.run(plan(("mount", 1, "tmpfs", 0, [])))

    assert with_spawner(use) == []


@pytest.mark.root
def test_the_kernel_says_what_it_disliked() -> None:
    async def use(spawner: Spawner) -> None:
        caught = await failure(spawner, plan(("mount", 1, "tmpfs", 0, ["nonsense=1"])))
        assert "nonsense" in str(caught)

    with_spawner(use)


@pytest.mark.root
def test_after_a_failure_elsewhere_it_is_back_in_its_own_mounts() -> None:
    async def use(spawner: Spawner) -> None:
        own = namespace(spawner._pid, "mnt")
        await failure(spawner, plan(("enter", HOST_MOUNTS), ("open", 1, NONE, "/not/there", 0)))
        assert namespace(spawner._pid, "mnt") == own != namespace("self", "mnt")

    with_spawner(use)


@pytest.mark.root
@pytest.mark.parametrize(
    ("wire", "detail"),
    [
        (b"\xff", "unknown operation"),
        (plan(("pivot", 1)).wire()[:-1], "malformed arguments"),
        (plan(("hostname", "box")).wire()[:-1], "malformed arguments"),
        (plan(("hostname", "b\0x")).wire(), "malformed arguments"),
        (
            plan(("mount", 1, "tmpfs", 0, ["a"] * 3)).wire().replace(b"\3\0\0\0", b"\xff\xff\xff\xff"),
            "malformed arguments",
        ),
    ],
)
def test_malformed_plans(wire: bytes, detail: str) -> None:
    async def use(spawner: Spawner) -> None:
        wrong = plan(("identity",))
        wrong._wire = bytearray(wire)
        caught = await failure(spawner, wrong)
        assert (caught.errno, detail in str(caught)) == (errno.EBADMSG, True)
        await spawner.run(Plan())

    with_spawner(use)


@pytest.mark.root
def test_a_failing_network_leaves_no_namespace() -> None:
    async def use(spawner: Spawner) -> None:
        nested = plan(("write", NONE, "/proc/sys/net/not/there", "1"))
        before = residue.descriptors(spawner._pid)
        caught = await failure(spawner, plan(("netns", 0, NONE, nested.wire())))
        assert caught.errno == errno.ENOENT
        assert "/proc/sys/net/not/there" in str(caught)
        assert residue.settled(lambda: residue.descriptors(spawner._pid).keys() ^ before.keys()) == set()
        assert namespace(spawner._pid, "net") == namespace("self", "net")

    with_spawner(use)


@pytest.mark.root
def test_a_sandbox_with_wrong_maps_dies_unborn_and_nobody_hears_of_it() -> None:
    """Its pid will come again; a notice would be taken for the death of the next who has it."""

    async def use(spawner: Spawner) -> None:
        wrong = plan(("clone", NAMESPACES, OWNER, "0 1 2 3", MAP, NONE, HOST_NETWORK, 0, NONE))
        children = pids(spawner)
        with pytest.raises(SetupFailed):
            await spawner.run(wrong, [0])
        await asyncio.sleep(0.2)
        assert pids(spawner) == children

    assert with_spawner(use) == []


@pytest.mark.root
def test_whoever_gives_up_waiting_leaks_no_descriptor() -> None:
    async def use(spawner: Spawner) -> None:
        sending = plan(("mount", 1, "tmpfs", 0, []), *(("send", 1) for _ in range(8)))
        before = residue.descriptors().keys()
        for _ in range(20):
            task = asyncio.create_task(spawner.run(sending))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await spawner.run(Plan())
        assert residue.descriptors().keys() == before

    with_spawner(use)


@pytest.mark.root
def test_many_plans_at_a_time_are_answered_each() -> None:
    async def use(spawner: Spawner) -> None:
        async def one(index: int) -> None:
            wrong = plan(("open", 1, NONE, f"/not/there/{index}", 0))
            assert f"/not/there/{index}" in str(await failure(spawner, wrong))

        await asyncio.gather(*map(one, range(300)))

    with_spawner(use)


@pytest.mark.root
def test_kept_descriptors_stay_until_they_are_dropped() -> None:
    async def use(spawner: Spawner) -> None:
        await spawner.run(plan(("mount", 1, "tmpfs", 0, []), ("keep", 1, FIRST_FREE_KEY)))
        await spawner.run(plan(("mkdir", FIRST_FREE_KEY, "a", 0o700), ("drop", FIRST_FREE_KEY)))
        caught = await failure(spawner, plan(("mkdir", FIRST_FREE_KEY, "b", 0o700)))
        assert caught.errno == errno.EBADMSG

    with_spawner(use)


@pytest.mark.root
def test_it_sees_nothing_of_the_hosts_files() -> None:
    async def use(spawner: Spawner) -> None:
        await failure(spawner, plan(("open", 1, NONE, "/etc/passwd", 0)))
        await spawner.run(plan(("enter", HOST_MOUNTS), ("open", 1, NONE, "/etc/passwd", 0), ("enter", OWN_MOUNTS)))
        assert len(Path(f"/proc/{spawner._pid}/mountinfo").read_text().splitlines()) < 10

    with_spawner(use)


@pytest.mark.root
def test_closing_takes_its_directories_along(tmp_path: Path) -> None:
    (tmp_path / "ours" / "below").mkdir(parents=True)
    (tmp_path / "other").mkdir()

    async def use(spawner: Spawner) -> None:
        assert str(tmp_path) not in Path(f"/proc/{spawner._pid}/cmdline").read_text()

    with_spawner(use, (str(tmp_path / "ours"),))
    assert os.listdir(tmp_path) == ["other"]


@pytest.mark.root
def test_a_killed_spawner_is_noticed_and_takes_its_reaper_along() -> None:
    async def use(spawner: Spawner) -> None:
        both = {spawner._pid, *pids(spawner)}
        os.kill(spawner._pid, signal.SIGKILL)
        with pytest.raises(PlatformError):
            await asyncio.wait_for(use_for_ever(spawner), 5)
        assert not spawner.running
        assert not residue.settled(lambda: alive(both))

    assert with_spawner(use) == ["lost"]


def test_a_missing_helper_names_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(spawners, "files", lambda _: tmp_path)
    with pytest.raises(PlatformError, match="run `make setup`"):
        spawners.binary()


async def use_for_ever(spawner: Spawner) -> None:
    while True:
        await spawner.run(plan(("mount", 1, "tmpfs", 0, [])))


# The death of those who use it

NODE = """
import sys, time
import shoal
boxes = [shoal.Sandbox.create() for _ in range(3)]
for box in boxes:
    box.commands.run("trap '' TERM INT HUP; sleep 600 & disown; true")
    box.commands.run("setsid sh -c 'while :; do :; done' & true")
print("ready", flush=True)
time.sleep(600)
"""


@contextmanager
def node() -> Iterator[subprocess.Popen[str]]:
    """A Python of its own with three busy sandboxes."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", NODE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_however_a_node_ends_nothing_of_it_is_left(how: signal.Signals) -> None:
    with node() as process:
        below = {found.pid for found in residue.descendants(process.pid)}
        assert len(below) > 3 * 3
        assert residue.cgroups(process.pid) or os.geteuid()
        process.send_signal(how)
        start = time.monotonic()
        left = residue.settled(lambda: alive(below))
        assert not left
        assert not residue.settled(lambda: residue.cgroups(process.pid))
        assert time.monotonic() - start < 5
        assert process.wait(5) != 0


@pytest.mark.root
def test_the_sandboxes_of_a_killed_spawner_are_lost_and_the_node_goes_on() -> None:
    script = """
import os, signal, time
import shoal
from shoal.sdk.embedded import engine
boxes = [shoal.Sandbox.create() for _ in range(4)]
running = [box.commands.run("sleep 600", background=True) for box in boxes]
for shard in list(engine().node.tiers.started["namespace"]._shards):
    os.kill(shard.spawner._pid, signal.SIGKILL)
for box, command in zip(boxes, running):
    for call in (command.wait, lambda: box.commands.run("true")):
        try:
            call()
        except shoal.SandboxGone as gone:
            print(gone.reason)
with shoal.Sandbox.create() as box:
    print(box.commands.run("echo alive").stdout, end="")
print(len(shoal.Sandbox.list()))
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    ) as process:
        try:
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert err == ""
    assert out.split() == ["lost"] * 8 + ["alive", "0"]
    assert not residue.settled(lambda: residue.cgroups(process.pid))


@pytest.mark.root
def test_node_and_spawner_killed_at_once_leave_no_process() -> None:
    """Nobody is there to remove the empty cgroups then."""
    with node() as process:
        below = residue.descendants(process.pid)
        for spawner in below:
            if spawner.name == "shoal-spawner" and spawner.parent == process.pid:
                os.kill(spawner.pid, signal.SIGKILL)
        process.kill()
        assert not residue.settled(lambda: alive(found.pid for found in below))
    for root in residue.cgroups(process.pid):
        for folder, _, _ in os.walk(root, topdown=False):
            Path(folder).rmdir()
