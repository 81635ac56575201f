"""Watches on real files, and the records they are made of."""

from __future__ import annotations

import asyncio
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.errors import LimitExceeded, NotFound, PlatformError, SandboxGone
from shoal.node.watch import WATCHES_MAX, parse_event
from shoal.types import FileEvent

Story = list[tuple[str, str]]


@pytest.fixture
def watched(box: shoal.Sandbox) -> Iterator[shoal.Watch]:
    box.commands.run("mkdir -p w/sub; echo x > w/f", check=True)
    with box.files.watch("/workspace/w") as watch:
        yield watch


def told(watch: shoal.Watch, *, until: str) -> list[FileEvent]:
    """All events to the first one of a path that ends so."""
    found: list[FileEvent] = []
    for event in watch:
        found.append(event)
        if event.path.endswith(until):
            return found
    raise AssertionError(f"ended before {until}")


def story(events: list[FileEvent]) -> Story:
    return [(event.kind, event.path.removeprefix("/workspace/w/")) for event in events]


def test_each_kind(box: shoal.Sandbox, watched: shoal.Watch) -> None:
    script = "echo y > n; chmod 600 n; mv n m; rm m; mkdir d; rmdir d; mv f /tmp/f; mv /tmp/f g; echo z >> g; touch end"
    box.commands.run(f"cd w; {script}", check=True)
    events = told(watched, until="/end")
    assert story(events) == [
        ("created", "n"), ("modified", "n"), ("closed", "n"), ("attributes", "n"), ("renamed", "m"), ("removed", "m"),
        ("created", "d"), ("removed", "d"), ("removed", "f"), ("created", "g"), ("modified", "g"), ("closed", "g"),
        ("created", "end"),
    ]  # fmt: skip
    assert events[4].old == "/workspace/w/n"
    assert [event.directory for event in events if event.path.endswith("/d")] == [True, True]


def test_what_is_deeper_is_told_only_of_a_tree(box: shoal.Sandbox, watched: shoal.Watch) -> None:
    with box.files.watch("/workspace/w", recursive=True) as tree:
        box.commands.run("touch w/sub/deep w/end", check=True)
        assert ("created", "sub/deep") in story(told(tree, until="/end"))
    assert story(told(watched, until="/end")) == [("created", "end")]


def test_folders_that_appear_move_and_go(box: shoal.Sandbox) -> None:
    box.commands.run("mkdir w", check=True)
    with box.files.watch("/workspace/w", recursive=True) as watch:
        box.commands.run("mkdir -p /tmp/t/in/er; echo x > /tmp/t/in/er/f; mv /tmp/t w/t; touch w/1", check=True)
        assert {("created", name) for name in ("t", "t/in", "t/in/er", "t/in/er/f")} <= set(
            story(told(watch, until="/1"))
        )
        box.commands.run("mv w/t w/u; touch w/u/in/er/new; touch w/2", check=True)
        events = told(watch, until="/2")
        assert ("renamed", "u") in story(events)
        assert ("created", "u/in/er/new") in story(events)
        box.commands.run("mv w/u /tmp/u; touch w/3", check=True)
        assert ("removed", "u") in story(told(watch, until="/3"))
        time.sleep(0.1)  # the other half of the rename is waited for
        box.commands.run("touch /tmp/u/in/er/unseen w/4", check=True)
        assert not [path for _, path in story(told(watch, until="/4")) if "unseen" in path]


def test_no_file_of_a_folder_that_has_just_come_is_lost(box: shoal.Sandbox) -> None:
    box.commands.run("mkdir w", check=True)
    names = {f"{n}/{m}/f{m}" for n in range(150) for m in range(3)}
    script = "import os\nfor n in range(150):\n for m in range(3): os.makedirs(f'w/{n}/{m}')"
    script += "; open(f'w/{n}/{m}/f{m}', 'w').close()"
    with box.files.watch("/workspace/w", recursive=True) as watch:
        box.commands.run(["python3", "-c", script + "\nopen('w/end', 'w').close()"], check=True)
        seen = {path for kind, path in story(told(watch, until="/end")) if kind == "created"}
        end = time.monotonic() + 10
        while not names <= seen and time.monotonic() < end:
            seen |= {path for kind, path in story(watch.take(1)) if kind == "created"}
    assert names <= seen


def test_names_of_any_bytes(box: shoal.Sandbox) -> None:
    names = ["☕", "-rf", "a b", "a\nb", "%2e%2e", "x" * 255, os.fsdecode(b"\xff\xfe"), "e\u0301", "\u00e9"]
    with box.files.watch("/tmp") as watch:
        for name in names:
            box.files.write(f"/tmp/{name}", "x")
        found = [event.path for event in told(watch, until="\u00e9") if event.kind == "renamed"]
    assert found == [f"/tmp/{name}" for name in names]


