from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shoal.sandbox.trees import BASE_FOLDERS, DEVICES, MountPoints


def listing(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


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
