"""A unified diff, as git writes it, of what a sandbox changed."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterator, Mapping
from typing import Final

from shoal.errors import LimitExceeded
from shoal.node.changes import Trees
from shoal.node.hunks import Effort, write_hunks
from shoal.node.marks import Moment
from shoal.node.versions import Look, Pair, Room, Version, look_at
from shoal.types import MiB

DIFF_MAX: Final = 16 * MiB
"""Bytes of a diff where the caller names no limit."""
_CONTENTS_MAX: Final = 32 * MiB
"""Bytes of contents, old and new, that one diff holds at a time."""
_STEPS: Final = 10_000_000
"""Some five seconds of work on texts that are made to be hard to compare."""
_BINARY_PROBE: Final = 8000
"""As git: a NUL byte among the first so many makes a file binary."""
_ESCAPES: Final = {
    7: b"\\a",
    8: b"\\b",
    9: b"\\t",
    10: b"\\n",
    11: b"\\v",
    12: b"\\f",
    13: b"\\r",
    34: b'\\"',
    92: b"\\\\",
}


def make_diff(since: Moment | None, path: str, limit: int, trees: Trees) -> str:
    """Of what is below `path`, with names relative to it. Bytes that are not UTF-8 are surrogates, as in os.fsdecode.

    LimitExceeded past `limit` bytes."""
    look = look_at(trees, Room(_CONTENTS_MAX), old=True)
    pairs = look.pairs if since is None else _since(since, look)
    base = path.rstrip("/") + "/"
    pieces, size, effort = [], 0, Effort(_STEPS)
    for name in sorted(pairs):
        if not name.startswith(base):
            continue
        for piece in write_file_diff(name.removeprefix(base).encode("utf-8", "surrogateescape"), pairs[name], effort):
            pieces.append(piece)
            if (size := size + len(piece)) > limit:
                raise LimitExceeded("bytes of the diff", limit)
    return b"".join(pieces).decode("utf-8", "surrogateescape")


def _since(mark: Moment, look: Look) -> Mapping[str, Pair]:
    """What is now, against what was then: as it was kept, or as it still is in the layers."""
    pairs = {}
    for path in mark.versions.keys() | look.pairs.keys():
        now = look.pairs.get(path, Pair(None, None))
        if path in mark.versions:
            if mark.changes.get(path) == look.changes.get(path):
                continue
            pairs[path] = Pair(mark.versions[path], now.new)
        else:
            pairs[path] = Pair(None if mark.removed(path) else now.old, now.new)
    return pairs


def write_file_diff(name: bytes, pair: Pair, effort: Effort) -> Iterator[bytes]:
    """Nothing if both are the same. A file in place of a link, or the other way round, is removed and added."""
    old, new = pair
    if old is not None and new is not None and stat.S_IFMT(old.mode) != stat.S_IFMT(new.mode):
        yield from _write(name, old, None, effort)
        yield from _write(name, None, new, effort)
    else:
        yield from _write(name, old, new, effort)


def _write(name: bytes, old: Version | None, new: Version | None, effort: Effort) -> Iterator[bytes]:
    known = [version for version in (old, new) if version is not None]
    if any(version.data is None for version in known):
        yield b"Left out: %s\n" % _describe(name, known)
        return
    before, after = (b"" if version is None else version.data or b"" for version in (old, new))
    if before == after and old is not None and new is not None and _mode(old) == _mode(new):
        return
    a, b = _quote(b"a/" + name), _quote(b"b/" + name)
    if before != after and (_is_binary(before) or _is_binary(after)):
        # Without a header: with one, git would refuse all of the patch for the sake of this file.
        yield b"Binary files %s and %s differ\n" % (a if old else b"/dev/null", b if new else b"/dev/null")
        return
    if not known:
        return
    yield b"diff --git %s %s\n" % (a, b)
    yield from _write_modes(old, new)
    if before == after:
        if old is None or new is None:
            yield _index(before, after, old, new)
        return
    yield _index(before, after, old, new)
    yield b"--- %s\n" % (_terminated(a) if old else b"/dev/null")
    yield b"+++ %s\n" % (_terminated(b) if new else b"/dev/null")
    yield from write_hunks(before, after, effort)


def _write_modes(old: Version | None, new: Version | None) -> Iterator[bytes]:
    if old is None and new is not None:
        yield b"new file mode %s\n" % _mode(new)
    elif new is None and old is not None:
        yield b"deleted file mode %s\n" % _mode(old)
    elif old is not None and new is not None and _mode(old) != _mode(new):
        yield b"old mode %s\nnew mode %s\n" % (_mode(old), _mode(new))


def _mode(version: Version) -> bytes:
    """The permission bits as they are, where git itself knows only 644 and 755."""
    if stat.S_ISLNK(version.mode):
        return b"120000"
    return b"100%03o" % (version.mode & 0o777)


def _index(before: bytes, after: bytes, old: Version | None, new: Version | None) -> bytes:
    names = [b"0" * 40 if version is None else _blob(data) for version, data in ((old, before), (new, after))]
    same = old is not None and new is not None and _mode(old) == _mode(new)
    return b"index %s..%s%s\n" % (names[0], names[1], b" " + _mode(old) if same and old else b"")


def _blob(data: bytes) -> bytes:
    """Git's name of a content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest().encode()


def _describe(name: bytes, versions: list[Version]) -> bytes:
    special = any(not stat.S_ISREG(version.mode) and not stat.S_ISLNK(version.mode) for version in versions)
    sizes = " and ".join(f"{version.size} bytes" for version in versions)
    return _quote(name) + (b" is neither a file nor a link" if special else f" ({sizes})".encode())


def _is_binary(data: bytes) -> bool:
    return b"\0" in data[:_BINARY_PROBE]


def _quote(name: bytes) -> bytes:
    """In C's way where git does so: control characters, quotes, backslashes, and bytes that are not ASCII."""
    if all(32 <= byte < 127 and byte not in b'"\\' for byte in name):
        return name
    return b'"%s"' % b"".join(
        _ESCAPES.get(byte) or (bytes([byte]) if 32 <= byte < 127 else b"\\%03o" % byte) for byte in name
    )


def _terminated(name: bytes) -> bytes:
    """A name with a space in it ends with a tab, so that patch(1) does not take the rest for a date."""
    return name + b"\t" if b" " in name and not name.startswith(b'"') else name
