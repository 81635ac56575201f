"""The files of an image archive: a folder, or a tar whose members are read where they lie.

It is somebody else's: names in it are looked at within it only, and no link leads to a file of this machine.
"""

from __future__ import annotations

import contextlib
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from shoal.errors import InvalidRequest, LimitExceeded, NotFound
from shoal.image import disk
from shoal.image.blob import decompressed, is_compressed, part
from shoal.types import GiB, MiB

_ARCHIVE_MAX = 256 * GiB


class Files(Protocol):
    """The files of an archive, by names within it."""

    def open(self, name: str) -> BinaryIO:
        """NotFound if there is none, or it is no regular file."""

    def has(self, name: str) -> bool: ...


@contextlib.contextmanager
def opened(path: Path, staging: Path) -> Iterator[Files]:
    """The files of a layout (a folder) or an archive (a tar, compressed or not).

    `staging`: a folder for the plain form of a compressed one. NotFound; InvalidRequest if it is neither.
    """
    if path.is_dir():
        yield _Folder(path)
        return
    try:
        file = path.open("rb")
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}") from None
    with file, _plain(file, staging) as plain:
        yield _Tar(plain)


@contextlib.contextmanager
def _plain(file: BinaryIO, staging: Path) -> Iterator[BinaryIO]:
    if not is_compressed(file):
        yield file
        return
    with (staging / "archive.tar").open("w+b") as plain, contextlib.closing(decompressed(file)) as content:
        disk.check_room(staging, 2 * os.fstat(file.fileno()).st_size, 16)
        _copy(content, plain)
        plain.seek(0)
        yield plain


def _copy(source: BinaryIO, target: BinaryIO) -> None:
    while chunk := source.read(1 * MiB):
        target.write(chunk)
        if target.tell() > _ARCHIVE_MAX:
            raise LimitExceeded("an image archive, in bytes", _ARCHIVE_MAX)


class _Folder:
    """A layout as a folder. Links in it are not followed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, name: str) -> BinaryIO:
        place = self._path
        for step in _parts(name):
            if place.is_symlink():
                raise NotFound(f"{name} in the layout is behind a link")
            place = place / step
        try:
            descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise NotFound(f"{name} in the layout: {error.strerror}") from None
        return os.fdopen(descriptor, "rb")

    def has(self, name: str) -> bool:
        return (self._path / name).is_file()


class _Tar:
    """An uncompressed tar whose members are read where they lie."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._members: dict[str, tarfile.TarInfo] = {}
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                for member in archive:
                    self._members["/".join(_parts(member.name))] = member
        except tarfile.TarError as error:
            raise InvalidRequest("archive", f"no tar: {error}") from None

    def open(self, name: str) -> BinaryIO:
        member = self._members.get("/".join(_parts(name)))
        if member is not None and member.issym():
            # `docker save` of old writes a layer that several images share once, and links to it.
            target = os.path.normpath(os.path.join(os.path.dirname(member.name), member.linkname))
            member = self._members.get("/".join(_parts(target)))
        if member is None or not member.isreg():
            raise NotFound(f"no file {name!r} in the archive")
        return part(self._file.fileno(), member.offset_data, member.size)

    def has(self, name: str) -> bool:
        return name in self._members


def _parts(name: str) -> list[str]:
    """A name within an archive, which may not lead out of it."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise InvalidRequest("archive", f"a name that leads out of it: {name[:200]!r}")
    return parts
