"""Probes of EROFS, with an image written here so that they need no tool."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import struct
import subprocess

from shoal.node.doctor import calls, mounts
from shoal.node.doctor.finding import Probe, Scene, Shortfall

BLOCK = 4096
MAGIC = 0xE0F5E1E2
ROOT_NID = 36
"""The root's inode number. It lies at 32 bytes times this, behind the super block (128 bytes at 1024)."""

INLINE_COMPACT = 2 << 1
"""Inode format: compact header, data right behind it."""


def image() -> bytes:
    """A file system of one block that holds an empty root folder."""
    names = b"..."
    entries = struct.pack("<QHBB", ROOT_NID, 24, 2, 0) + struct.pack("<QHBB", ROOT_NID, 25, 2, 0)
    inode = struct.pack(
        "<HHHHIIIIHHI", INLINE_COMPACT, 0, stat.S_IFDIR | 0o755, 2, len(entries + names), 0, 0, 1, 0, 0, 0
    )
    head = struct.pack("<IIIBBHQQIII", MAGIC, 0, 0, 12, 0, ROOT_NID, 1, 0, 0, 1, 0)
    block = bytearray(BLOCK)
    block[1024 : 1024 + len(head)] = head
    block[ROOT_NID * 32 : ROOT_NID * 32 + 32 + len(entries + names)] = inode + entries + names
    return bytes(block)


def attach(path: str, *, directio: bool = False) -> int:
    """The descriptor of a detached mount of the file at `path`."""
    context = calls.fsopen("erofs")
    calls.set_string(context, "source", path)
    if directio:
        calls.set_flag(context, "directio")
    calls.set_flag(context, "ro")
    mounted = calls.fsmount(context)
    os.close(context)
    return mounted


def _mounted(scene: Scene, *, directio: bool) -> int:
    path = scene.folder / "probe.erofs"
    path.write_bytes(image())
    try:
        return attach(str(path), directio=directio)
    except OSError as error:
        raise explained(error) from None
    finally:
        path.unlink()


def explained(error: OSError) -> Shortfall:
    if error.errno == errno.ENOTBLK:
        return Shortfall("the kernel mounts no EROFS from a file on the data folder's file system (ENOTBLK)")
    if error.errno == errno.EPERM and os.geteuid() != 0:
        return Shortfall("only root can mount EROFS: layers are kept as plain directories", fix=ROOT_FIX)
    return Shortfall(str(error.strerror))


def from_file(scene: Scene) -> str:
    root = _mounted(scene, directio=False)
    if names := mounts.listed(root):
        raise Shortfall(f"an empty image shows {names}")
    return "an image was mounted from a plain file, without a loop device"


def directio(scene: Scene) -> str:
    os.close(_mounted(scene, directio=True))
    return "accepted: a layer's pages are cached once"


def tools(scene: Scene) -> str:
    program = shutil.which("mkfs.erofs")
    if program is None:
        raise Shortfall("mkfs.erofs is not installed")
    folder = scene.folder
    (folder / "tree").mkdir()
    (folder / "tree" / "file").write_bytes(b"x" * 5000)
    command = [program, "-x1", str(folder / "made.erofs"), str(folder / "tree")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2, check=False)
    if done.returncode:
        raise Shortfall(f"{program} fails: {(done.stderr or done.stdout).strip()[-200:]}")
    return f"{(done.stdout or done.stderr).splitlines()[0].strip()} made an image"


ROOT_FIX = "Run Shoal as root to have layers as EROFS files; as an ordinary user nothing needs doing."

PROBES = (
    Probe(
        id="layers.erofs",
        title="EROFS from a plain file in the data folder",
        run=from_file,
        why="A layer is then one file, attached in 50 microseconds; else it is a directory, slower to build and drop.",
        fix="Use Linux 6.12 or newer (CONFIG_EROFS_FS_BACKED_BY_FILE), the data folder on ext4, XFS or btrfs.",
    ),
    Probe(
        id="layers.erofs_directio",
        title="EROFS option directio",
        run=directio,
        missing="absent",
        why="Without it a file's pages are cached twice, as the layer's and as the image's.",
        fix="Use Linux 6.15 or newer with the data folder on a file system that has O_DIRECT, and run as root.",
    ),
    Probe(
        id="layers.erofs_utils",
        title="erofs-utils",
        run=tools,
        why="Freezes environments and snapshots into EROFS; without it layers stay plain directories.",
        fix="sudo apt-get install erofs-utils",
    ),
)
