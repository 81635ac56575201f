"""EROFS files: the tree they were packed from, mounted by the kernel from the file itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings

from shoal.errors import InvalidRequest, SetupFailed, StorageFull
from shoal.image import erofs, tree
from shoal.image.tree import Limits

from . import trees

pytestmark = pytest.mark.root


@contextmanager
def mounted(file: Path) -> Iterator[int]:
    mount = erofs.attach(file)
    root = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=mount)
    try:
        yield root
    finally:
        os.close(root)
        os.close(mount)


@settings(max_examples=25, deadline=None)
@given(trees.TREES)
def test_a_mounted_file_is_the_tree_it_was_packed_from(made: trees.Tree) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, file = Path(folder, "source"), Path(folder, "image")
        trees.write(made, source)
        erofs.pack(source, file)
        fd = tree.open_directory(source)
        with mounted(file) as root:
            assert trees.listing(root) == trees.listing(fd)
            assert tree.identify(root) == tree.identify(fd)
        os.close(fd)


def test_packing_keeps_times_owners_and_marks_and_is_repeatable(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "folder").mkdir(parents=True)
    (source / "tool").write_bytes(b"x" * 10_000)
    (source / "tool").chmod(0o4755)
    os.chown(source / "tool", 70_000, 70_001)
    (source / "tool").chmod(0o4755)
    os.utime(source / "tool", (946684800, 946684800))
    os.setxattr(source / "folder", "user.overlay.opaque", b"y")
    erofs.pack(source, tmp_path / "one")
    erofs.pack(source, tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    with mounted(tmp_path / "one") as root:
        found = os.stat("tool", dir_fd=root)
        assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (70_000, 70_001, 0o4755)
        assert found.st_mtime == 946684800
        folder = os.open("folder", os.O_RDONLY, dir_fd=root)
        assert os.getxattr(folder, "user.overlay.opaque") == b"y"
        os.close(folder)


def test_a_tree_that_claims_too_much_is_not_packed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with (source / "hole").open("wb") as hole:
        hole.truncate(1 << 40)
    with pytest.raises(InvalidRequest, match="larger than a layer"):
        erofs.pack(source, tmp_path / "image")
    assert not (tmp_path / "image").exists()
    (source / "second").write_bytes(b"")
    with pytest.raises(InvalidRequest):
        erofs.pack(source, tmp_path / "image", limits=Limits(bytes=1 << 41, entries=1))


def test_mountable_is_found_by_trying(tmp_path: Path) -> None:
    assert erofs.mountable(tmp_path) is True
    assert os.listdir(tmp_path) == []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        assert erofs.mountable(Path(memory)) is False


def test_what_cannot_be_mounted_is_named(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"\0" * 8192)
    with pytest.raises(SetupFailed, match="fsconfig create") as caught:
        erofs.attach(tmp_path / "image")
    assert caught.value.errno != 0


_FULL = """
import subprocess, sys
from pathlib import Path
from shoal.errors import StorageFull
from shoal.image import erofs
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", sys.argv[1]], check=True)
try:
    erofs.pack(Path(sys.argv[2]), Path(sys.argv[1], "image"))
except StorageFull as error:
    print("full:", error)
"""


def test_a_full_disk_is_told_as_such(tmp_path: Path) -> None:
    source, small = tmp_path / "source", tmp_path / "small"
    source.mkdir()
    small.mkdir()
    (source / "noise").write_bytes(os.urandom(4 << 20))
    command = ["unshare", "--mount", sys.executable, "-c", _FULL, str(small), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("full:")
    assert StorageFull.code == "storage_full"
