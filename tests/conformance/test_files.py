"""Files: sizes, names, links, disk limits. Same in as out, or an error."""

from __future__ import annotations

import hashlib
import os
import random
import resource
import subprocess
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from shoal.types import MiB, Profile

LARGE = [pytest.param(size, marks=pytest.mark.slow) for size in (64 * MiB, 300 * MiB)]
SIZES = [0, 1, 4095, 18433, 65537, MiB + 1, *LARGE]
NAMES = [
    "☕🦑", "漢字かな", "-rf", "a b", "it's \"quoted\"", "new\nline", "%2e%2e", "x" * 255, os.fsdecode(b"\xff\xfe\x80"),
    unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é"), "$(touch pwned)", "`id`", "a;b|c&d", "*", "~",
    "\\", "\t", ".hidden",
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_t16_sizes(box: shoal.Sandbox, tmp_path: Path, size: int) -> None:
    """Both ways, whole in memory and by pieces; the node's memory does not grow with what passes through."""
    local = tmp_path / "local"
    source = random.Random(size)
    with local.open("wb") as file:
        for start in range(0, size, MiB):
            file.write(source.randbytes(min(MiB, size - start)))
    digest = hashlib.sha256()
    with local.open("rb") as file:
        while piece := file.read(MiB):
            digest.update(piece)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    box.files.upload(local, "/tmp/up")
    assert box.commands.run("sha256sum < /tmp/up").stdout.split()[0] == digest.hexdigest()
    box.files.download("/tmp/up", tmp_path / "down")
    down = hashlib.sha256()
    with (tmp_path / "down").open("rb") as file:
        while piece := file.read(MiB):
            down.update(piece)
    assert down.hexdigest() == digest.hexdigest()
    streamed = hashlib.sha256()
    for piece in box.files.read("/tmp/up", format="stream"):
        streamed.update(piece)
    assert streamed.hexdigest() == digest.hexdigest()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
    if size <= 64 * MiB:
        data = box.files.read("/tmp/up", format="bytes")
        box.files.write("/tmp/again", data)
        box.files.append("/tmp/again", data[:10])
        assert hashlib.sha256(data).digest() == digest.digest()
        assert box.files.stat("/tmp/again").size == size + min(size, 10)


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_t17_names(box: shoal.Sandbox, tmp_path: Path, name: str) -> None:
    local = tmp_path / "local"
    local.write_text(name, errors="surrogateescape")
    path = f"/tmp/names/{name}"
    box.files.make_dir("/tmp/names")
    with box.files.watch("/tmp/names") as watch:
        box.files.upload(local, path)
        assert next(event.path for event in watch if event.kind == "renamed") == path
    assert [info.name for info in box.files.list("/tmp/names")] == [name]
    assert [info.path for info in box.files.list("/tmp/names")] == [path]
    assert box.files.stat(path).name == name
    assert box.files.exists(path)
    listed = box.commands.run("ls -A --zero /tmp/names || ls -A /tmp/names | tr '\\n' '\\0'").stdout_bytes
    assert listed.rstrip(b"\0") == os.fsencode(name)
    box.files.download("/tmp/names", tmp_path / "tree")
    assert os.listdir(tmp_path / "tree") == [name]
    assert [change.path for change in box.changes() if change.path.startswith("/tmp/names/")] == [path]
    diff = box.diff(path="/tmp/names")
    (tmp_path / "applied").mkdir()
    subprocess.run(["git", "apply"], input=os.fsencode(diff), cwd=tmp_path / "applied", check=True)
    assert os.listdir(tmp_path / "applied") == [name]
    box.files.rename(path, "/tmp/names/plain")
    box.files.rename("/tmp/names/plain", path)
    box.files.remove(path)
    assert box.files.list("/tmp/names") == []


def test_t17_nfc_and_nfd_are_two_files(box: shoal.Sandbox) -> None:
    one, two = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))
    box.files.write(f"/tmp/n/{one}", "one")
    box.files.write(f"/tmp/n/{two}", "two")
    assert {info.name: box.files.read(info.path) for info in box.files.list("/tmp/n")} == {one: "one", two: "two"}


def test_t15_a_full_disk_is_an_error_and_then_none() -> None:
    """Every mount that the sandbox itself sees is filled; a write that failed leaves the old file as it was."""
    profile = Profile(cpu=2, memory=256 * MiB, disk=64 * MiB, processes=32)
    with shoal.Sandbox.create(profile=profile) as box:
        mounts = [line.split()[1] for line in box.commands.run("cat /proc/self/mounts").stdout.splitlines()]
        box.files.write("/tmp/kept", "old")
        for mount in (*mounts, "/tmp"):
            result = box.commands.run(f"head -c 1000000000 /dev/zero > {mount}/fill", timeout=60)
            assert result.exit_code != 0, mount
            if "No space" in result.stderr:
                with pytest.raises(shoal.PermissionDenied, match="No space"):
                    box.files.write("/tmp/kept", "n" * MiB)
                assert box.files.read("/tmp/kept") == "old"
            box.commands.run(f"rm -f {mount}/fill")
        assert box.commands.run("head -c 1000000 /dev/zero > /tmp/fits").exit_code == 0
        box.files.write("/tmp/kept", "new")
        assert box.files.read("/tmp/kept") == "new"


