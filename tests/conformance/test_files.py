"""Files: sizes, names, links, disk limits. Same in as out, or an error."""

from __future__ import annotations

import hashlib
import os
import random
import resource
import subprocess
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
    box.files.upload(local, "up")
    assert box.commands.run("sha256sum < up").stdout.split()[0] == digest.hexdigest()
    box.files.download("up", tmp_path / "down")
    down = hashlib.sha256()
    with (tmp_path / "down").open("rb") as file:
        while piece := file.read(MiB):
            down.update(piece)
    assert down.hexdigest() == digest.hexdigest()
    streamed = hashlib.sha256()
    for piece in box.files.read("up", format="stream"):
        streamed.update(piece)
    assert streamed.hexdigest() == digest.hexdigest()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
    if size <= 64 * MiB:
        data = box.files.read("up", format="bytes")
        box.files.write("again", data)
        box.files.append("again", data[:10])
        assert hashlib.sha256(data).digest() == digest.digest()
        assert box.files.stat("again").size == size + min(size, 10)


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_t17_names(box: shoal.Sandbox, tmp_path: Path, name: str) -> None:
    local = tmp_path / "local"
    local.write_text(name, errors="surrogateescape")
    path = f"/workspace/names/{name}"
    box.files.upload(local, path)
    assert [info.name for info in box.files.list("/workspace/names")] == [name]
    assert [info.path for info in box.files.list("/workspace/names")] == [path]
    assert box.files.stat(path).name == name
    assert box.files.exists(path)
    listed = box.commands.run("ls -A --zero names || ls -A names | tr '\\n' '\\0'").stdout_bytes
    assert listed.rstrip(b"\0") == os.fsencode(name)
    box.files.download("/workspace/names", tmp_path / "tree")
    assert os.listdir(tmp_path / "tree") == [name]
    assert [change.path for change in box.changes() if change.path.startswith("/workspace/names/")] == [path]
    box.files.rename(path, "/workspace/names/plain")
    box.files.rename("/workspace/names/plain", path)
    box.files.remove(path)
    assert box.files.list("/workspace/names") == []


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_t17_names_in_watches_and_diffs(box: shoal.Sandbox, tmp_path: Path, name: str) -> None:
    path = f"/tmp/names/{name}"
    box.files.make_dir("/tmp/names")
    with box.files.watch("/tmp/names") as watch:
        box.files.write(path, name.encode(errors="surrogateescape"))
        assert next(event.path for event in watch if event.kind == "renamed") == path
    (tmp_path / "applied").mkdir()
    diff = box.diff(path="/tmp/names")
    subprocess.run(["git", "apply"], input=os.fsencode(diff), cwd=tmp_path / "applied", check=True)
    assert os.listdir(tmp_path / "applied") == [name]


def test_t17_nfc_and_nfd_are_two_files(box: shoal.Sandbox) -> None:
    one, two = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))
    box.files.write(f"n/{one}", "one")
    box.files.write(f"n/{two}", "two")
    assert {info.name: box.files.read(info.path) for info in box.files.list("n")} == {one: "one", two: "two"}


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


def test_an_atomic_write_keeps_the_owner(box: shoal.Sandbox) -> None:
    box.commands.run("mkdir /w; echo old > /w/f; chown 1000:1000 /w/f", check=True)
    box.files.write("/w/f", "new")
    info = box.files.stat("/w/f")
    assert (info.uid, info.gid, box.files.read("/w/f")) == (1000, 1000, "new")


def test_writes_are_atomic_and_keep_the_mode(box: shoal.Sandbox) -> None:
    box.commands.run("mkdir /w; echo old > /w/f; chmod 640 /w/f; ln -s f /w/link", check=True)
    box.files.write("/w/link", "new")
    assert (box.files.stat("/w/f").mode, box.files.read("/w/f")) == (0o640, "new")
    assert box.files.stat("/w/link").kind == "symlink"
    box.files.write("/deep/er/than/there", "x")
    assert box.files.stat("/deep/er/than").kind == "directory"
    assert [info.name for info in box.files.list("/w")] == ["f", "link"]


