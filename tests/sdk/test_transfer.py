"""Trees that go in and come out. What comes out is hostile."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import shoal
from shoal.errors import FileExists, InvalidRequest, LimitExceeded, NotFound, PlatformError
from shoal.sdk import transfer
from shoal.sdk.embedded import call
from shoal.types import FileInfo


def listing(root: Path) -> dict[str, str]:
    """What is below a folder, and what each is."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        else:
            found[name] = "folder" if path.is_dir() else path.read_text()
    return found


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "sub" / "empty").mkdir(parents=True)
    (root / "a").write_text("a")
    (root / "sub" / "b").write_text("b")
    (root / "sub" / "b").chmod(0o750)
    (root / "link").symlink_to("sub/b")
    (root / "dangling").symlink_to("/not/there")
    (root / "to-folder").symlink_to("sub")
    return root


# Up


def test_a_tree_goes_in_with_modes_and_links(box: shoal.Sandbox, tree: Path) -> None:
    box.files.upload(tree, "/workspace/t")
    seen = box.commands.run("cd t; find . -mindepth 1 -printf '%p %y %m %l\\n' | sort").stdout.splitlines()
    plain = [line for line in seen if " l " not in line]
    assert [line.rstrip() for line in plain] == ["./a f 644", "./sub d 755", "./sub/b f 750", "./sub/empty d 755"]
    links = {line.split()[0]: line.split()[-1] for line in seen if " l " in line}
    assert links == {"./dangling": "/not/there", "./link": "sub/b", "./to-folder": "sub"}


def test_a_tree_goes_in_again_over_itself(box: shoal.Sandbox, tree: Path) -> None:
    box.files.upload(tree, "/workspace/t")
    (tree / "a").write_text("changed")
    (tree / "link").unlink()
    (tree / "link").symlink_to("a")
    box.files.upload(tree, "/workspace/t")
    assert box.files.read("/workspace/t/link") == "changed"


def test_a_file_goes_in_and_a_link_to_one_as_what_it_points_to(box: shoal.Sandbox, tree: Path) -> None:
    box.files.upload(tree / "link", "/workspace/new/b")
    info = box.files.stat("/workspace/new/b")
    assert (info.kind, info.mode) == ("file", 0o750)
    with pytest.raises(NotFound, match="local"):
        box.files.upload(tree / "none", "/workspace/x")


def test_what_is_no_file_does_not_go_in(box: shoal.Sandbox, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "socket"))
        with pytest.raises(InvalidRequest):
            box.files.upload(tmp_path / "fifo", "/workspace/x")
        box.files.upload(tmp_path, "/workspace/t")
    assert box.files.list("/workspace/t") == []


