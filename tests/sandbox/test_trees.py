from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.sandbox.trees import BASE_FOLDERS, DEVICES, MountPoints, fill_sys


def listing(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


@pytest.fixture
def sys(tmp_path: Path) -> Iterator[Path]:
    """A copy of this machine's /sys."""
    root = tmp_path / "sys"
    root.mkdir()
    fill(root)
    return root


def fill(root: Path, *source: Path) -> None:
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fill_sys(descriptor, *source)
    finally:
        os.close(descriptor)


def test_sys_has_what_programs_size_themselves_by(sys: Path) -> None:
    online = "devices/system/cpu/online"
    assert (sys / online).read_text() == (Path("/sys") / online).read_text()
    assert (sys / "fs/cgroup").is_dir()


def test_sys_tells_nothing_else_of_the_host(sys: Path) -> None:
    for name in ("class/net", "block", "firmware", "kernel/security", "devices/pci0000:00", "module", "fs/cgroup"):
        assert not (sys / name).is_dir() or not os.listdir(sys / name), name
    assert not [path for path in sys.rglob("*") if path.is_symlink()]


def test_sys_is_what_its_source_says_now(tmp_path: Path) -> None:
    source, root = tmp_path / "source", tmp_path / "root"
    (source / "devices/system/cpu").mkdir(parents=True)
    (source / "devices/system/cpu/online").write_text("0-63\n")
    root.mkdir()
    fill(root, source)
    assert (root / "devices/system/cpu/online").read_text() == "0-63\n"


def test_sys_can_be_read_by_everybody(tmp_path: Path) -> None:
    root = tmp_path / "sys"
    root.mkdir()
    old = os.umask(0o077)
    try:
        fill(root)
    finally:
        os.umask(old)
    for path in root.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode & 0o555 == 0o555 if path.is_dir() else mode & 0o444 == 0o444, path


def test_mount_points(tmp_path: Path) -> None:
    tree = MountPoints(tmp_path).tree(["/", "/opt/env", "/opt/env/deep"], devices=False)
    assert listing(tree) == {"opt", "opt/env", "opt/env/deep", "dev", *BASE_FOLDERS}


def test_devices_are_files_to_bind_over(tmp_path: Path) -> None:
    tree = MountPoints(tmp_path).tree(["/"], devices=True)
    assert {name for name in os.listdir(tree / "dev") if (tree / "dev" / name).is_file()} == set(DEVICES)


def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        tree = MountPoints(tmp_path / "points").tree(["/a"], devices=True)
    finally:
        os.umask(old)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tree.parent, tree, tree / "a", tree / "dev")} == {0o755}
    assert stat.S_IMODE((tree / "dev/null").stat().st_mode) == 0o644


def test_many_at_once_make_one(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(lambda _: MountPoints(tmp_path).tree(["/opt/env"], devices=False), range(16)))
    assert len(made) == 1
    assert os.listdir(tmp_path) == [path.name for path in made]


def test_a_tree_is_found_again(tmp_path: Path) -> None:
    first = MountPoints(tmp_path).tree(["/a"], devices=False)
    inode = first.stat().st_ino
    assert MountPoints(tmp_path).tree(["/a"], devices=False).stat().st_ino == inode