def test_a_write_asks_whether_the_file_may_be_written(box: shoal.Sandbox) -> None:
    """It is renamed over, for which the folder's mode would be enough."""
    box.files.write("mine", "old", mode=0o444, user="user")
    box.files.write("roots", "old")
    for name in ("mine", "roots"):
        with pytest.raises(shoal.PermissionDenied, match=name):
            box.files.write(name, "new", user="user")
        assert box.files.read(name, user="user") == "old"
    box.commands.run("chmod 600 roots", check=True)
    with pytest.raises(shoal.PermissionDenied, match="roots"):
        box.files.read("roots", user="user")


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


@pytest.mark.parametrize("signal", ["STOP", "KILL"])
def test_an_upload_that_is_held_up_holds_nothing_else_up(box: shoal.Sandbox, signal: str) -> None:
    """Half a frame is on its way when its reader stops or dies. The channel goes on, and stays in step."""
    data = os.urandom(96 * MiB)
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(box.files.write, "/tmp/held", data)
        # The operation is a copy of init, which itself can be neither stopped nor killed.
        hold = f"until pids=$(pgrep -x shoal-init | grep -vx 1); do :; done; kill -{signal} $pids; sleep 0.2"
        assert box.commands.run(hold, timeout=30).exit_code == 0
        for _ in range(20):
            assert box.commands.run(["echo", "on"]).stdout == "on\n"
        if signal == "KILL":
            with pytest.raises(shoal.Interrupted):
                writing.result(60)
        else:
            assert not writing.done()
            box.commands.run("kill -CONT $(pgrep -x shoal-init | grep -vx 1)", check=True)
            writing.result(60)
            assert box.files.read("/tmp/held", "bytes") == data
    box.files.write("/tmp/held", b"after")
    assert box.files.read("/tmp/held", "bytes") == b"after"


def test_appending_much(box: shoal.Sandbox) -> None:
    """Pages can't be moved into a file that is only appended to; they are copied."""
    data = os.urandom(3 * MiB + 5)
    box.files.append("/tmp/log", data)
    box.files.append("/tmp/log", data)
    assert box.files.read("/tmp/log", "bytes") == data + data


def test_a_file_past_the_limit_is_not_sent_to_its_end(box: shoal.Sandbox) -> None:
    box.commands.run("truncate -s 100G /tmp/hole", check=True)
    with pytest.raises(shoal.LimitExceeded):
        box.files.read("/tmp/hole", "bytes", limit=1024)


@pytest.mark.parametrize("rounds", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_t18_links_race_against_the_host(box: shoal.Sandbox, tmp_path: Path, rounds: int) -> None:
    """Six loops swap a path between a file, links out and a link to a directory, while it is read and written."""
    canary = tmp_path / "canary"
    canary.write_text("canary")
    box.commands.run("mkdir -p /w/d; echo inside > /w/f; echo inside > /w/d/f", check=True)
    makers = ["echo inside >", "ln -s d", *(f"ln -s {path}" for path in (canary, tmp_path, "/etc/hostname", "/proc/1"))]
    loops = [
        box.commands.run(f"while :; do {make} {number}; mv -T {number} f; done", cwd="/w", background=True)
        for number, make in enumerate(makers)
    ]
    written = 0
    for number in range(rounds):
        try:
            assert "canary" not in box.files.read("/w/f", limit="1MiB")
            box.files.write("/w/f", f"inside {number}")
            written += 1
        except (shoal.NotFound, shoal.FileExists, shoal.PermissionDenied, shoal.InvalidRequest, shoal.Interrupted):
            continue
    assert written
    for loop in loops:
        loop.kill()
    assert canary.read_text() == "canary"
    assert os.listdir(tmp_path) == ["canary"]


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