@pytest.mark.root
def test_writes_are_atomic_and_keep_mode_and_owner(box: shoal.Sandbox) -> None:
    box.commands.run("mkdir /w; echo old > /w/f; chmod 640 /w/f; chown 1000:1000 /w/f; ln -s f /w/link", check=True)
    box.files.write("/w/link", "new")
    info = box.files.stat("/w/f")
    assert (info.mode, info.uid, info.gid, box.files.read("/w/f")) == (0o640, 1000, 1000, "new")
    assert box.files.stat("/w/link").kind == "symlink"
    box.files.write("/deep/er/than/there", "x")
    assert box.files.stat("/deep/er/than").kind == "directory"
    assert [info.name for info in box.files.list("/w")] == ["f", "link"]


def test_errors_name_what_is_wrong(box: shoal.Sandbox) -> None:
    box.commands.run("mkdir /w; touch /w/f", check=True)
    with pytest.raises(shoal.NotFound, match="/w/none"):
        box.files.read("/w/none")
    with pytest.raises(shoal.NotFound):
        box.files.read("/w/f/below")
    with pytest.raises(shoal.FileExists):
        box.files.read("/w")
    with pytest.raises(shoal.FileExists):
        box.files.write("/w", "x")
    with pytest.raises(shoal.PermissionDenied):
        box.files.write("/sys/x", "x")
    with pytest.raises(shoal.NotFound):
        box.files.remove("/w/none")
    for wrong in ("", "a\0b", "\ud800", "x" * 5000):
        with pytest.raises(shoal.InvalidRequest, match="path"):
            box.files.read(wrong)
    with pytest.raises(shoal.InvalidRequest):
        box.files.read("/" + "x" * 300)


def test_times_before_1970(box: shoal.Sandbox) -> None:
    box.commands.run("touch -d '1969-12-31 23:59:59 UTC' /tmp/old", check=True)
    assert box.files.stat("/tmp/old").mtime == -1


def test_streams_and_trees_are_what_they_were(box: shoal.Sandbox, tmp_path: Path) -> None:
    """By pieces in, as a tree out and in again: contents, modes, links of both kinds, holes, times."""
    box.files.write("/tmp/t/f", (b"%d\n" % n for n in range(1000)), mode=0o751)
    box.commands.run("cd /tmp/t; ln -s f l; ln f h; truncate -s 1G hole; touch -d @1.5 f; mkdir -p e/e", check=True)
    box.files.download("/tmp/t", tmp_path / "t")
    box.files.upload(tmp_path / "t", "/tmp/again")
    look = "find . -mindepth 1 -printf '%P %y %m %n %s %T@ %l\\n' | sort; sha256sum f"
    before, after = (box.commands.run(look, cwd=cwd, check=True).stdout for cwd in ("/tmp/t", "/tmp/again"))
    assert after == before
    assert "f f 751 2 3890 1.5" in before
    assert box.commands.run("stat -c %b /tmp/again/hole").stdout == "0\n"


def test_a_stream_that_fails_changes_nothing(box: shoal.Sandbox) -> None:
    def failing() -> Iterator[bytes]:
        yield b"new"
        raise ZeroDivisionError

    box.files.write("/tmp/f", "old")
    with pytest.raises(ZeroDivisionError):
        box.files.write("/tmp/f", failing())
    assert [(info.name, box.files.read(info.path)) for info in box.files.list("/tmp")] == [("f", "old")]


def test_a_watch_tells_and_ends(box: shoal.Sandbox) -> None:
    box.files.make_dir("/tmp/w")
    with box.files.watch("/tmp/w", recursive=True) as watch:
        box.commands.run("mkdir d; echo > d/f; rm -r d", cwd="/tmp/w", check=True)
        kinds = set()
        for event in watch:
            kinds.add((event.kind, event.path))
            if event == shoal.FileEvent("removed", "/tmp/w/d", None, True):
                break
        assert {("created", "/tmp/w/d"), ("created", "/tmp/w/d/f"), ("removed", "/tmp/w/d/f")} <= kinds
        box.files.remove("/tmp/w")
        with pytest.raises(shoal.NotFound):
            for _ in watch:
                pass


def test_changes_and_diff_since_a_mark(box: shoal.Sandbox) -> None:
    box.files.write("/workspace/f", "one\n")
    mark = box.mark()
    box.files.append("/workspace/f", "two\n")
    box.files.write("/workspace/g", "new\n")
    assert [(change.path, change.kind) for change in box.changes(since=mark)] == [
        ("/workspace/f", "changed"), ("/workspace/g", "added"),
    ]  # fmt: skip
    assert "@@ -1 +1,2 @@\n one\n+two\n" in box.diff(since=mark)
    assert "@@ -0,0 +1,2 @@\n+one\n+two\n" in box.diff(path="/workspace")
