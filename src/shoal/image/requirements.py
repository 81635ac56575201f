"""Reading a requirements file: names and versions for the index, and nothing that reaches anywhere else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from shoal.errors import InvalidRequest

_COMMENT = re.compile(r"(^|\s)#.*$")
_NAMED = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?\s*(?:\[[^\]]*\])?")
_INCLUDE = re.compile(r"(-r|-c|--requirement|--constraint)(?:\s*=\s*|\s*)(.+)")
_INDEX = (
    "-i",
    "-f",
    "--index-url",
    "--extra-index-url",
    "--find-links",
    "--no-index",
    "--trusted-host",
    "--pre",
)
_KEPT = ("--no-binary", "--only-binary", "--require-hashes")
_LARGEST = 4 << 20
_DEEPEST = 20


class Requirements(Struct, frozen=True):
    """What a requirements file asks for, without comments, joined lines, sorted."""

    requirements: tuple[str, ...]
    constraints: tuple[str, ...]


def read(file: Path) -> Requirements:
    """Read a file with all that it includes. InvalidRequest names the line that can't be honoured."""
    lines = {"-r": set[str](), "-c": set[str]()}
    for kind, line in _read(file, "-r", ()):
        lines[kind].add(line)
    return Requirements(tuple(sorted(lines["-r"])), tuple(sorted(lines["-c"])))


def check(line: str, where: str = "requirements") -> str:
    """One requirement with its blanks reduced. InvalidRequest unless it is a name that an index knows."""
    text = " ".join(line.split())
    option = text.split("=", 1)[0].split(" ", 1)[0]
    if option in _KEPT:
        return text
    if option in _INDEX or text.startswith(("-i", "-f")):
        way = "set it for this machine, in pip.conf, uv.toml or UV_DEFAULT_INDEX"
        raise InvalidRequest(where, f"the index is not chosen in a requirements file ({option}): {way}")
    if text.startswith(("-e", "--editable")) or _is_place(text):
        way = "name a release, and bring other code in as a workspace"
        raise InvalidRequest(where, f"only the package index can be reached by a build, not {text!r}: {way}")
    if "${" in text:
        raise InvalidRequest(where, f"variables are not filled in, to keep secrets out of builds: {text!r}")
    if _NAMED.match(text) is None:
        raise InvalidRequest(where, f"not a requirement like 'name==1.0': {text!r}")
    return text


def _is_place(text: str) -> bool:
    """A path, an archive or a URL, where a name is meant."""
    before_marker = text.split(";", 1)[0].split(" --hash", 1)[0]
    return "/" in before_marker or before_marker.strip().endswith((".whl", ".zip", ".tar.gz")) or text == "."


def _read(file: Path, kind: str, above: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
    file = file.resolve()
    if file in above or len(above) > _DEEPEST:
        raise InvalidRequest("requirements", f"{above[-1]} includes {file}, which includes it")
    for number, line in _join(_text(file)):
        where = f"requirements, {file.name} line {number}"
        if (match := _INCLUDE.fullmatch(line)) is not None:
            below = "-c" if kind == "-c" or match[1] in ("-c", "--constraint") else "-r"
            if "://" in match[2]:
                raise InvalidRequest(where, f"only files of this machine can be included, not {match[2]}")
            yield from _read(file.parent / match[2].strip(), below, (*above, file))
        else:
            yield kind, check(line, where)


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > _LARGEST:
            raise InvalidRequest("requirements", f"{file} is larger than {_LARGEST:,} bytes")
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest("requirements", f"{file} can't be read: {error}") from error


def _join(text: str) -> Iterator[tuple[int, str]]:
    """Lines with those they continue in, without comments and empty ones; numbered by where they begin."""
    parts: list[str] = []
    start = 0
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        start = number if not parts else start
        bare = line if parts and not line.strip() else _COMMENT.sub("", line)
        if bare.endswith("\\"):
            parts.append(bare[:-1])
            continue
        joined = " ".join([*parts, bare]).strip()
        parts = []
        if joined:
            yield start, joined
