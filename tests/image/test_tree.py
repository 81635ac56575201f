"""Digests name what a tree holds, and copying one follows nothing that its maker chose."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings

from shoal.errors import InvalidRequest, NotFound
from shoal.image import capture, tree
from shoal.image.tree import Limits

from . import trees


def identify(path: Path) -> tree.Identity:
    fd = tree.open_directory(path)
    try:
        return tree.identify(fd)
    finally:
        os.close(fd)


def copy(source: Path, target: Path, limits: Limits | None = None) -> tree.Size:
    fd = tree.open_directory(source)
    try:
        return capture.copy(fd, target, limits)
    finally:
        os.close(fd)


@settings(max_examples=60, deadline=None)
@given(trees.TREES)
def test_a_copy_is_the_same_tree(made: trees.Tree) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, again, target = (Path(folder, name) for name in ("source", "again", "target"))
        trees.write(made, source)
        trees.write(dict(reversed(made.items())), again)
        size = copy(source, target)
        first = identify(source)
        assert first == identify(again) == identify(target)
        assert first.size == size
        fds = [tree.open_directory(path) for path in (source, target)]
        assert trees.listing(fds[0]) == trees.listing(fds[1])
        for fd in fds:
            os.close(fd)
        tree.remove(target)


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "file").write_text("other"),
        lambda root: (root / "file").chmod(0o600),
        lambda root: (root / "file").rename(root / "renamed"),
        lambda root: (root / "extra").mkdir(),
        lambda root: ((root / "link").unlink(), (root / "link").symlink_to("elsewhere")),
        lambda root: os.setxattr(root / "folder", "user.overlay.opaque", b"y"),
        lambda root: os.setxattr(root / "file", "user.mine", b"x"),
        lambda root: root.chmod(0o700),
        pytest.param(lambda root: os.chown(root / "file", 5, 5), marks=pytest.mark.root),
    ],
)
def test_every_difference_changes_the_digest(tmp_path: Path, change: object) -> None:
    root = make_simple(tmp_path / "root")
    before = identify(root).digest
    change(root)  # type: ignore[operator]
    assert identify(root).digest != before


def test_times_hard_links_and_overlay_origin_do_not_change_the_digest(tmp_path: Path) -> None:
    root = make_simple(tmp_path / "root")
    (root / "second").write_text("content")
    before = identify(root).digest
    os.utime(root / "file", (1, 1))
    (root / "second").unlink()
    os.link(root / "file", root / "second")
    for name in ("origin", "impure", "uuid"):
        os.setxattr(root / "folder", f"user.overlay.{name}", b"x")
    assert identify(root).digest == before


def test_a_copy_keeps_times_owners_links_holes_and_marks(tmp_path: Path) -> None:
    root = make_simple(tmp_path / "root")
    os.link(root / "file", root / "second")
    os.utime(root / "file", ns=(5, 1_234_567_891))
    os.setxattr(root / "folder", "user.overlay.opaque", b"y")
    os.setxattr(root / "folder", "user.overlay.redirect", b"/etc")
    with (root / "hole").open("wb") as hole:
        hole.seek(64 << 20)
        hole.write(b"end")
    copy(root, tmp_path / "copy")
    made = tmp_path / "copy"
    assert (made / "file").stat().st_mtime_ns == 1_234_567_891
    assert (made / "file").samefile(made / "second")
    assert (made / "hole").read_bytes() == (root / "hole").read_bytes()
    assert (made / "hole").stat().st_blocks < 1000
    assert os.listxattr(made / "folder") == ["user.overlay.opaque"]


def test_nothing_outside_is_followed_or_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("secret")
    root = tmp_path / "upper"
    (root / "opt").mkdir(parents=True)
    (root / "opt/env").symlink_to(secret)
    fd = tree.open_directory(root)
    with pytest.raises(NotFound):
        capture.capture(fd, b"opt/env", tmp_path / "copy")
    for prefix in (b"../secret", b"opt/../../secret", b"/etc", b""):
        with pytest.raises(InvalidRequest):
            capture.capture(fd, prefix, tmp_path / "copy")
    capture.capture(fd, b"opt", tmp_path / "opt")
    os.close(fd)
    assert (tmp_path / "opt/env").is_symlink()
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        tree.open_directory(tmp_path / "opt/env")


def test_fifos_stay_and_sockets_go(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    os.mkfifo(root / "fifo", 0o640)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "socket"))
        copy(root, tmp_path / "copy")
    assert os.listdir(tmp_path / "copy") == ["fifo"]
    assert (tmp_path / "copy/fifo").lstat().st_mode == stat.S_IFIFO | 0o640


@pytest.mark.root
def test_devices_are_refused_but_whiteouts_stay(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    os.mknod(root / "gone", stat.S_IFCHR, os.makedev(0, 0))
    copy(root, tmp_path / "copy")
    assert (tmp_path / "copy/gone").lstat().st_rdev == 0
    os.mknod(root / "memory", stat.S_IFCHR, os.makedev(1, 1))
    with pytest.raises(InvalidRequest, match="memory"):
        copy(root, tmp_path / "again")


def test_bombs_are_refused_before_they_are_read(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with (root / "hole").open("wb") as hole:
        hole.truncate(1 << 43)
    with pytest.raises(InvalidRequest, match="larger than a layer"):
        copy(root, tmp_path / "copy")
    (root / "hole").unlink()
    deep = root
    for _ in range(12):
        deep = deep / "d"
    deep.mkdir(parents=True)
    with pytest.raises(InvalidRequest, match="nested too deep"):
        copy(root, tmp_path / "deep", Limits(depth=10))
    with pytest.raises(InvalidRequest, match="larger than a layer"):
        copy(root, tmp_path / "many", Limits(entries=5))


def make_simple(root: Path) -> Path:
    root.mkdir()
    (root / "folder").mkdir()
    (root / "file").write_text("content")
    (root / "file").chmod(0o644)
    (root / "link").symlink_to("file")
    return root
