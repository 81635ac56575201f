"""Trees of files that somebody else may have made: walked, measured, named by digest, removed.

A tree is always entered by an open directory, and every step down is relative to the one above with
O_NOFOLLOW, so that neither a symlink nor a folder swapped for one while we look can lead out of it. Names are
any bytes. What the tree claims (sizes, depth, number of entries) is held against `Limits` before it is
believed.

A digest covers type, permission bits, owner, link target, contents, device number and the attributes that a
layer keeps (`kept_attributes`). It leaves out times, hard links, holes and how the tree is stored, so the
same tree has the same name as an EROFS file and as a directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from shoal.errors import InvalidRequest, NotFound
from shoal.types import GiB, MiB

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a file swapped for a FIFO, or leased, must not hold us up; what was opened is looked at again before it is
# read.
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CHUNK = 1 * MiB
WHITEOUT = os.makedev(0, 0)
OPAQUE = "user.overlay.opaque"
"""How an overlay without privileges marks what hides the layers below it."""


class Limits(Struct, frozen=True):
    """The most that is believed of a tree."""

    bytes: int = 64 * GiB
    """Apparent size: a hole of 8 EiB costs its maker nothing and whoever reads it everything."""
    entries: int = 4_000_000
    depth: int = 200
    """Levels of folders; each costs one open descriptor while it is walked."""
    path: int = 3500
    """Bytes of a path below the root. The kernel takes 4,096, and a target's own path comes on top."""


class Entry(Struct, frozen=True):
    """One entry, seen from its open parent; `path` is relative to the root of the tree."""

    parent: int
    name: bytes
    path: bytes
    stat: os.stat_result

    @property
    def kind(self) -> int:
        return stat.S_IFMT(self.stat.st_mode)

    @property
    def apparent(self) -> int:
        return self.stat.st_size if self.kind == stat.S_IFREG else 0


class Size(Struct, frozen=True):
    """Apparent bytes of a tree's files, and the number of entries below its root."""

    bytes: int
    entries: int


class Identity(Struct, frozen=True):
    """The name of a tree (64 hex digits) and what it holds."""

    digest: str
    size: Size


def open_directory(path: str | bytes | Path, parent: int | None = None) -> int:
    """Open a folder that is not a symlink."""
    return os.open(path, _DIRECTORY, dir_fd=parent)


def open_below(root: int, prefix: bytes) -> int:
    """Open the folder `prefix` (b"opt/env") below `root`, following no link. NotFound if it is not there."""
    current = os.dup(root)
    for name in prefix.split(b"/"):
        try:
            if name in (b"", b".", b".."):
                raise InvalidRequest("prefix", f"a plain relative path is needed, not {show(prefix)}")
            below = open_directory(name, current)
        except OSError as error:
            raise NotFound(f"no folder {show(prefix)} in the tree ({error.strerror})") from error
        finally:
            os.close(current)
        current = below
    return current


def is_whiteout(found: os.stat_result) -> bool:
    """Whether it says that the layers below have nothing of that name."""
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == WHITEOUT


def is_opaque(folder: int) -> bool:
    """Whether it hides the folders of that name in the layers below."""
    try:
        return os.getxattr(folder, OPAQUE) == b"y"
    except (OSError, AttributeError):  # no such mark; or a system without such calls, which has no overlays either
        return False


@contextlib.contextmanager
def opened(entry: Entry) -> Iterator[int]:
    """The file or folder behind an entry; PermissionError and the like come as they are.

    InvalidRequest if it was swapped for something else since it was looked at.
    """
    flags = _DIRECTORY if entry.kind == stat.S_IFDIR else OPEN_FILE
    fd = os.open(entry.name, flags, dir_fd=entry.parent)
    try:
        if stat.S_IFMT(os.fstat(fd).st_mode) != entry.kind:
            raise InvalidRequest("tree", f"{show(entry.path)} changed its kind while it was read")
        yield fd
    finally:
        os.close(fd)


def walk(root: int, limits: Limits | None = None) -> Iterator[Entry]:
    """Every entry below `root`, folders before what they hold, names in the order of their bytes.

    An entry's `parent` is open only until the next one is asked for. InvalidRequest past the limits.
    """
    return bounded(_descend(root, b"", limits or Limits()), limits)


def bounded(found: Iterable[Entry], limits: Limits | None = None) -> Iterator[Entry]:
    """The same entries, while they are not too many and not too large together."""
    limits = limits or Limits()
    size = 0
    for entries, entry in enumerate(found, start=1):
        size += entry.apparent
        if size > limits.bytes or entries > limits.entries:
            most = f"{limits.bytes:,} bytes and {limits.entries:,} entries"
            raise InvalidRequest("tree", f"larger than a layer may be ({most}), at {show(entry.path)}")
        yield entry


