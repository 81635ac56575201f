"""An environment taken apart into what each of its packages brought, so that the next one finds most of it made.

Over many dependency sets whole environments repeat in a quarter of cases, single packages in three of four. A package
is installed and compiled once; an environment is then a stack of such layers over an empty one, without a file written.

Which file is whose stands in the RECORD that every installed package has. It is the package's own word: it only sorts
the files that are there, and where it leaves any over the environment is kept whole.
"""

from __future__ import annotations

import csv
import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

_PIN: Final = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(?:\[(?P<extras>[^\]]*)\])?\s*"
    r"===?\s*(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)(?P<hashes>(?:\s+--hash[= ]sha256:[0-9a-f]{64})*)\s*"
)
_INFO: Final = re.compile(r"(?P<folder>.*/)?(?P<name>[^/]+)-(?P<version>[^/-]+)\.dist-info/RECORD")
_COMPILED: Final = re.compile(r"(?P<folder>(?:.*/)?)__pycache__/(?P<module>[^/]+)\.[a-z]+-\d+(?:\.opt-\d)?\.pyc")
_RECORD_MAX: Final = 16 << 20


class Pin(Struct, frozen=True, order=True):
    """One exact package."""

    name: str
    """Normalised: lower case, runs of - _ . as one dash."""
    version: str
    hashes: tuple[str, ...] = ()
    """Of archives that are accepted; none: any."""

    @property
    def line(self) -> str:
        """As a requirement."""
        return " ".join([f"{self.name}=={self.version}", *(f"--hash=sha256:{digest}" for digest in self.hashes)])


def normalise(name: str) -> str:
    """As the index compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(lines: Iterable[str]) -> tuple[Pin, ...] | None:
    """Each line as an exact package, sorted; None if a line says anything else (a range, a marker, an option)."""
    found: dict[str, Pin] = {}
    for line in lines:
        match = _PIN.fullmatch(line)
        if match is None or match["version"].endswith("*"):
            return None
        hashes = tuple(sorted(re.findall(r"sha256:([0-9a-f]{64})", match["hashes"])))
        pin = Pin(normalise(match["name"]), match["version"], hashes)
        if found.setdefault(pin.name, pin) != pin:
            return None
    return tuple(sorted(found.values()))


def partition(files: Iterable[str], records: Mapping[str, str]) -> dict[str, list[str]]:
    """The files of an environment by the package that brought them; those of none under "".

    `files`: paths below the environment. `records`: path of a RECORD to its text. Names are normalised. What two
    packages claim goes to the last by name, as the last one installed would have overwritten it.
    """
    owners: dict[str, str] = {}
    present = set(files)
    for place in sorted(records):
        match = _INFO.fullmatch(place)
        if match is not None:
            folder, name = match["folder"] or "", normalise(match["name"])
            owners.update((path, name) for path in _claimed(records[place], folder) if path in present)
    parts: dict[str, list[str]] = {}
    for path in sorted(present):
        parts.setdefault(owners.get(path) or owners.get(source_of(path) or "", ""), []).append(path)
    return parts


def _claimed(record: str, folder: str) -> list[str]:
    """Paths below the environment, as RECORD has them relative to the folder of packages."""
    try:
        rows = list(csv.reader(record[:_RECORD_MAX].splitlines()))
    except csv.Error:
        return []
    return [posixpath.normpath(posixpath.join(folder, row[0])) for row in rows if row and row[0]]


def source_of(path: str) -> str | None:
    """The module that a compiled file was made from."""
    match = _COMPILED.fullmatch(path)
    return f"{match['folder']}{match['module']}.py" if match else None


def is_record(path: str) -> bool:
    """Whether a path below the environment is a RECORD of a package."""
    return _INFO.fullmatch(path) is not None
