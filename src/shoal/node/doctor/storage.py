"""Probes of the file system that holds Shoal's data, and of memory used as one."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import struct
import time
from pathlib import Path

from shoal.errors import ShoalError
from shoal.node import facts
from shoal.node.doctor import calls
from shoal.node.doctor.finding import Probe, Scene, Shortfall
from shoal.sandbox import disk
from shoal.types import GiB, MiB

FICLONE = 0x40049409
GET_ATTRIBUTES, SET_ATTRIBUTES = 0x801C581F, 0x401C5820
"""FS_IOC_FSGETXATTR and FS_IOC_FSSETXATTR: 28 bytes; the project id is the fourth word."""
Q_GETFMT, Q_XGETQSTAT, PROJECT = 0x800004, 0x5805, 2

TRIAL = 64 * MiB
TRIAL_SECONDS = 0.8
"""For writing, and again for reading."""
SLOW = 100 * MiB


def place(scene: Scene) -> str:
    kind = facts.filesystem(scene.folder)
    state = "exists" if os.path.isdir(scene.data) else "will be made when it is needed"
    return f"{scene.data} ({state}) on {kind}, writable"


def reflink(scene: Scene) -> str:
    source, copy = scene.folder / "reflink", scene.folder / "reflink.copy"
    source.write_bytes(bytes(65536))
    with source.open("rb") as original, copy.open("wb") as clone:
        try:
            fcntl.ioctl(clone, FICLONE, original.fileno())
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL):
                raise Shortfall(f"{facts.filesystem(source)} has no reflink: copies are full copies") from None
            raise
    return "copies share their blocks"


def space(scene: Scene) -> str:
    usage = os.statvfs(facts.existing(Path(scene.data)))
    free = usage.f_bavail * usage.f_frsize
    if free < 20 * GiB:
        raise Shortfall(f"{free / GiB:.1f} GiB free; 20 GiB or more is advised")
    return f"{free / GiB:.1f} GiB free"


def inodes(scene: Scene) -> str:
    usage = os.statvfs(facts.existing(Path(scene.data)))
    if usage.f_files == 0:
        return "made as needed by this file system"
    if usage.f_favail < 500_000:
        raise Shortfall(f"{usage.f_favail:,} free; 500,000 or more are advised")
    return f"{usage.f_favail:,} free"


def throughput(scene: Scene) -> str:
    path = scene.folder / "throughput"
    try:
        written = _write(path)
        read = _read(path)
    finally:
        path.unlink(missing_ok=True)
    rates = f"writes {written / MiB:,.0f} MiB/s with fsync, reads {read / MiB:,.0f} MiB/s"
    if min(written, read) < SLOW:
        raise Shortfall(f"{rates}; {SLOW // MiB} MiB/s or more is advised")
    return rates


def _write(path: Path) -> float:
    """Bytes a second to the disk; stops early on a slow one."""
    block, done, start = os.urandom(MiB) * 4, 0, time.monotonic()
    with path.open("wb", buffering=0) as file:
        while done < TRIAL and time.monotonic() - start < TRIAL_SECONDS:
            done += file.write(block)
            os.fdatasync(file)
        os.fsync(file)
    return done / (time.monotonic() - start)


def _read(path: Path) -> float:
    done, start = 0, time.monotonic()
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while time.monotonic() - start < TRIAL_SECONDS and (block := file.read(4 * MiB)):
            done += len(block)
    return done / (time.monotonic() - start)


def memory_files(_: Scene) -> str:
    if facts.filesystem(Path("/dev/shm")) != "tmpfs":
        raise Shortfall("/dev/shm is not a tmpfs")
    usage = os.statvfs("/dev/shm")
    size = usage.f_blocks * usage.f_frsize
    if size < 1 * GiB:
        raise Shortfall(f"/dev/shm holds {size / MiB:.0f} MiB; 1 GiB or more is advised")
    return f"/dev/shm: {size / GiB:.1f} GiB"


def quota(scene: Scene) -> str:
    kind = facts.filesystem(Path(scene.data))
    if kind == "btrfs":
        raise Shortfall("btrfs: qgroups can limit a subvolume; not tried", fix=BTRFS_FIX)
    descriptor = os.open(scene.folder, os.O_RDONLY | os.O_DIRECTORY)
    command = (Q_XGETQSTAT if kind == "xfs" else Q_GETFMT) << 8 | PROJECT
    try:
        calls.syscall("quotactl_fd", calls.QUOTACTL_FD, descriptor, command, 0, bytes(512))
        attributes = bytearray(fcntl.ioctl(descriptor, GET_ATTRIBUTES, bytes(28)))
        struct.pack_into("=I", attributes, 12, 0x5A0A1)
        fcntl.ioctl(descriptor, SET_ATTRIBUTES, bytes(attributes))
    except OSError as error:
        raise Shortfall(f"no project quota on {kind}: {error.strerror}") from None
    return f"project quota on {kind}"


def uppers(scene: Scene) -> str:
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2 / GiB
    if (lacking := disk.missing()) is not None:
        raise Shortfall(f"needs {lacking}; upper='auto' gives memory, {half:.1f} GiB at most")
    try:
        asyncio.run(disk.make_upper(scene.folder, 16 * MiB, 100)).close()
    except ShoalError as error:
        raise Shortfall(str(error)) from None
    left = disk.free(scene.folder) / GiB
    return f"ext4 in a file; upper='auto' takes it for a disk above {2 * half:.1f} GiB ({left:.1f} GiB are free)"


BTRFS_FIX = (
    "Nothing needs doing: writable layers on disk are file systems of their own size. For other uses: btrfs quota."
)

PROBES = (
    Probe(
        id="storage.data",
        title="data folder",
        run=place,
        missing="fail",
        why="Layers, environments and logs are kept there.",
        fix="Set SHOAL_HOME to a folder that this user can write to.",
    ),
    Probe(
        id="storage.reflink",
        title="reflink",
        run=reflink,
        why="Files are then brought into layers and copied out of them without copying bytes.",
        fix="Put SHOAL_HOME on XFS (mkfs.xfs -m reflink=1) or btrfs.",
    ),
    Probe(
        id="storage.space",
        title="free space",
        run=space,
        why="A full disk fails builds; the store itself stays whole.",
        fix="Free some, or point SHOAL_HOME to a larger file system.",
    ),
    Probe(
        id="storage.inodes",
        title="free inodes",
        run=inodes,
        why="One unpacked environment has tens of thousands of files.",
        fix="Free some, or make the file system with more: mkfs.ext4 -i 8192; XFS and btrfs make them as needed.",
    ),
    Probe(
        id="storage.throughput",
        title="disk throughput",
        run=throughput,
        why="Bounds how many environments can be built or unpacked at once.",
        fix="Point SHOAL_HOME to a faster disk (local NVMe), and look for others that use this one: iostat -x 1.",
        timeout=6.0,
    ),
    Probe(
        id="storage.shm",
        title="files in memory",
        run=memory_files,
        why="Writable layers live on tmpfs.",
        fix="sudo mount -t tmpfs -o size=50% tmpfs /dev/shm; in a container: --shm-size=8g.",
    ),
    Probe(
        id="storage.uppers",
        title="writable layers on disk",
        run=uppers,
        missing="absent",
        why="A profile whose `disk` is more than memory can give then gets it all the same.",
        fix="Run the node as root on a kernel with loop devices and ext4, with e2fsprogs installed.",
    ),
    Probe(
        id="storage.quota",
        title="disk quota",
        run=quota,
        missing="absent",
        why="Not used: writable layers on disk are file systems of the profile's size, whatever they lie on.",
        fix="Nothing needs doing.",
    ),
)
