"""What can be wrong inside an image: libraries that do not resolve, and a PYTHONPATH that leads astray.

Runs where the image is the root, which may be a sandbox: it needs nothing but the standard library, starts no
program, and takes every file for what a stranger made.
"""

from __future__ import annotations

import glob
import mmap
import os
import shutil
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from shoal.node.doctor.finding import Finding, Status

PT_LOAD, PT_DYNAMIC = 1, 2
DT_NEEDED, DT_STRTAB, DT_RPATH, DT_RUNPATH = 1, 5, 15, 29
DEFAULT_FOLDERS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib")
MOST_FILES = 5_000
MOST_ENTRIES = 4_096
MOST_TEXT = 1 << 20


@dataclass(frozen=True)
class Linkage:
    """What a program or library says about the libraries it needs."""

    kind: bytes
    """Word size, byte order and machine; a library of another kind does not count."""
    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    """Folders that also hold for what its libraries need."""
    runpath: tuple[str, ...] = ()


def linkage(path: str) -> Linkage | None:
    """None if the file is not ELF of 64 bits in this machine's byte order, or is broken."""
    try:
        with (
            open(path, "rb", opener=_without_waiting) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _linkage(data, os.path.dirname(os.path.realpath(path)))
    except (OSError, ValueError, OverflowError, struct.error):
        return None


def _without_waiting(path: str, flags: int) -> int:
    """Opening a named pipe would else wait for whoever writes to it; it cannot be mapped anyway."""
    return os.open(path, flags | os.O_NONBLOCK)


def _linkage(data: mmap.mmap, origin: str) -> Linkage | None:
    if data[:5] != b"\x7fELF\x02":
        return None
    segments = list(_segments(data))
    kind = data[4:6] + data[18:20]
    entries = [entry for segment in segments if segment[0] == PT_DYNAMIC for entry in _entries(data, segment)]
    tables = [_offset(segments, value) for tag, value in entries if tag == DT_STRTAB]
    if not tables:
        return Linkage(kind)
    texts = [(tag, _text(data, tables[0] + value)) for tag, value in entries if tag in _TEXTS]
    folders = {tag: _folders(text, origin) for tag, text in texts if tag != DT_NEEDED}
    needed = tuple(text for tag, text in texts if tag == DT_NEEDED)
    runpath = folders.get(DT_RUNPATH, ())
    # A RUNPATH switches an RPATH beside it off.
    return Linkage(kind, needed, () if runpath else folders.get(DT_RPATH, ()), runpath)


_TEXTS = (DT_NEEDED, DT_RPATH, DT_RUNPATH)


def _segments(data: mmap.mmap) -> Iterator[tuple[int, int, int, int]]:
    """(type, offset, address, size in the file)"""
    table, size, count = *struct.unpack_from("=Q", data, 32), *struct.unpack_from("=HH", data, 54)
    for number in range(min(count, MOST_ENTRIES)):
        kind, _, offset, address, _, length = struct.unpack_from("=IIQQQQ", data, table + number * size)
        yield kind, offset, address, length


def _entries(data: mmap.mmap, segment: tuple[int, int, int, int]) -> Iterator[tuple[int, int]]:
    _, offset, _, length = segment
    for place in range(offset, offset + min(length, 16 * MOST_ENTRIES), 16):
        tag, value = struct.unpack_from("=qQ", data, place)
        if tag == 0:
            return
        yield tag, value


def _offset(segments: Iterable[tuple[int, int, int, int]], address: int) -> int:
    for kind, offset, start, length in segments:
        if kind == PT_LOAD and start <= address < start + length:
            return offset + address - start
    raise ValueError("an address outside of every segment")


def _text(data: mmap.mmap, place: int) -> str:
    if (end := data.find(b"\0", place, place + 4096)) < 0:
        raise ValueError("a text without an end")
    return os.fsdecode(data[place:end])


def _folders(text: str, origin: str) -> tuple[str, ...]:
    return tuple(part.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for part in text.split(":") if part)


@dataclass(frozen=True)
class Loader:
    """Looks for libraries where the dynamic loader would."""

    first: tuple[str, ...]
    """LD_LIBRARY_PATH."""
    last: tuple[str, ...]
    """What ld.so.conf names, then the folders built in."""

    def unresolved(self, path: str) -> list[str]:
        """Libraries that are not there: "NAME", or "NAME (for WHO)" if not `path` itself asks for it."""
        top = linkage(path)
        missing: dict[str, None] = {}
        seen: set[str] = set()
        waiting = [(path, top, top.rpath)] if top else []
        while waiting and len(seen) < MOST_FILES:
            owner, links, inherited = waiting.pop()
            for name in links.needed:
                if name in seen:
                    continue
                seen.add(name)
                if (found := self._find(name, links, inherited)) is None:
                    missing[name if owner == path else f"{name} (for {os.path.basename(owner)})"] = None
                else:
                    waiting.append((found[0], found[1], (*found[1].rpath, *inherited)))
        return list(missing)

    def _find(self, name: str, links: Linkage, inherited: tuple[str, ...]) -> tuple[str, Linkage] | None:
        above = () if links.runpath else inherited
        folders = ("",) if "/" in name else (*above, *self.first, *links.runpath, *self.last)
        for folder in folders:
            place = os.path.join(folder, name)
            if (found := linkage(place)) and found.kind == links.kind:
                return place, found
        return None


def loader(environ: Mapping[str, str], configuration: str = "/etc/ld.so.conf") -> Loader:
    first = tuple(filter(None, environ.get("LD_LIBRARY_PATH", "").split(":")))
    configured = tuple(_configured(configuration, depth=4))
    # musl has no ld.so.conf: it reads a file of its own, by default the built-in folders.
    own = tuple(folder for table in _matching("/etc/ld-musl-*.path") for folder in _configured(table, depth=0))
    return Loader(first, tuple(dict.fromkeys((*configured, *own, *DEFAULT_FOLDERS))))


def _configured(path: str, depth: int) -> Iterator[str]:
    if not os.path.isfile(path):
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.read(MOST_TEXT).splitlines()
    for line in (line.partition("#")[0].strip() for line in lines):
        if line.startswith("include ") and depth:
            pattern = os.path.join(os.path.dirname(path), line.removeprefix("include ").strip())
            for included in _matching(pattern):
                yield from _configured(included, depth - 1)
        elif line.startswith("/"):
            yield line


def _matching(pattern: str) -> list[str]:
    return sorted(glob.glob(pattern))  # noqa: PTH207 -- Path.glob raises on some patterns


def programs(paths: Iterable[str]) -> Iterator[str]:
    """Files as they are; in folders every shared object and executable; links to folders are not followed."""
    for path in paths:
        if not os.path.isdir(path):
            yield path
            continue
        for folder, _, names in os.walk(path):
            yield from (os.path.join(folder, name) for name in names if _may_be_program(folder, name))


def _may_be_program(folder: str, name: str) -> bool:
    path = os.path.join(folder, name)
    return os.path.isfile(path) and (".so" in name or os.access(path, os.X_OK))


def usual(environ: Mapping[str, str]) -> list[str]:
    """What commands start with: the shell, the interpreter and its extension modules."""
    path = environ.get("PATH")
    found = [shutil.which(name, path=path) for name in ("sh", "env", "python3", "git")]
    modules = [folder for folder in sys.path if folder.endswith(("lib-dynload", "site-packages", "dist-packages"))]
    return [*filter(None, found), *modules]


def examine(paths: Iterable[str] = (), environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """`paths`: programs, or folders of them; none means the usual ones."""
    chosen = tuple(paths)
    return [_libraries(chosen or tuple(usual(environ)), loader(environ)), _python_path(environ)]


def _libraries(paths: tuple[str, ...], search: Loader) -> Finding:
    lacking, looked, absent = {}, 0, [path for path in paths if not os.path.exists(path)]
    for path in programs(paths):
        if looked == MOST_FILES:
            break
        looked += 1
        if missing := search.unresolved(path):
            lacking[path] = missing
    problems = [f"{path}: not there" for path in absent]
    problems += [f"{path}: {', '.join(missing)}" for path, missing in lacking.items()]
    status: Status = "warn" if problems else "ok"
    return Finding(
        "inside.libraries",
        "inside",
        "libraries of programs",
        status,
        "; ".join(problems[:20]) or f"{looked} files, all resolve",
        "A program whose library is missing ends with 127 before it does anything, which looks like a bad "
        "answer.",
        "Install the package that has it (apt-file search NAME), or name its folder in /etc/ld.so.conf.d "
        "and run "
        "ldconfig, or in LD_LIBRARY_PATH." if problems else "",
    )  # fmt: skip


def _python_path(environ: Mapping[str, str]) -> Finding:
    value = environ.get("PYTHONPATH", "")
    gone = [part for part in value.split(":") if part and not os.path.isdir(part)]
    status: Status = "warn" if value else "ok"
    return Finding(
        "inside.pythonpath",
        "inside",
        "PYTHONPATH",
        status,
        (f"set to {value}" + (f"; not there: {', '.join(gone)}" if gone else "")) if value else "not set",
        "It goes before an environment's own packages and so can change which version is imported.",
        "unset PYTHONPATH, unless the task needs it: Sandbox.create(env={'PYTHONPATH': ''})." if value else "",
    )
