from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shoal.sandbox.trees import BASE_FOLDERS, DEVICES, Trees


def listing(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_sys_has_what_programs_size_themselves_by(tmp_path: Path) -> None:
    tree = Trees(tmp_path).sys()
    assert (tree / "devices/system/cpu/online").read_text() == Path("/sys/devices/system/cpu/online").read_text()
    assert (tree / "fs/cgroup").is_dir()


def test_sys_tells_nothing_else_of_the_host(tmp_path: Path) -> None:
    tree = Trees(tmp_path).sys()
    for name in ("class/net", "block", "firmware", "kernel/security", "devices/pci0000:00", "module", "fs/cgroup"):
        assert not (tree / name).is_dir() or not os.listdir(tree / name), name
    assert not [path for path in tree.rglob("*") if path.is_symlink()]


def test_sys_follows_its_source(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "devices/system/cpu").mkdir(parents=True)
    (source / "devices/system/cpu/online").write_text("0-63\n")
    tree = Trees(tmp_path / "trees").sys(source)
    assert (tree / "devices/system/cpu/online").read_text() == "0-63\n"


def test_changed_contents_are_another_tree(tmp_path: Path) -> None:
    """CPUs that came or went since the node before this one."""
    source = tmp_path / "source"
    (source / "devices/system/cpu").mkdir(parents=True)
    online = source / "devices/system/cpu/online"
    online.write_text("0-1\n")
    Trees(tmp_path / "trees").sys(source)
    online.write_text("0-3\n")
    assert (Trees(tmp_path / "trees").sys(source) / "devices/system/cpu/online").read_text() == "0-3\n"


def test_mount_points(tmp_path: Path) -> None:
    tree = Trees(tmp_path).mount_points(["/", "/opt/env", "/opt/env/deep"], devices=False)
    wanted = {"opt", "opt/env", "opt/env/deep", "dev", *BASE_FOLDERS}
    assert listing(tree) == wanted


def test_devices_are_files_to_bind_over(tmp_path: Path) -> None:
    tree = Trees(tmp_path).mount_points(["/"], devices=True)
    assert {name for name in os.listdir(tree / "dev") if (tree / "dev" / name).is_file()} == set(DEVICES)


def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        tree = Trees(tmp_path).mount_points(["/a"], devices=True)
    finally:
        os.umask(old)
    assert stat.S_IMODE(tree.stat().st_mode) == stat.S_IMODE((tree / "a").stat().st_mode) == 0o755
    assert stat.S_IMODE((tree / "dev/null").stat().st_mode) == 0o644


def test_many_at_once_make_one(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(lambda _: Trees(tmp_path).mount_points(["/opt/env"], devices=False), range(16)))
    assert len(made) == 1
    assert os.listdir(tmp_path) == [path.name for path in made]


def test_a_tree_is_found_again(tmp_path: Path) -> None:
    first = Trees(tmp_path).sys()
    inode = first.stat().st_ino
    assert Trees(tmp_path).sys().stat().st_ino == inode
