"""Source archives read as data: nothing in them runs, or chooses a path, a size or a link on this machine."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from msgspec import Struct

from shoal.errors import InvalidRequest
from shoal.rollouts.trees import Entry, check_tree, folders_of
from shoal.types import MiB

_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError,
           ValueError)  # fmt: skip


class Bounds(Struct, frozen=True):
    """How much an archive may hold."""

    bytes: int = 256 * MiB
    """Of all its files together, unpacked; headers count too."""
    entries: int = 100_000
    path: int = 1024
    """Bytes of one path."""


BOUNDS = Bounds()


def read_archive(path: Path, bounds: Bounds = BOUNDS) -> dict[str, Entry]:
    """The files of a .tar.gz, .tar.bz2, .tar.xz, .tar or .zip without its one top folder.

    Raises InvalidRequest, naming the archive, for an entry that is not a plain file, a folder or a link
    within the archive, for more than `bounds` allow, and for damage.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(6)
            file.seek(0)
            entries = _zip_entries(file, bounds) if magic.startswith(b"PK") else _tar_entries(file, magic, bounds)
            return _strip_top(_collect(entries, bounds), path.name)
    except _Refused as error:
        raise InvalidRequest(path.name, str(error)) from None
    except _DAMAGE as error:
        raise InvalidRequest(path.name, f"not a readable archive: {error}") from error


class _Refused(Exception):
    """Why an entry, or the archive as a whole, is not taken."""


def _collect(entries: Iterator[tuple[str, Entry]], bounds: Bounds) -> dict[str, Entry]:
    tree: dict[str, Entry] = {}
    room = bounds.bytes
    for count, (name, entry) in enumerate(entries):
        room -= len(entry.data)  # a hard link counts again: on disk it will be a file of its own
        if count >= bounds.entries or room < 0:
            raise _Refused(f"more than {bounds.entries} entries or {bounds.bytes} bytes")
        if entry.link is not None:
            _check_link(name, entry.link)
        tree[name] = entry
    return tree


def _tar_entries(file: IO[bytes], magic: bytes, bounds: Bounds) -> Iterator[tuple[str, Entry]]:
    # Unpacked as a whole and bounded first: extended headers of any size are read into memory by tarfile.
    plain = io.BytesIO(_decompress(file, magic, bounds.bytes))
    seen: dict[str, Entry] = {}
    with tarfile.open(fileobj=plain, mode="r:") as tar:
        for member in tar:
            name = _checked_path(member.name, bounds)
            if member.size > bounds.bytes:  # a sparse member may claim more than the archive has
                raise _Refused(f"more than {bounds.bytes} bytes")
            entry = seen[name] = _tar_entry(tar, member, seen, bounds)
            yield name, entry


def _tar_entry(tar: tarfile.TarFile, member: tarfile.TarInfo, seen: dict[str, Entry], bounds: Bounds) -> Entry:
    if member.isdir():
        return Entry(mode=0o755, folder=True)
    if member.issym():
        return Entry(mode=0o777, link=member.linkname)
    if member.islnk():
        target = seen.get(_checked_path(member.linkname, bounds))
        if target is None or target.folder or target.link is not None:
            raise _Refused(f"{member.name!r} is a hard link to {member.linkname!r}, which is no earlier file")
        return target
    data = tar.extractfile(member) if member.isreg() else None
    if data is None:
        raise _Refused(f"{member.name!r} is a device, a pipe or of an unknown kind")
    return Entry(_permissions(member.mode), data.read())


def _zip_entries(file: IO[bytes], bounds: Bounds) -> Iterator[tuple[str, Entry]]:
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > bounds.bytes:
            raise _Refused(f"more than {bounds.bytes} bytes")
        for member in members:  # zipfile never yields more than `file_size`
            yield _checked_path(member.filename, bounds), _zip_entry(archive, member)


def _zip_entry(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Entry:
    mode = member.external_attr >> 16
    if member.is_dir():
        return Entry(mode=0o755, folder=True)
    if stat.S_ISLNK(mode):
        return Entry(mode=0o777, link=archive.read(member).decode())
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        raise _Refused(f"{member.filename!r} is a device, a pipe or of an unknown kind")
    return Entry(_permissions(mode or 0o644), archive.read(member))


def _decompress(file: IO[bytes], magic: bytes, limit: int) -> bytes:
    data = _open_plain(file, magic).read(limit + 1)
    if len(data) > limit:
        raise _Refused(f"more than {limit} bytes")
    return data


def _open_plain(file: IO[bytes], magic: bytes) -> IO[bytes] | gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile:
    """Reads like the archive without its compression. Closing `file` is all that is needed afterwards."""
    if magic.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=file)
    if magic.startswith(b"BZh"):
        return bz2.BZ2File(file)
    if magic.startswith(b"\xfd7zXZ"):
        return lzma.LZMAFile(file)
    return file


def _permissions(mode: int) -> int:
    """Readable by all, executable if it was: no set-uid, and nothing that somebody's umask decided."""
    return 0o755 if mode & 0o100 else 0o644


def _checked_path(name: str, bounds: Bounds) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts:
        raise _Refused(f"{name!r} leads out of the archive")
    if "\0" in name or not parts or len(name.encode("utf-8", "surrogateescape")) > bounds.path:
        raise _Refused(f"{name[:100]!r} is no path")
    if any(len(part.encode("utf-8", "surrogateescape")) > 255 for part in parts):
        raise _Refused(f"{name[:100]!r} has a name of more than 255 bytes")
    return "/".join(parts)


def _check_link(name: str, link: str) -> None:
    depth = len(PurePosixPath(name).parts) - 2  # below the top folder
    for part in link.split("/"):
        depth += -1 if part == ".." else int(part not in ("", "."))
        if depth < 0:
            break
    if depth < 0 or not link or link.startswith("/") or "\0" in link or len(link) > 1024:
        raise _Refused(f"{name!r} links to {link[:100]!r}, out of the archive")


def _strip_top(tree: dict[str, Entry], name: str) -> dict[str, Entry]:
    tops = {path.split("/", 1)[0] for path in tree}
    inside = {path.split("/", 1)[1]: entry for path, entry in tree.items() if "/" in path}
    if len(tops) != 1 or not inside or any("/" not in path and not entry.folder for path, entry in tree.items()):
        raise _Refused("does not consist of one folder")
    check_tree(inside, name)
    used = folders_of(inside)
    return {path: entry for path, entry in inside.items() if not entry.folder or path not in used}