def test_a_file(box: shoal.Sandbox) -> None:
    box.files.write("/tmp/f", "x")
    with box.files.watch("/tmp/f") as watch:
        box.files.append("/tmp/f", "y")
        assert next((event.kind, event.path) for event in watch.take(5)) == ("modified", "/tmp/f")
        box.files.remove("/tmp/f")
        with pytest.raises(NotFound):
            for _ in watch:
                pass


@pytest.mark.parametrize("end", ["rm -r w", "mv w v"])
def test_the_end_of_what_is_watched(box: shoal.Sandbox, end: str) -> None:
    box.commands.run("mkdir w; touch w/f", check=True)
    with box.files.watch("/workspace/w", recursive=True) as watch:
        box.commands.run(end, check=True)
        with pytest.raises(NotFound, match="/workspace/w"):
            for _ in watch:
                pass


def test_the_end_of_the_working_directory(box: shoal.Sandbox) -> None:
    """In which the watch itself was started."""
    with box.files.watch("/workspace") as watch:
        box.files.remove("/workspace")
        with pytest.raises(NotFound):
            for _ in watch:
                pass


def test_the_end_of_the_sandbox() -> None:
    with shoal.Sandbox.create() as box:
        watch = box.files.watch("/tmp")
        box.kill()
        with pytest.raises(SandboxGone):
            next(iter(watch))
        watch.close()


def test_nothing_there(box: shoal.Sandbox) -> None:
    with pytest.raises(NotFound, match="/none"):
        box.files.watch("/none")


def test_closing_ends_whoever_waits(box: shoal.Sandbox, watched: shoal.Watch) -> None:
    got: list[FileEvent] = []
    waiting = threading.Thread(target=lambda: got.extend(watched))
    waiting.start()
    time.sleep(0.2)
    watched.close()
    waiting.join(10)
    assert not waiting.is_alive()
    assert got == []
    assert watched.take(0.1) == []
    watched.close()


def test_waiting_has_an_end(box: shoal.Sandbox, watched: shoal.Watch) -> None:
    assert watched.take(0.05) == []
    box.commands.run("touch w/n", check=True)
    assert story(watched.take(5))[0] == ("created", "n")


def test_events_are_not_lost_between_two_loops(box: shoal.Sandbox, watched: shoal.Watch) -> None:
    box.commands.run("cd w; touch 1 2 3 4", check=True)
    time.sleep(0.2)
    for event in watched:
        assert event.path.endswith("/1")
        break
    assert story(told(watched, until="/4"))[-1] == ("created", "4")


def test_what_nobody_takes_is_an_overflow_and_then_goes_on(box: shoal.Sandbox) -> None:
    box.commands.run("mkdir w", check=True)
    with box.files.watch("/workspace/w", recursive=True) as watch:
        script = "import os\nfor n in range(60000): p = f'w/{n % 7}{\"x\" * 100}'; open(p, 'w').close(); os.unlink(p)"
        box.commands.run(["python3", "-c", script + "\nos.mkdir('w/late')"], check=True)
        assert "overflow" in {event.kind for event in _drained(watch)}
        box.commands.run("touch w/late/f", check=True)
        assert ("created", "late/f") in story(_drained(watch))


def _drained(watch: shoal.Watch) -> list[FileEvent]:
    found: list[FileEvent] = []
    while events := watch.take(1):
        found += events
    return found


def test_they_are_few(box: shoal.Sandbox) -> None:
    watches = [box.files.watch("/tmp") for _ in range(WATCHES_MAX)]
    with pytest.raises(LimitExceeded, match="watches"):
        box.files.watch("/tmp")
    for watch in watches:
        watch.close()
    box.files.watch("/tmp").close()


def test_the_async_one(shoal_home: Path) -> None:
    async def main() -> None:
        async with await shoal.AsyncSandbox.create() as box:
            async with await box.files.watch("/tmp") as watch:
                await box.files.write("/tmp/f", "x")
                async for event in watch:
                    if event.kind == "renamed":
                        assert event.path == "/tmp/f"
                        break
            assert [event async for event in watch if event.path.endswith("/none")] == []

    asyncio.run(main())


def record(number: int, directory: int, path: bytes, old: bytes = b"") -> bytes:
    return struct.pack("<II", number, directory) + b"".join(struct.pack("<I", len(text)) + text for text in (path, old))


def test_records() -> None:
    assert parse_event(record(2, 1, b"a\xff"), "/w/") == FileEvent("created", "/w/a\udcff", None, True)
    assert parse_event(record(6, 0, b"b", b"a"), "w") == FileEvent("renamed", "w/b", "w/a", False)
    assert parse_event(record(8, 1, b""), "/") == FileEvent("overflow", "/", None, True)
    assert parse_event(record(1, 1, b""), "/") is None
    with pytest.raises(PlatformError):
        parse_event(record(99, 0, b""), "/")


@given(st.binary(max_size=40))
def test_a_path_that_no_kernel_has_is_refused(data: bytes) -> None:
    from shoal.node.watch import _record_length

    try:
        length = _record_length(data)
    except PlatformError:
        return
    assert length is None or length <= len(data)
