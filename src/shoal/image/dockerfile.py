"""Dockerfiles as data: instructions with their line, words and variables, of the subset that builds here.

FROM, RUN, COPY, ADD (of files of the context), WORKDIR, ENV, USER, ARG, SHELL; several stages, heredocs of RUN.
CMD, ENTRYPOINT and what only describes an image are kept or passed over. Anything else is refused with its line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct, field

from shoal.errors import InvalidRequest, Unsupported

_BUILDS: Final = ("FROM", "RUN", "COPY", "ADD", "WORKDIR", "ENV", "USER", "ARG", "SHELL", "CMD", "ENTRYPOINT")
_DESCRIBES: Final = ("LABEL", "EXPOSE", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "VOLUME")
_FLAGS: Final = {"COPY": ("from", "chown", "chmod", "link"), "ADD": ("chown", "chmod", "link"), "FROM": ("platform",)}
_VARIABLE: Final = re.compile(
    r"\\(?P<escaped>\$)|\$(?:(?P<plain>\w+)|\{(?P<name>\w+)(?::(?P<how>[-+])(?P<word>[^}]*))?\})"
)
_HEREDOC: Final = re.compile(r"<<(?P<strip>-?)(?P<quote>[\"']?)(?P<end>\w+)(?P=quote)")
_PIECE: Final = re.compile(
    r"""(?P<blank>\s+)|'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)"|(?P<open>["'])|(?P<plain>(?:[^\s"'\\]|\\.)+|\\$)""",
    re.DOTALL,
)


class Instruction(Struct, frozen=True):
    """One instruction as it is written, nothing replaced yet."""

    line: int
    """Of the file, from 1."""
    keyword: str
    """In capitals."""
    text: str
    """What follows it, continuation lines joined, flags taken off."""
    flags: dict[str, str] = field(default_factory=dict)
    script: str | None = None
    """The text of a heredoc."""

    def list(self) -> list[str] | None:
        """The words of the JSON form (`["a", "b"]`), None if it is not written so."""
        if not self.text.startswith("["):
            return None
        try:
            words = json.loads(self.text)
        except ValueError:
            return None
        return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


def parse(text: str) -> list[Instruction]:
    """All instructions. InvalidRequest or Unsupported name the line."""
    found: list[Instruction] = []
    lines = list(enumerate(text.splitlines(), start=1))
    escape = _escape(text)
    while lines:
        number, joined = _join(lines, escape)
        if joined:
            found.append(_instruction(number, joined, lines))
    if not found or all(each.keyword != "FROM" for each in found):
        raise InvalidRequest("dockerfile", "has no FROM")
    first = next(each for each in found if each.keyword != "ARG")
    if first.keyword != "FROM":
        raise InvalidRequest("dockerfile", f"line {first.line}: {first.keyword} before the first FROM")
    return found


def _escape(text: str) -> str:
    match = re.match(r"\s*#\s*escape\s*=\s*([\\`])\s*$", text, re.MULTILINE | re.IGNORECASE)
    return match[1] if match else "\\"


def _join(lines: list[tuple[int, str]], escape: str) -> tuple[int, str]:
    """Takes one instruction's lines off the front; comment lines between them vanish, as Docker has it."""
    number, line = lines.pop(0)
    if line.lstrip().startswith("#"):
        return number, ""
    parts: list[str] = []
    while True:
        stripped = line.rstrip()
        if not stripped.endswith(escape):
            parts.append(line)
            break
        parts.append(stripped[:-1])
        while lines and (not lines[0][1].strip() or lines[0][1].lstrip().startswith("#")):
            lines.pop(0)
        if not lines:
            break
        line = lines.pop(0)[1]
    return number, "".join(parts).strip()


def _instruction(number: int, joined: str, lines: list[tuple[int, str]]) -> Instruction:
    keyword, _, text = joined.partition(" ")
    keyword = keyword.upper()
    if keyword not in _BUILDS and keyword not in _DESCRIBES:
        raise Unsupported(f"dockerfile: line {number}: {keyword[:40]} does not build here; known: {', '.join(_BUILDS)}")
    flags, text = _take_flags(number, keyword, text.strip())
    script = _heredoc(number, text, lines) if keyword == "RUN" else None
    if not text and keyword not in _DESCRIBES:
        raise InvalidRequest("dockerfile", f"line {number}: {keyword} of what?")
    return Instruction(number, keyword, text, flags, script)


def _take_flags(number: int, keyword: str, text: str) -> tuple[dict[str, str], str]:
    flags: dict[str, str] = {}
    while keyword in ("COPY", "ADD", "FROM", "RUN") and (match := re.match(r"--([\w-]+)(?:=(\S+))?\s*", text)):
        if match[1] not in _FLAGS.get(keyword, ()):
            raise Unsupported(f"dockerfile: line {number}: {keyword} --{match[1]} does not build here; leave it out")
        flags[match[1]] = match[2] or ""
        text = text[match.end() :]
    return flags, text


def _heredoc(number: int, text: str, lines: list[tuple[int, str]]) -> str | None:
    match = _HEREDOC.search(text)
    if match is None:
        return None
    body: list[str] = []
    while lines:
        line = lines.pop(0)[1]
        line = line.lstrip("\t") if match["strip"] else line
        if line == match["end"]:
            return "".join(f"{each}\n" for each in body)
        body.append(line)
    raise InvalidRequest("dockerfile", f"line {number}: the heredoc {match['end']} has no end")


# Words and variables


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`$name`, `${name}`, `${name:-word}` and `${name:+word}` replaced; `\\$` is a dollar."""

    def value(match: re.Match[str]) -> str:
        if match["escaped"]:
            return "$"
        found = variables.get(match["plain"] or match["name"], "")
        if match["how"] == "-":
            return found or expand(match["word"], variables)
        if match["how"] == "+":
            return expand(match["word"], variables) if found else ""
        return found

    return _VARIABLE.sub(value, text)


def split(text: str, variables: Mapping[str, str]) -> list[str]:
    """Words as a shell makes them of blanks and quotes, with variables replaced but in single quotes.

    InvalidRequest for a quote that does not end.
    """
    found: list[str] = []
    word: str | None = None
    for match in re.finditer(_PIECE, text):
        if match["blank"]:
            if word is not None:
                found.append(word)
            word = None
        elif match["open"]:
            raise InvalidRequest("dockerfile", f"a quote that does not end: {text[:100]}")
        else:
            word = (word or "") + _piece(match, variables)
    return found if word is None else [*found, word]


def _piece(match: re.Match[str], variables: Mapping[str, str]) -> str:
    if match["single"] is not None:
        return match["single"]
    text = match["double"] if match["double"] is not None else match["plain"]
    taken = r"\\([\"\\])" if match["double"] is not None else r"\\([^$])"
    return re.sub(taken, r"\1", expand(text, variables))


def words(instruction: Instruction, variables: Mapping[str, str]) -> list[str]:
    """Of COPY and ADD: the JSON form, or separated by blanks."""
    listed = instruction.list()
    if listed is not None:
        return [expand(word, variables) for word in listed]
    return _at(instruction, lambda: split(instruction.text, variables))


def assignments(instruction: Instruction, variables: Mapping[str, str]) -> list[tuple[str, str]]:
    """Of ENV: `name=value name="a b"`, or the old `name value`."""
    if not re.match(r"\S+=", instruction.text):
        name, _, value = instruction.text.partition(" ")
        return [(name, expand(value.strip(), variables))]
    pairs = [word.partition("=") for word in _at(instruction, lambda: split(instruction.text, variables))]
    for name, equals, _ in pairs:
        if not equals or not name:
            raise InvalidRequest("dockerfile", f"line {instruction.line}: {name!r} is no name=value")
    return [(name, value) for name, _, value in pairs]


def _at(instruction: Instruction, work: Callable[[], list[str]]) -> list[str]:
    """Errors with the line."""
    try:
        return work()
    except InvalidRequest as error:
        raise InvalidRequest("dockerfile", f"line {instruction.line}: {error}") from None
