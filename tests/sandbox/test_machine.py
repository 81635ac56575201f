"""The trees that show a sandbox its limits, made from this machine's and from other machines' texts."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.sandbox.machine import PROC_FILES, PROC_FOLDER, fill, fill_proc, fill_sys, processors
from shoal.types import GiB, MiB, Profile

CPUS = "devices/system/cpu"


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Of a sandbox with three processors and 3 GiB."""
    with opened(tmp_path / "sys") as root:
        fill(root, 3, 3 * GiB)
    return tmp_path / "sys"


@pytest.mark.parametrize(
    ("cpu", "available", "expected"), [(0.01, 8, 1), (1, 8, 1), (1.01, 8, 2), (2, 8, 2), (16, 8, 8), (2, 1, 1)]
)
def test_a_quota_is_rounded_up_to_processors(cpu: float, available: int, expected: int) -> None:
    assert processors(Profile(cpu=cpu), available) == expected


def test_sys_has_the_processors_of_the_limit(three: Path) -> None:
    for name in ("online", "possible", "present"):
        assert (three / CPUS / name).read_text() == "0-2\n"
    assert sorted(path.name for path in (three / CPUS).glob("cpu[0-9]*")) == ["cpu0", "cpu1", "cpu2"]
    assert (three / "devices/system/node/node0/cpulist").read_text() == "0-2\n"
    assert (three / "devices/system/node/node0/cpumap").read_text() == "7\n"
    assert (three / CPUS / "cpu2/topology/thread_siblings_list").read_text() == "2\n"
    assert (three / CPUS / "cpu2/topology/core_siblings").read_text() == "7\n"


def test_a_large_machine_takes_little_memory(tmp_path: Path) -> None:
    """Each file takes a page of a small tmpfs."""
    with opened(tmp_path / "sys") as root:
        fill(root, 256, GiB)
    files = [path.stat() for path in (tmp_path / "sys").rglob("*") if path.is_file()]
    assert len(files) > 256 * 10
    pages = {file.st_ino: -(-file.st_size // 4096) for file in files}
    assert sum(pages.values()) * 4096 < 6 * MiB


def test_masks_of_many_processors_are_in_words(tmp_path: Path) -> None:
    with opened(tmp_path / "sys") as root:
        fill_sys(root, 40)
    assert (tmp_path / "sys/devices/system/node/node0/cpumap").read_text() == "000000ff,ffffffff\n"


def test_caches_have_the_hosts_sizes_and_the_sandboxs_processors(tmp_path: Path) -> None:
    for level in (1, 3):
        folder = tmp_path / f"host/devices/system/cpu/cpu0/cache/index{level}"
        folder.mkdir(parents=True)
        for name, text in (("level", str(level)), ("size", f"{level}M"), ("shared_cpu_list", "0-63")):
            (folder / name).write_text(f"{text}\n")
    with opened(tmp_path / "sys") as root:
        fill_sys(root, 2, tmp_path / "host")
    caches = tmp_path / "sys/devices/system/cpu/cpu1/cache"
    assert (caches / "index3/size").read_text() == "3M\n"
    assert (caches / "index3/shared_cpu_list").read_text() == "0-1\n"
    assert (caches / "index1/shared_cpu_list").read_text() == "1\n"


def test_sys_tells_nothing_else_of_the_host(three: Path) -> None:
    for name in ("class/net", "block", "firmware", "kernel/security", "devices/pci0000:00", "module", "fs/cgroup"):
        assert not (three / name).is_dir() or not os.listdir(three / name), name
    assert not [path for path in three.rglob("*") if path.is_symlink()]
    assert (three / "fs/cgroup").is_dir()


def test_all_can_be_read_by_everybody(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        with opened(tmp_path / "sys") as root:
            fill(root, 2, GiB)
    finally:
        os.umask(old)
    for path in (tmp_path / "sys").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode & 0o555 == 0o555 if path.is_dir() else mode & 0o444 == 0o444, path


def test_the_files_for_proc_are_those_that_are_bound(three: Path) -> None:
    assert set(os.listdir(three / PROC_FOLDER)) == set(PROC_FILES)
    assert all((Path("/proc") / name).exists() for name in PROC_FILES)


def test_meminfo_has_every_line_of_the_kernels(three: Path) -> None:
    shown, real = (three / PROC_FOLDER / "meminfo").read_text(), Path("/proc/meminfo").read_text()
    assert re.findall(r"^\S+:", shown, re.MULTILINE) == re.findall(r"^\S+:", real, re.MULTILINE)
    values = {name: int(number) for name, number in re.findall(r"^(\S+):\s+(\d+)", shown, re.MULTILINE)}
    assert values["MemTotal"] == 3 << 20
    assert 0.9 * values["MemTotal"] < values["MemAvailable"] < values["MemTotal"]
    assert values["SwapTotal"] == 0
    assert (
        re.search(r"^Hugepagesize:.*$", shown, re.MULTILINE)[0].split()
        == re.search(  # type: ignore[index]
            r"^Hugepagesize:.*$", real, re.MULTILINE
        )[0].split()
    )  # type: ignore[index]


def test_cpuinfo_and_stat_are_numbered_anew(three: Path) -> None:
    cpuinfo = (three / PROC_FOLDER / "cpuinfo").read_text()
    assert re.findall(r"^processor\s*: (\d+)$", cpuinfo, re.MULTILINE) == ["0", "1", "2"]
    assert set(re.findall(r"^siblings\s*: (\d+)$", cpuinfo, re.MULTILINE)) <= {"3"}
    lines = (three / PROC_FOLDER / "stat").read_text().splitlines()
    assert [line.split()[0] for line in lines if line.startswith("cpu")] == ["cpu", "cpu0", "cpu1", "cpu2"]
    real = re.search(r"^btime .*$", Path("/proc/stat").read_text(), re.MULTILINE)
    assert real is not None
    assert abs(int(lines[[line.split()[0] for line in lines].index("btime")].split()[1]) - int(real[0].split()[1])) < 5


def test_of_an_arm_machine_neither_board_nor_serial_number_show(tmp_path: Path) -> None:
    source = tmp_path / "host"
    source.mkdir()
    for name in ("meminfo", "stat", "vmstat"):
        (source / name).write_text("")
    block = "processor\t: {}\nBogoMIPS\t: 108.00\nCPU part\t: 0xd08\n"
    blocks = [block.format(number) for number in range(4)]
    (source / "cpuinfo").write_text("\n".join([*blocks, "Serial\t\t: 1000deadbeef\nModel\t: Board 4\n"]))
    with opened(tmp_path / "proc") as root:
        fill_proc(root, 2, 512 * MiB, source)
    shown = (tmp_path / "proc" / PROC_FOLDER / "cpuinfo").read_text()
    assert shown == block.format(0) + "\n" + block.format(1) + "\n"
