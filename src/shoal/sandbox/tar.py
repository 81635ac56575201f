"""Members of a tar stream (pax, with GNU tar's sparse files), as bytes. What is read is hostile: nothing is believed.

Reading is done by generators that are sent the bytes as they come, so that no thread waits for a sandbox.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Generator
from typing import Final, NamedTuple, TypeVar

from shoal.errors import PlatformError

T = TypeVar("T")
Steps = Generator[None, bytes, T]
"""Work that goes on with the bytes it is sent."""

BLOCK: Final = 512
END: Final = bytes(2 * BLOCK)
FILE, HARD_LINK, SYMLINK, DIRECTORY, FIFO = b"0", b"1", b"2", b"5", b"6"
_RECORDS_MAX: Final = 64 << 10
_EXTENDED: Final = b"x"
_RECORD: Final = re.compile(rb"([1-9][0-9]{0,5}) ([A-Za-z.]{1,40})=")
_NUMBER: Final = re.compile(rb"[0-9]{1,19}")
_TIME: Final = re.compile(r"(-?)([0-9]{1,11})(?:\.([0-9]{1,9}))?")
_PIECES_MAX: Final = 1 << 16
_LINE_MAX: Final = 20


class Member(NamedTuple):
    """What stands before the data of a file, or instead of any."""

    path: str
    """Relative; "." is the root. Bytes that are not UTF-8 are surrogates, as in os.fsdecode."""
    kind: bytes
    mode: int = 0
    """Permission bits."""
    uid: int = 0
    gid: int = 0
    size: int = 0
    """Bytes of data that follow."""
    mtime_ns: int = 0
    link: str = ""
    linked: bool = False
    """A file of several names: later members may be hard links to it."""
    real_size: int | None = None
    """Of a file with holes, whose data begins with a map; None for any other."""

    @property
    def apparent(self) -> int:
        """Bytes of the file that comes of it."""
        return self.size if self.real_size is None else self.real_size


def padding(size: int) -> int:
    """Bytes that fill the last block."""
    return -size % BLOCK


# Writing


def write_member(member: Member) -> bytes:
    info = tarfile.TarInfo(member.path)
    info.type, info.mode, info.linkname = member.kind, member.mode, member.link
    info.uid, info.gid, info.size = member.uid, member.gid, member.size
    seconds, ns = divmod(abs(member.mtime_ns), 10**9)
    info.pax_headers = {"mtime": f"{'-' if member.mtime_ns < 0 else ''}{seconds}.{ns:09}"}
    if member.real_size is not None:
        info.pax_headers |= {
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.name": member.path,
            "GNU.sparse.realsize": str(member.real_size),
        }
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def write_map(pieces: list[tuple[int, int]]) -> bytes:
    """(start, length) of what is not a hole, as it stands before the data of a sparse file."""
    numbers = [len(pieces), *(number for piece in pieces for number in piece)]
    text = "".join(f"{number}\n" for number in numbers).encode()
    return text + bytes(padding(len(text)))


# Reading


class Source:
    """The bytes that have come and were not used."""

    def __init__(self) -> None:
        self._data = memoryview(b"")

    def some(self, most: int) -> Steps[memoryview]:
        """At least one and at most `most` bytes."""
        while not self._data:
            self._data = memoryview((yield))
        piece, self._data = self._data[:most], self._data[most:]
        return piece

    def take(self, size: int) -> Steps[bytes]:
        """Exactly so many. For little: they are held in memory."""
        taken = bytearray()
        while len(taken) < size:
            taken += yield from self.some(size - len(taken))
        return bytes(taken)


def read_member(source: Source) -> Steps[Member | None]:
    """The next one, or None at the end. PlatformError for what the operation inside does not write."""
    info = yield from _read_header(source)
    if info is None:
        return None
    records: dict[str, bytes] = {}
    if info.type == _EXTENDED:
        if info.size > _RECORDS_MAX:
            raise _malformed(f"{info.size} bytes of records")
        data = yield from source.take(info.size + padding(info.size))
        records = _parse_records(data[: info.size])
        info = yield from _read_header(source)
        if info is None:
            raise _malformed("records without a member")
    return _describe(info, records)


def _read_header(source: Source) -> Steps[tarfile.TarInfo | None]:
    block = yield from source.take(BLOCK)
    if not any(block):
        return None
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise _malformed(str(error)) from None


def _parse_records(data: bytes) -> dict[str, bytes]:
    records = {}
    at = 0
    while at < len(data):
        match = _RECORD.match(data, at)
        end = at + int(match[1]) if match else 0
        if match is None or end > len(data) or end <= match.end() or data[end - 1] != ord("\n"):
            raise _malformed("a record that is none")
        records[match[2].decode()] = data[match.end() : end - 1]
        at = end
    return records


def _describe(info: tarfile.TarInfo, records: dict[str, bytes]) -> Member:
    sparse = "GNU.sparse.realsize" in records
    path = _text(records.get("path"), info.name)
    return Member(
        path=path.removesuffix("/") if info.type == DIRECTORY else path,
        kind=info.type,
        mode=info.mode & 0o7777,
        uid=info.uid,
        gid=info.gid,
        size=_number(records.get("size", b"%d" % info.size)),
        mtime_ns=_time(records.get("mtime", b"0").decode("ascii", "replace")),
        link=_text(records.get("linkpath"), info.linkname),
        linked="SHOAL.linked" in records,
        real_size=_number(records["GNU.sparse.realsize"]) if sparse else None,
    )


def _text(value: bytes | None, other: str) -> str:
    text = other if value is None else value.decode("utf-8", "surrogateescape")
    if "\0" in text:
        raise _malformed("a name with a NUL byte")
    return text


def _number(value: bytes) -> int:
    if not _NUMBER.fullmatch(value) or int(value) >= 1 << 63:
        raise _malformed(f"a number {value[:30]!r}")
    return int(value)


def _time(value: str) -> int:
    match = _TIME.fullmatch(value)
    if match is None:
        raise _malformed(f"a time {value[:30]!r}")
    ns = int(match[2]) * 10**9 + int((match[3] or "").ljust(9, "0"))
    return -ns if match[1] else ns


def read_map(source: Source, member: Member) -> Steps[tuple[list[tuple[int, int]], int]]:
    """What is not a hole, in order, and the bytes of the stream that the map took."""
    used = 0
    numbers: list[int] = []
    wanted = 1
    while len(numbers) < wanted:
        number, length = yield from _read_line(source)
        numbers.append(number)
        used += length
        if len(numbers) == 1:
            if number > _PIECES_MAX:
                raise _malformed(f"{number} pieces of a file")
            wanted = 1 + 2 * number
    yield from source.take(padding(used))
    used += padding(used)
    pieces = list(zip(numbers[1::2], numbers[2::2], strict=True))
    _check_map(pieces, member, used)
    return pieces, used


def _read_line(source: Source) -> Steps[tuple[int, int]]:
    line = b""
    while (byte := (yield from source.take(1))) != b"\n":
        line += byte
        if len(line) > _LINE_MAX:
            raise _malformed("a long line in a map")
    return _number(line), len(line) + 1


def _check_map(pieces: list[tuple[int, int]], member: Member, used: int) -> None:
    at = 0
    for start, length in pieces:
        if start < at:
            raise _malformed("a map that goes back")
        at = start + length
    if at > member.apparent or used + sum(length for _, length in pieces) != member.size:
        raise _malformed("a map that does not fit its file")


def _malformed(what: str) -> PlatformError:
    return PlatformError(f"a tree from a sandbox was not what its operation writes: {what}")
