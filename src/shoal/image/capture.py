"""Copying a part of a sandbox's writable layer into a tree of our own.

The sandbox may still be running and may be hostile: everything is read relative to open folders
(`tree.walk`), and only what has been copied is ever packed or hashed, so a later change of mind of the
sandbox reaches nothing. The target is a fresh private folder. Owners, set-uid bits, times, holes, hard links
and whiteouts stay as they are: as root, the upper stores ids from 0. FIFOs are kept, sockets are left out,
devices other than whiteouts are refused.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

from shoal.errors import InvalidRequest
from shoal.image import tree
from shoal.image.tree import Entry, Limits, Size

_CHUNK = 1 << 24


def capture(upper: int, prefix: bytes, target: Path, limits: Limits | None = None) -> Size:
    """Copy the folder `prefix` of the open folder `upper` to `target`, which must not exist yet.

    NotFound without such a folder; InvalidRequest for devices and past the limits. Missing parents of
    `target` become 0755. Half a copy may be left when it fails: give a target inside `Store.stage`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    source = tree.open_below(upper, prefix)
    try:
        return copy(source, target, limits)
    finally:
        os.close(source)


def copy(source: int, target: Path, limits: Limits | None = None) -> Size:
    """Copy the open folder `source` to `target`, which must not exist yet."""
    return write(tree.walk(source, limits), source, target)


def write(
    entries: Iterable[Entry], source: int, target: Path, limits: Limits | None = None, drop: Collection[str] = ()
) -> Size:
    """Write entries, folders before what they hold, to `target`, which must not exist yet.

    `source`: the open folder whose attributes the root gets. `drop`: extended attributes that are left out.
    InvalidRequest past `limits`.
    """
    target.mkdir(0o700)
    root = tree.open_directory(target)
    try:
        return _Copy(root, drop).run(tree.bounded(entries, limits), source)
    finally:
        os.close(root)


class _Copy:
    """One copy under way, to the open folder `root`."""

    def __init__(self, root: int, drop: Collection[str]) -> None:
        self._root = root
        self._drop = drop
        self._links: dict[tuple[int, int], bytes] = {}
        self._folders: list[tuple[bytes, os.stat_result]] = []

    def run(self, found: Iterable[Entry], source: int) -> Size:
        size, entries = 0, 0
        self._set_attributes(source, self._root)
        for entry in found:
            self._make(entry)
            size += entry.apparent
            entries += 1
        # Last and from below: a folder's mode may forbid writing, and each entry made in it changes its time.
        for path, seen in reversed(self._folders):
            self._finish(path, seen)
        self._finish(b".", os.fstat(source))
        return Size(size, entries)

    def _make(self, entry: Entry) -> None:
        match entry.kind:
            case stat.S_IFDIR:
                self._make_folder(entry)
            case stat.S_IFREG:
                self._make_file(entry)
            case stat.S_IFLNK:
                os.symlink(os.readlink(entry.name, dir_fd=entry.parent), entry.path, dir_fd=self._root)
                self._finish(entry.path, entry.stat)
            case stat.S_IFIFO:
                os.mkfifo(entry.path, 0o600, dir_fd=self._root)
                self._finish(entry.path, entry.stat)
            case stat.S_IFCHR if tree.is_whiteout(entry.stat):
                os.mknod(entry.path, stat.S_IFCHR, tree.WHITEOUT, dir_fd=self._root)
                self._finish(entry.path, entry.stat)
            case stat.S_IFCHR | stat.S_IFBLK:
                raise InvalidRequest("tree", f"a device cannot be part of a layer: {tree.show(entry.path)}")

    def _make_folder(self, entry: Entry) -> None:
        os.mkdir(entry.path, 0o700, dir_fd=self._root)
        self._folders.append((entry.path, entry.stat))
        made = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._root)
        try:
            with tree.opened(entry) as folder:
                self._set_attributes(folder, made)
        finally:
            os.close(made)

    def _make_file(self, entry: Entry) -> None:
        inode = (entry.stat.st_dev, entry.stat.st_ino)
        if inode in self._links:
            os.link(self._links[inode], entry.path, src_dir_fd=self._root, dst_dir_fd=self._root)
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with tree.opened(entry) as file:
            made = os.open(entry.path, flags, 0o600, dir_fd=self._root)
            try:
                _copy_bytes(file, made, entry.stat.st_size)
                self._set_attributes(file, made)
            finally:
                os.close(made)
        self._finish(entry.path, entry.stat)
        if entry.stat.st_nlink > 1:
            self._links[inode] = entry.path

    def _finish(self, path: bytes, found: os.stat_result) -> None:
        """Owner first: changing it clears set-uid bits. Time last."""
        if os.geteuid() == 0:
            os.chown(path, found.st_uid, found.st_gid, dir_fd=self._root, follow_symlinks=False)
        if not stat.S_ISLNK(found.st_mode):
            os.chmod(path, stat.S_IMODE(found.st_mode), dir_fd=self._root)
        times = (found.st_mtime_ns, found.st_mtime_ns)
        os.utime(path, ns=times, dir_fd=self._root, follow_symlinks=False)

    def _set_attributes(self, source: int, target: int) -> None:
        for name, value in tree.kept_attributes(source).items():
            if os.fsdecode(name) not in self._drop:
                os.setxattr(target, name, value)


def _copy_bytes(source: int, target: int, size: int) -> None:
    """Copy `size` bytes and no more, leaving holes holes."""
    os.ftruncate(target, size)
    start = _next(source, 0, os.SEEK_DATA, size)
    while start < size:
        end = _next(source, start, os.SEEK_HOLE, size)
        _copy_range(source, target, start, end)
        start = _next(source, end, os.SEEK_DATA, size)


def _next(fd: int, offset: int, what: int, size: int) -> int:
    try:
        return min(os.lseek(fd, offset, what), size)
    except OSError as error:
        if error.errno != errno.ENXIO:  # nothing but a hole from here on, or the file has shrunk
            raise
        return size


def _copy_range(source: int, target: int, start: int, end: int) -> None:
    os.lseek(target, start, os.SEEK_SET)
    while start < end:
        sent = os.sendfile(target, source, start, min(end - start, _CHUNK))
        if sent == 0:  # the file has shrunk: the rest stays a hole
            return
        start += sent
