"""Tasks: what a manifest says of them, and how they are read and chosen.

A manifest has one JSON object a line and holds facts only: names, versions, digests, test ids, pins. Two come
with Shoal: `pypi`, bug-fix releases of pure-Python packages, and `pypi-hanging`, two whose tests never
end before the fix.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from shoal.errors import InvalidRequest, Unsupported

PACKAGED = ("pypi", "pypi-hanging")
LONGEST_MANIFEST = 256 << 20
LEAST_LIMIT, SLACK = 60.0, 10.0

Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][^\s/\\\x00]*$", max_length=200)]
Word = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+!-]*$", max_length=200)]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
RelativePath = Annotated[str, Meta(pattern=r"^(?!/)(?!-)(?!(.*/)?\.\.(/|$))[^\x00]+$", max_length=4096)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]


class Archive(Struct, frozen=True, kw_only=True):
    """A source archive as the index has it."""

    file: Word
    sha256: Sha256
    bytes: Annotated[int, Meta(ge=1, le=1 << 30)]


class ImportRoots(Struct, frozen=True, kw_only=True):
    """Where the package lies in each release, if that changed."""

    base: RelativePath
    fix: RelativePath


class Measured(Struct, frozen=True, kw_only=True):
    """What was seen when the task was validated."""

    test_fix_s: tuple[Seconds, ...] = ()
    """Seconds the tests took on the fixed tree, one for each round."""


class Task(Struct, frozen=True, kw_only=True):
    """A release of a package (the fix) over the one before (the base). Other fields are ignored."""

    id: Id
    package: Word
    base_version: Word
    fix_version: Word
    base_sdist: Archive
    fix_sdist: Archive
    import_root: RelativePath | ImportRoots
    """The folder that goes on PYTHONPATH."""
    python: Annotated[str, Meta(pattern=r"^\d+\.\d+(\.\d+)?$")]
    requirements: tuple[Annotated[str, Meta(pattern=r"^[A-Za-z0-9][^\s;]*==[^\s;]+$")], ...]
    """A full closure of exact pins."""
    test_files: Annotated[tuple[RelativePath, ...], Meta(min_length=1)]
    """What pytest is given."""
    changelog_files: tuple[RelativePath, ...] = ()
    fail_to_pass: tuple[str, ...] = ()
    """Tests that fail on the base and must pass."""
    pass_to_pass: tuple[str, ...] = ()
    """Tests that pass on the base and must still pass."""
    must_pass: tuple[str, ...] = ()
    """Where the tests of the base never end: those that must pass, within `base_limit_s`."""
    base_limit_s: Seconds | None = None
    measured: Measured = Measured()
    statement: str = ""
    """What the agent is told. Left out of a manifest, it is made from the releases."""

    @property
    def import_roots(self) -> tuple[str, ...]:
        """Folders for PYTHONPATH, that of the fix first."""
        if isinstance(self.import_root, str):
            return (self.import_root,)
        return (self.import_root.fix, self.import_root.base)

    @property
    def base_root(self) -> str:
        return self.import_root if isinstance(self.import_root, str) else self.import_root.base

    @property
    def must_start_passing(self) -> tuple[str, ...]:
        """What only the fix makes pass, or makes pass in time."""
        return self.fail_to_pass + self.must_pass

    @property
    def test_limit(self) -> float:
        """Seconds that the tests may take: ten times what was measured, for machines may be slow and busy."""
        return self.base_limit_s or max(LEAST_LIMIT, SLACK * max(self.measured.test_fix_s, default=0.0))

    @property
    def shortest(self) -> float:
        """Shortest recorded time of its tests in seconds; infinity where none was recorded."""
        return min(self.measured.test_fix_s, default=float("inf"))


def load_tasks(source: str | Path) -> list[Task]:
    """The tasks of "pypi", "pypi-hanging" or a manifest file, in its order."""
    if isinstance(source, str) and source in PACKAGED:
        text = resources.files("shoal.rollouts").joinpath("data", f"{source}.jsonl").read_bytes()
        return parse_manifest(text, source)
    path = Path(source)
    if path.is_dir():
        raise Unsupported(f"tasks: {path} is a folder; task folders are not supported yet, give a .jsonl file")
    if not path.is_file():
        known = ", ".join(PACKAGED)
        raise InvalidRequest("tasks", f"no file {str(source)!r}; give a manifest (.jsonl) or one of: {known}")
    if path.stat().st_size > LONGEST_MANIFEST:
        raise InvalidRequest("tasks", f"{path} has more than {LONGEST_MANIFEST} bytes; split it")
    return parse_manifest(path.read_bytes(), str(path))


def parse_manifest(text: bytes, name: str) -> list[Task]:
    """Every line a task, empty ones skipped. Raises InvalidRequest with the line's number and the field."""
    tasks: dict[str, Task] = {}
    decoder = msgspec.json.Decoder(Task)
    for number, line in enumerate(text.split(b"\n"), start=1):
        if not line.strip():
            continue
        task = _parse_line(decoder, line, f"{name}, line {number}")
        if task.id in tasks:
            raise InvalidRequest("tasks", f"{name}, line {number}: id {task.id!r} was there before; ids are unique")
        tasks[task.id] = task
    if not tasks:
        raise InvalidRequest("tasks", f"{name} has no task; a manifest has one JSON object a line")
    return list(tasks.values())


def _parse_line(decoder: msgspec.json.Decoder[Task], line: bytes, where: str) -> Task:
    try:
        task = decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest("tasks", f"{where}: {error}") from None
    if not task.must_start_passing:
        raise InvalidRequest("tasks", f"{where}: fail_to_pass and must_pass are both empty; nothing could be solved")
    return task


def select_tasks(tasks: Iterable[Task], patterns: Sequence[str] = (), limit: int | None = None) -> list[Task]:
    """Those whose id matches a shell pattern; of them the `limit` with the shortest recorded tests first."""
    chosen = list(tasks)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(task.id, pattern) for task in chosen):
            raise InvalidRequest("task", f"no task's id matches {pattern!r}; ids look like {chosen[0].id!r}")
    if patterns:
        chosen = [task for task in chosen if any(fnmatch.fnmatchcase(task.id, each) for each in patterns)]
    if limit is None:
        return chosen
    if limit < 1:
        raise InvalidRequest("limit", f"at least 1 task, not {limit}")
    return sorted(chosen, key=lambda task: task.shortest)[:limit]
