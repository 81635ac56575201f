"""Writable layers on disk: limits of the kernel's, and nothing left."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import residue
import shoal
from shoal.errors import PermissionDenied, StorageFull, Unsupported
from shoal.sandbox import disk
from shoal.types import MiB

pytestmark = pytest.mark.root

PROFILE = shoal.Profile(disk=64 * MiB, inodes=2048, memory=256 * MiB, upper="disk")


@pytest.fixture
def stored() -> Iterator[shoal.Sandbox]:
    try:
        box = shoal.Sandbox.create(profile=PROFILE)
    except Unsupported as missing:
        pytest.skip(str(missing))
    with box:
        yield box


def loops() -> set[str]:
    """Loop devices in use whose file has no name any more."""
    found = set()
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            if "upper-" in path.read_text():
                found.add(path.parts[3])
        except FileNotFoundError:
            continue
    return found


def test_bytes_end_where_the_profile_says(stored: shoal.Sandbox) -> None:
    result = stored.commands.run("dd if=/dev/zero of=/workspace/big bs=1M count=200")
    assert result.exit_code != 0
    assert "No space left" in result.stderr
    assert 40 * MiB < stored.files.stat("/workspace/big").size <= 64 * MiB
    with pytest.raises(PermissionDenied, match="limit is reached"):
        stored.files.write("/workspace/more", bytes(8 * MiB))
    stored.commands.run("rm /workspace/big", check=True)
    stored.files.write("/workspace/more", bytes(8 * MiB))


def test_files_end_where_the_profile_says(stored: shoal.Sandbox) -> None:
    result = stored.commands.run("mkdir n; cd n; for i in $(seq 4000); do echo > $i || exit 7; done 2>/dev/null")
    assert result.exit_code == 7
    assert 1000 < len(stored.files.list("/workspace/n")) <= 2048


def test_they_are_not_memory(stored: shoal.Sandbox) -> None:
    """Past the profile's memory in all, which files in memory would be charged to."""
    for _ in range(8):
        stored.commands.run("dd if=/dev/urandom of=f bs=1M count=48 conv=fsync; rm f", check=True)
    assert stored.commands.run("true").oom_kills == 0


def test_everything_else_is_as_in_memory(stored: shoal.Sandbox) -> None:
    stored.commands.run("echo x >> /etc/hosts; rm /etc/issue; mkdir -p a/b; ln -s b a/l; chown 1000 a", check=True)
    found = {change.path: change.kind for change in stored.changes()}
    assert found == {
        "/etc/hosts": "changed", "/etc/issue": "removed",
        "/workspace/a": "added", "/workspace/a/b": "added", "/workspace/a/l": "added",
    }  # fmt: skip
    assert stored.commands.run("stat -c %u a; ls /lost+found 2>&1 | head -1").stdout.startswith("1000\n")


def test_nothing_is_left_of_it(stored: shoal.Sandbox) -> None:
    stored.commands.run("dd if=/dev/zero of=f bs=1M count=32", check=True)
    stored.kill()
    assert not residue.settled(loops, 10)
    home = Path(os.environ["SHOAL_HOME"])
    assert not list(home.rglob("upper-*"))


def test_without_room_the_caller_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk, "_LEAST", 1 << 60)
    with pytest.raises(StorageFull, match="bytes free"):
        asyncio.run(disk.make_upper(tmp_path, 1, 100))
    assert os.listdir(tmp_path) == []


def test_without_its_program_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk, "_path", lambda: "/not/there")
    with pytest.raises(Unsupported, match="install e2fsprogs"):
        asyncio.run(disk.make_upper(tmp_path, 1, 100))
    assert os.listdir(tmp_path) == []


def test_one_that_is_not_used_is_given_back(tmp_path: Path) -> None:
    try:
        upper = asyncio.run(disk.make_upper(tmp_path, 32 * MiB, 1000))
    except Unsupported as missing:
        pytest.skip(str(missing))
    assert os.listdir(tmp_path) == []
    upper.close()
    assert not residue.settled(loops, 10)
