"""A tree that comes from a sandbox, made on this machine. Its names, links, modes and sizes are hostile.

Nothing of it leaves the folder it is made in: every step down is relative to the one above and follows no link, a hard
link leads to a file that came before in the same tree or nowhere, and nothing but files, folders and symlinks is made.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from shoal.errors import FileExists, LimitExceeded, PlatformError
from shoal.sandbox import tar
from shoal.sandbox.tar import Member, Source, Steps, padding, read_map, read_member

DEPTH_MAX: Final = 200
"""Levels of directories: a deeper tree could not be removed again by `shutil.rmtree` of whoever asked for it."""
OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE: Final = 1 << 20


class Bounds:
    """What may still be taken from a sandbox. A file may be a hole of a terabyte, or grow while it is read."""

    def __init__(self, bytes: int, entries: int) -> None:
        self._limits = self._left = (bytes, entries)

    def take(self, size: int) -> None:
        """An entry of so many bytes."""
        self._left = (self._left[0] - size, self._left[1] - 1)
        if self._left[0] < 0:
            raise LimitExceeded("bytes to download", self._limits[0])
        if self._left[1] < 0:
            raise LimitExceeded("entries to download", self._limits[1])


class Landing:
    """One tree, or one file, on its way to the path `local`."""

    def __init__(self, local: Path, bounds: Bounds) -> None:
        self._local = local
        self._bounds = bounds
        self._source = Source()
        self._root = self._here = -1
        """The top, and the folder that the members now go into."""
        self._open: list[str] = []
        """The folders from the top to here, and whether each is new."""
        self._fresh: list[bool] = []
        self._inodes: dict[str, tuple[int, int]] = {}
        """Of files of several names, by the first of them."""

    def land(self) -> Steps[None]:
        """Makes it all; ends with the stream. OSError for what this machine refuses, as it comes."""
        try:
            while (member := (yield from read_member(self._source))) is not None:
                self._bounds.take(member.apparent if member.kind == tar.FILE else 0)
                yield from self._make(member)
        finally:
            for descriptor in {self._root, self._here} - {-1}:
                os.close(descriptor)

    def _make(self, member: Member) -> Steps[None]:
        if member.kind == tar.DIRECTORY:
            self._make_directory(member)
            return
        name = self._name(member)
        match member.kind:
            case tar.FILE:
                yield from self._make_file(member, name)
            case tar.HARD_LINK:
                self._make_hard_link(member, name)
            case tar.SYMLINK:
                self._make_symlink(member, name)
            case tar.FIFO:
                pass  # whoever opens a FIFO waits for its other end
            case other:
                raise PlatformError(f"a sandbox sent a member of kind {other!r}")

    def _name(self, member: Member) -> str:
        """In the folder that is open: members follow their folder, and no other place is written to."""
        if member.path == "." and self._root < 0:
            self._local.parent.mkdir(parents=True, exist_ok=True)
            self._root = self._here = os.open(self._local.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            return self._local.name
        name = member.path.rpartition("/")[2]
        if not self._open or member.path != "/".join([*self._open[1:], name]) or name in ("", ".", ".."):
            raise PlatformError(f"a sandbox named a file {member.path!r}")
        return name

    # Folders

    def _make_directory(self, member: Member) -> None:
        """Comes twice: before what is in it, and after that."""
        if self._open and member.path == self._path():
            self._leave(member)
            return
        if member.path == "." and self._root < 0:
            self._fresh.append(not self._local.exists())
            self._local.mkdir(parents=True, exist_ok=True)
            self._root = self._here = os.open(self._local, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._open.append(".")
            return
        name = self._name(member)
        if len(self._open) > DEPTH_MAX:
            raise LimitExceeded("levels of directories", DEPTH_MAX)
        self._enter(name, member.mode)

    def _path(self) -> str:
        return "/".join(self._open[1:]) or "."

    def _enter(self, name: str, mode: int) -> None:
        try:
            os.mkdir(name, mode & 0o777 | 0o700, dir_fd=self._here)
            self._fresh.append(True)
        except FileExistsError:
            self._fresh.append(False)
        self._move(_open_below(self._here, name))
        self._open.append(name)

    def _leave(self, member: Member) -> None:
        if self._fresh.pop():
            os.utime(self._here, ns=(member.mtime_ns, member.mtime_ns))
        self._open.pop()
        self._move(_descend(self._root, self._open[1:]))

    def _move(self, descriptor: int) -> None:
        if self._here != self._root:
            os.close(self._here)
        self._here = descriptor

    # Files and links

    def _make_file(self, member: Member, name: str) -> Steps[None]:
        """It appears whole or not at all. Set-uid bits, owners and what the umask forbids stay behind."""
        with _aside(self._here, name) as aside:
            descriptor = os.open(aside, _OPEN_NEW, member.mode & 0o777, dir_fd=self._here)
            try:
                yield from self._fill(descriptor, member)
                os.utime(descriptor, ns=(member.mtime_ns, member.mtime_ns))
                info = os.fstat(descriptor)
            finally:
                os.close(descriptor)
        if member.linked:
            self._inodes[member.path] = (info.st_dev, info.st_ino)

    def _fill(self, descriptor: int, member: Member) -> Steps[None]:
        if member.real_size is None:
            yield from self._copy(descriptor, 0, member.size)
        else:
            pieces, _ = yield from read_map(self._source, member)
            for start, length in pieces:
                yield from self._copy(descriptor, start, length)
            os.ftruncate(descriptor, member.real_size)
        yield from self._source.take(padding(member.size))

    def _copy(self, descriptor: int, at: int, length: int) -> Steps[None]:
        while length:
            piece = yield from self._source.some(min(length, _PIECE))
            done = os.pwrite(descriptor, piece, at)
            while done < len(piece):
                done += os.pwrite(descriptor, piece[done:], at + done)
            at, length = at + done, length - done

    def _make_symlink(self, member: Member, name: str) -> None:
        with _aside(self._here, name) as aside:
            os.symlink(member.link, aside, dir_fd=self._here)
            times = (member.mtime_ns, member.mtime_ns)
            os.utime(aside, ns=times, dir_fd=self._here, follow_symlinks=False)

    def _make_hard_link(self, member: Member, name: str) -> None:
        if member.link not in self._inodes:
            raise PlatformError(f"a sandbox linked {member.path!r} to {member.link!r}, which it had not sent")
        *folders, first = member.link.split("/")
        parent = _descend(self._root, folders)
        try:
            with _aside(self._here, name) as aside:
                os.link(first, aside, src_dir_fd=parent, dst_dir_fd=self._here, follow_symlinks=False)
                info = os.stat(aside, dir_fd=self._here, follow_symlinks=False)
                if (info.st_dev, info.st_ino) != self._inodes[member.link]:
                    raise FileExists(f"local: {member.link} was replaced during the download")
        finally:
            if parent != self._root:
                os.close(parent)


@contextmanager
def _aside(parent: int, name: str) -> Iterator[str]:
    """A name to make something under, that is then renamed over `name`; or removed, if that fails."""
    aside = f".shoal-{secrets.token_hex(8)}"
    try:
        yield aside
        os.replace(aside, name, src_dir_fd=parent, dst_dir_fd=parent)
    finally:
        # Still there also after a rename over another link to the same file, which does nothing.
        with suppress(FileNotFoundError):
            os.unlink(aside, dir_fd=parent)


def _open_below(parent: int, name: str) -> int:
    try:
        return os.open(name, OPEN_DIRECTORY, dir_fd=parent)
    except NotADirectoryError as error:
        raise FileExists(f"local: {name} is in the way: {error.strerror}") from error


def _descend(root: int, folders: list[str]) -> int:
    """The folder, step by step: a link on the way is an error. The root itself is not opened anew."""
    here = root
    for folder in folders:
        try:
            below = _open_below(here, folder)
        finally:
            if here != root:
                os.close(here)
        here = below
    return here
