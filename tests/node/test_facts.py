from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import pytest

from shoal.node import facts

MOUNTS = r"""
21 1 254:0 / / rw - ext4 /dev/vda rw
22 21 0:20 / /mnt rw - tmpfs tmpfs rw
23 22 0:21 / /mnt/with\040blank rw - xfs /dev/vdb rw
24 21 0:22 / /mnt rw - btrfs /dev/vdc rw
""".strip()


def test_machine() -> None:
    machine = facts.machine(Path("/dev/shm/not/there"))
    assert machine["kernel"] == platform.release()
    assert machine["filesystem"] == "tmpfs"
    assert machine["user"] == os.geteuid()
    assert int(machine["cores"]) >= 1
    assert int(machine["memory"]) > 1 << 28
    assert all(machine.values()) or machine["user"] == 0


@pytest.mark.parametrize("path", ["/", "/usr", "/proc/self", "/dev/shm", "/tmp"])
def test_filesystem_agrees_with_the_system(path: str) -> None:
    command = ["findmnt", "-n", "-o", "FSTYPE", "--target", path]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert facts.filesystem(Path(path)) == told[-1]


def test_filesystem_of_stacked_and_oddly_named_mounts() -> None:
    assert facts.filesystem(Path("/mnt"), MOUNTS) == "btrfs"
    assert facts.filesystem(Path("/mntother"), MOUNTS) == "ext4"
    assert facts.unescape(r"/mnt/with\040blank") == "/mnt/with blank"


def test_nearest_existing_folder(tmp_path: Path) -> None:
    assert facts.existing(tmp_path / "a" / "b") == tmp_path
    assert facts.existing(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("kinds", "mode"),
    [(["cgroup2"], "v2"), (["cgroup", "cgroup"], "v1"), (["cgroup", "cgroup2"], "hybrid"), ([], "none")],
)
def test_cgroup_mode(kinds: list[str], mode: str) -> None:
    text = "\n".join(f"30 21 0:{n} / /sys/fs/cgroup/{n} rw - {kind} none rw" for n, kind in enumerate(kinds))
    assert facts.cgroup_mode(MOUNTS + "\n" + text) == mode
