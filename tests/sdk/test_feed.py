"""Contents that come piece by piece: from iterators, generators and files, blocking and asynchronous."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import shoal
from shoal.errors import FileExists, InvalidRequest, NotFound, PermissionDenied
from shoal.sdk.feed import pieces_of
from shoal.types import MiB


def test_all_that_gives_bytes(box: shoal.Sandbox, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"from a file")
    with (tmp_path / "f").open("rb") as file:
        box.files.write("/tmp/f", file)
    box.files.write("/tmp/g", (b"%d " % n for n in range(5)))
    box.files.write("/tmp/l", [b"a", b"", bytearray(b"b"), memoryview(b"c")])
    box.files.write("/tmp/b", io.BytesIO(b"x" * (3 * MiB)))
    box.files.write("/tmp/none", iter(()))
    box.files.append("/tmp/none", iter([b"more"]))
    box.files.append("/tmp/none", io.BytesIO(b" and more"))
    found = {name: box.files.read(f"/tmp/{name}") for name in ("f", "g", "l", "none")}
    assert found == {"f": "from a file", "g": "0 1 2 3 4 ", "l": "abc", "none": "more and more"}
    assert box.files.stat("/tmp/b").size == 3 * MiB
    box.files.write_many({"/tmp/m": iter([b"m"]), "/tmp/n": "n"})
    assert box.files.read("/tmp/m") + box.files.read("/tmp/n") == "mn"


def test_what_gives_none(box: shoal.Sandbox, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    with (tmp_path / "text").open() as text:
        for wrong in (5, None, [1, 2], ["text"], text, object()):
            with pytest.raises(InvalidRequest, match="data"):
                box.files.write("/tmp/x", wrong)  # type: ignore[arg-type]
    assert not box.files.exists("/tmp/x")
    assert box.files.list("/tmp") == []


def failing(pieces: int) -> Iterator[bytes]:
    for _ in range(pieces):
        yield b"x" * MiB
    raise ZeroDivisionError


@pytest.mark.parametrize("pieces", [0, 1, 5])
def test_one_that_fails_half_way_leaves_the_file_as_it_was(box: shoal.Sandbox, pieces: int) -> None:
    box.files.write("/tmp/f", "old")
    with pytest.raises(ZeroDivisionError):
        box.files.write("/tmp/f", failing(pieces))
    assert box.files.read("/tmp/f") == "old"
    assert [info.name for info in box.files.list("/tmp")] == ["f"]


def test_one_that_has_no_end_stops_at_the_first_error() -> None:
    """Of the sandbox's disk, or of the path."""

    def endless() -> Iterator[bytes]:
        while True:
            taken.append(1)
            yield bytes(MiB)

    taken: list[int] = []
    with shoal.Sandbox.create(profile=shoal.Profile(disk=8 * MiB)) as box:
        with pytest.raises(PermissionDenied, match="limit is reached"):
            box.files.write("/tmp/f", endless())
        assert len(taken) < 64
        with pytest.raises(FileExists):
            box.files.write("/tmp", endless())
        with pytest.raises(InvalidRequest):
            box.files.write("", endless())
        with pytest.raises(NotFound):
            box.files.append("/etc/hostname/x", endless())
        assert box.files.list("/tmp") == []


def test_the_asynchronous_half(shoal_home: Path) -> None:
    """Its iterators run on the caller's loop, and are closed there."""

    async def pieces(count: int) -> AsyncIterator[bytes]:
        loops.append(asyncio.get_running_loop())
        for number in range(count):
            await asyncio.sleep(0)
            yield b"%d" % number
        if count > 5:
            raise ZeroDivisionError

    async def main() -> None:
        async with await shoal.AsyncSandbox.create() as box:
            await box.files.write("/tmp/f", pieces(3))
            await box.files.append("/tmp/f", pieces(3))
            await box.files.append("/tmp/f", io.BytesIO(b"file"))
            await box.files.append("/tmp/f", iter([b"plain"]))
            with pytest.raises(ZeroDivisionError):
                await box.files.write("/tmp/f", pieces(6))
            assert await box.files.read("/tmp/f") == "012012fileplain"
            writing = asyncio.ensure_future(box.files.write("/tmp/f", _waiting()))
            await asyncio.sleep(0.2)
            writing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writing
            assert await box.files.read("/tmp/f") == "012012fileplain"
            assert [info.name for info in await box.files.list("/tmp")] == ["f"]
        assert set(loops) == {asyncio.get_running_loop()}

    loops: list[asyncio.AbstractEventLoop] = []
    asyncio.run(main())


async def _waiting() -> AsyncIterator[bytes]:
    yield b"x" * MiB
    await asyncio.sleep(60)


def test_small_pieces_go_together() -> None:
    sizes = [len(piece) for piece in pieces_of(b"x" * 10 for _ in range(100_000))]
    assert sum(sizes) == 1_000_000
    assert len(sizes) < 10


MEMORY = """
import hashlib, os, random, sys
from pathlib import Path
import shoal

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10

def pieces(count):
    for _ in range(count):
        yield os.urandom(1 << 20)

folder, count = Path(sys.argv[1]), int(sys.argv[2])
with shoal.Sandbox.create() as box:
    box.commands.run("true")
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()
    box.files.write("/tmp/f", pieces(count))
    digest = hashlib.sha256()
    for piece in box.files.read("/tmp/f", "stream"):
        digest.update(piece)
    assert box.commands.run("sha256sum < /tmp/f").stdout.split()[0] == digest.hexdigest()
    box.files.download("/tmp/f", folder / "f")
    box.files.upload(folder / "f", "/tmp/g")
    assert box.commands.run("sha256sum < /tmp/g").stdout.split()[0] == digest.hexdigest()
    with (folder / "f").open("rb") as file:
        box.files.append("/tmp/g", file)
    assert box.files.stat("/tmp/g").size == 2 * count << 20
    print(resident() - before)
"""


@pytest.mark.parametrize("count", [100, pytest.param(300, marks=pytest.mark.slow)])
def test_the_nodes_memory_stays_flat(shoal_home: Path, tmp_path: Path, count: int) -> None:
    """300 MiB in under 64 MiB, in a process that does nothing else: by iterator, stream, download, upload and file."""
    command = [sys.executable, "-c", MEMORY, str(tmp_path), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64 * MiB