def _descend(folder: int, path: bytes, limits: Limits) -> Iterator[Entry]:
    for name in sorted(map(os.fsencode, os.listdir(folder))):
        below = path + b"/" + name if path else name
        if len(below) > limits.path or below.count(b"/") >= limits.depth:
            raise InvalidRequest("tree", f"folders are nested too deep for a layer, at {show(below)}")
        entry = Entry(folder, name, below, os.stat(name, dir_fd=folder, follow_symlinks=False))
        yield entry
        if entry.kind == stat.S_IFDIR:
            with opened(entry) as fd:
                yield from _descend(fd, below, limits)


def measure(root: int, limits: Limits | None = None) -> Size:
    """How large a tree says it is. InvalidRequest past the limits."""
    size, entries = 0, 0
    for entry in walk(root, limits):
        size += entry.apparent
        entries += 1
    return Size(size, entries)


def measure_below(root: int, prefix: bytes) -> Size:
    """The same of the folder `prefix` below `root`. NotFound if it is not there."""
    folder = open_below(root, prefix)
    try:
        return measure(folder)
    finally:
        os.close(folder)


def identify(root: int, limits: Limits | None = None) -> Identity:
    """Read a whole tree and name it. Hard links are read once."""
    whole = hashlib.sha256(b"shoal tree 1\n")
    whole.update(_record(b"", os.fstat(root), b"", kept_attributes(root)))
    known: dict[tuple[int, int], bytes] = {}
    size, entries = 0, 0
    for entry in walk(root, limits):
        whole.update(_describe(entry, known))
        size += entry.apparent
        entries += 1
    return Identity(whole.hexdigest(), Size(size, entries))


def _describe(entry: Entry, known: dict[tuple[int, int], bytes]) -> bytes:
    content: bytes = b""
    attributes: dict[bytes, bytes] = {}
    if entry.kind == stat.S_IFREG:
        with opened(entry) as fd:
            attributes = kept_attributes(fd)
            inode = (entry.stat.st_dev, entry.stat.st_ino)
            content = known.get(inode) or _hash(fd)
            if entry.stat.st_nlink > 1:
                known[inode] = content
    elif entry.kind == stat.S_IFDIR:
        with opened(entry) as fd:
            attributes = kept_attributes(fd)
    elif entry.kind == stat.S_IFLNK:
        content = os.fsencode(os.readlink(entry.name, dir_fd=entry.parent))
    else:
        content = b"%d" % entry.stat.st_rdev
    return _record(entry.path, entry.stat, content, attributes)


def _hash(fd: int) -> bytes:
    content = hashlib.sha256()
    while chunk := os.read(fd, _CHUNK):
        content.update(chunk)
    return content.digest()


def _record(path: bytes, found: os.stat_result, content: bytes, attributes: dict[bytes, bytes]) -> bytes:
    """One entry as bytes that mean one thing only: every field is preceded by its length."""
    # A symlink's permission bits are made up by each file system.
    mode = found.st_mode if not stat.S_ISLNK(found.st_mode) else stat.S_IFLNK
    uid, gid = owner(found)
    fields = [path, b"%o %d %d" % (mode, uid, gid), content]
    for name in sorted(attributes):
        fields += [name, attributes[name]]
    return b"".join(b"%d:%s" % (len(field), field) for field in fields) + b"\n"


def owner(found: os.stat_result) -> tuple[int, int]:
    """Whose an entry is inside a sandbox. What an ordinary user makes is his own, and root's inside."""
    if os.geteuid() == 0:
        return found.st_uid, found.st_gid
    return 0, 0


def kept_attributes(fd: int) -> dict[bytes, bytes]:
    """The extended attributes that belong to a layer: `user.*`, and the mark of an opaque folder.

    Left out are overlayfs's `origin`, `impure` and `uuid`, which tell where a file came from; `redirect` and
    `metacopy`, which would let a tree name files of other layers; and what security modules keep, whose ids
    mean nothing elsewhere. What a sandbox set itself arrives as `user.overlay.overlay.*`: escaped by the
    kernel, never live, and kept.
    """
    try:
        names = [os.fsencode(name) for name in os.listxattr(fd) if name.startswith("user.")]
    except OSError:  # a file system without them
        return {}
    return {name: os.getxattr(fd, name) for name in names if _is_kept(name)}


def _is_kept(name: bytes) -> bool:
    overlay = b"user.overlay."
    return not name.startswith(overlay) or name == overlay + b"opaque" or name.startswith(overlay + b"overlay.")


def show(path: bytes) -> str:
    """A hostile path as short text for a message."""
    text = os.fsdecode(path).encode("utf-8", "backslashreplace").decode()
    return repr(text if len(text) <= 200 else text[:200] + "...")


def remove(path: Path) -> None:
    """Delete a tree of our own, also one whose folders its owner may not write to."""
    if os.geteuid() != 0:
        for folder, _, _ in os.walk(path):
            Path(folder).chmod(stat.S_IRWXU)
    shutil.rmtree(path)