def test_a_big_file_both_ways(box: shoal.Sandbox, tmp_path: Path) -> None:
    data = os.urandom(9 << 20)
    (tmp_path / "big").write_bytes(data)
    box.files.upload(tmp_path / "big", "/workspace/big")
    assert box.commands.run("sha256sum big").stdout.split()[0] == hashlib.sha256(data).hexdigest()
    box.files.download("/workspace/big", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data


def test_names_of_any_bytes_both_ways(box: shoal.Sandbox, tmp_path: Path) -> None:
    names = [b"\xff\xfe", b"a\nb", b"-rf", b"x" * 255, "\u2615".encode(), b"%2e%2e", b" ", b"...", b"a\\b"]
    source = tmp_path / "source"
    source.mkdir()
    for name in names:
        with open(os.fsencode(source) + b"/" + name, "wb") as file:
            file.write(name)
    box.files.upload(source, "/workspace/t")
    box.files.download("/workspace/t", tmp_path / "back")
    assert sorted(os.listdir(os.fsencode(tmp_path / "back"))) == sorted(names)
    for name in names:
        with open(os.fsencode(tmp_path / "back") + b"/" + name, "rb") as file:
            assert file.read() == name


# Down


def test_a_tree_comes_out(box: shoal.Sandbox, tree: Path, tmp_path: Path) -> None:
    box.files.upload(tree, "/workspace/t")
    box.files.download("/workspace/t", tmp_path / "back")
    assert listing(tmp_path / "back") == listing(tree)
    assert stat.S_IMODE((tmp_path / "back/sub/b").stat().st_mode) == 0o750


def test_a_file_comes_out_and_makes_its_folder(box: shoal.Sandbox, tmp_path: Path) -> None:
    box.files.write("/workspace/f", "x")
    box.files.download("/workspace/f", tmp_path / "new" / "f")
    assert (tmp_path / "new" / "f").read_text() == "x"
    with pytest.raises(NotFound):
        box.files.download("/workspace/none", tmp_path / "none")
    assert listing(tmp_path) == {"new": "folder", "new/f": "x"}


def test_set_uid_is_dropped_and_devices_stay_behind(box: shoal.Sandbox, tmp_path: Path) -> None:
    box.commands.run("mkdir -m 2777 t; cp /bin/true t/suid; chmod 6755 t/suid; mkfifo t/fifo; mkdir -m 1777 t/sticky")
    box.files.download("/workspace/t", tmp_path / "t")
    assert set(listing_names(tmp_path / "t")) == {"suid", "sticky"}
    for path in (tmp_path / "t", tmp_path / "t/suid", tmp_path / "t/sticky"):
        assert not path.stat().st_mode & 0o7000
        assert path.stat().st_uid == os.geteuid()


def listing_names(root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in root.rglob("*")]


def test_links_are_made_and_never_followed(box: shoal.Sandbox, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.mkdir()
    box.commands.run(f"mkdir t; ln -s {canary} t/out; ln -s ../canary t/up; ln -s /etc/passwd t/p; echo > t/f")
    box.files.download("/workspace/t", tmp_path / "t")
    box.commands.run(
        "rm t/out; mkdir t/out; echo stolen > t/out/f; rm t/p; echo stolen > t/p; rm t/f; ln -s ../canary/f t/f"
    )
    with pytest.raises(FileExists, match="in the way"):
        box.files.download("/workspace/t", tmp_path / "t")
    assert os.listdir(canary) == []
    assert "stolen" not in Path("/etc/passwd").read_text()


def test_a_file_replaces_a_link_and_not_what_it_points_to(box: shoal.Sandbox, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "f").symlink_to(precious)
    box.files.write("/workspace/t/f", "new")
    box.files.download("/workspace/t", tmp_path / "t")
    assert precious.read_text() == "precious"
    assert (tmp_path / "t" / "f").read_text() == "new"
    assert not (tmp_path / "t" / "f").is_symlink()


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/evil", "a//b", ".", "..", "", "a/./b"])
def test_a_listing_that_names_what_no_kernel_would_is_refused(
    monkeypatch: pytest.MonkeyPatch, box: shoal.Sandbox, tmp_path: Path, name: str
) -> None:
    """The names come from a process in the sandbox; nothing of them is believed."""
    target = tmp_path / "in" / "t"
    with forged(monkeypatch, name), pytest.raises((PlatformError, FileExists, NotFound)):
        box.files.download("/workspace", target)
    assert set(listing_names(tmp_path)) <= {"in", "in/t"}


@contextmanager
def forged(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    """The node's listing has this one entry."""
    from shoal.sdk.embedded import engine

    node = engine().node
    info = call(node.stat_file(next(iter(node._sandboxes)), "/etc/hostname"))

    async def list_files(*_: object, **__: object) -> list[FileInfo]:
        return [FileInfo(name, f"/workspace/{name}", "file", 1, info.mode, 0, 0, 0.0)]

    with monkeypatch.context() as patch:
        patch.setattr(node, "list_files", list_files)
        yield


def test_a_file_that_is_more_than_the_caller_takes(box: shoal.Sandbox, tmp_path: Path) -> None:
    box.commands.run("mkdir t; truncate -s 1T t/hole; echo small > t/a")
    with pytest.raises(LimitExceeded):
        box.files.download("/workspace/t", tmp_path / "t", limit="1MiB")
    assert set(listing_names(tmp_path / "t")) <= {"a"}
    with pytest.raises(LimitExceeded):
        box.files.read("/workspace/t/hole", limit="1MiB")


def test_nothing_half_is_left_when_a_file_goes_away(box: shoal.Sandbox, tmp_path: Path) -> None:
    box.commands.run("mkdir t; echo x > t/a; mkfifo t/b")
    loop = "cd t; while :; do rm -f a; mkfifo a; rm a; echo x > a; done"
    running = box.commands.run(loop, background=True)
    for number in range(30):
        target = tmp_path / str(number)
        with suppress(shoal.ShoalError):
            box.files.download("/workspace/t", target)
        assert not [name for name in listing_names(target) if name.startswith(".shoal")]
    running.kill()


def test_deep_trees_end(box: shoal.Sandbox, tmp_path: Path) -> None:
    script = "import os\nos.mkdir('t'); os.chdir('t')\nfor i in range(1500):\n os.mkdir('d'); os.chdir('d')"
    box.commands.run(["python3", "-c", script], check=True)
    try:
        with pytest.raises(shoal.ShoalError):
            box.files.download("/workspace/t", tmp_path / "t")
    finally:
        # Python's own rmtree, with which pytest cleans up, goes by recursion and would fail on it.
        subprocess.run(["rm", "-rf", tmp_path / "t"], check=True)
    assert box.commands.run("true").ok


def test_the_module_keeps_directories_by_descriptor() -> None:
    """The flags that the safety above hangs on."""
    assert transfer._DIRECTORY & os.O_NOFOLLOW
    assert transfer._DIRECTORY & os.O_DIRECTORY
