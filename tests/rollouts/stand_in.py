"""A package with two releases, and a platform in memory that has the verbs of a sandbox and runs nothing.

Its `pytest` gives the outcomes that a function of the workspace says; all else is the real thing.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import posixpath
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import FileExists, NotFound
from shoal.rollouts.grading import REPORT
from shoal.rollouts.preparation import WORKSPACE
from shoal.rollouts.tasks import Archive, Task
from shoal.rollouts.trees import Entry, Patch, Tree, folders_of
from shoal.types import Change, FileInfo, Layer, Result

BASE: dict[str, Entry] = {
    "PKG-INFO": Entry(data=b"Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n"),
    "CHANGES.rst": Entry(data=b"1.0\n---\n\n- first\n"),
    "pyproject.toml": Entry(data=b'[project]\nname = "thing"\n[project.scripts]\nthing = "thing:main"\n'),
    "thing.py": Entry(data=b"answer = 41\n"),
    "old.py": Entry(data=b""),
    "tests/test_thing.py": Entry(data=b"# old tests\n"),
    "tests/test_gone.py": Entry(data=b"# gone\n"),
}
FIX: dict[str, Entry] = {
    "PKG-INFO": Entry(data=b"Metadata-Version: 2.1\nName: thing\nVersion: 1.1\n"),
    "CHANGES.rst": Entry(data=b"1.1\n---\n\n- the answer is right\n\n1.0\n---\n\n- first\n"),
    "pyproject.toml": Entry(data=b'[project]\nname = "thing"\n[project.scripts]\nthing = "thing:main"\n'),
    "thing.py": Entry(data=b"answer = 42\n"),
    "run.sh": Entry(mode=0o755, data=b"#!/bin/sh\n"),
    "tests/test_thing.py": Entry(data=b"# new tests\n"),
}
RIGHT, KEPT = "tests/test_thing.py::test_answer", "tests/test_thing.py::test_kept"

Outcomes = Callable[[Tree], Mapping[str, str]]


def apply(tree: Tree, patch: Patch) -> dict[str, Entry]:
    """The tree after the patch."""
    return {path: entry for path, entry in tree.items() if path not in patch.removed} | patch.written


def pack(tree: Tree, top: str = "thing-1.0") -> bytes:
    """The tree as a .tar.gz."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for path, entry in tree.items():
            info = tarfile.TarInfo(f"{top}/{path}")
            info.mode, info.size = entry.mode, len(entry.data)
            if entry.link is not None:
                info.type, info.linkname = tarfile.SYMTYPE, entry.link
            elif entry.folder:
                info.type = tarfile.DIRTYPE
            tar.addfile(info, io.BytesIO(entry.data))
    return buffer.getvalue()


def archive_of(data: bytes, file: str) -> Archive:
    return Archive(file=file, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))


def make_task(folder: Path, name: str = "thing__1.0__1.1", **fields: Any) -> Task:
    """A task whose two archives lie in `folder`, as a folder of links has them."""
    archives = {}
    for key, tree, version in (("base_sdist", BASE, "1.0"), ("fix_sdist", FIX, "1.1")):
        data, file = pack(tree, f"thing-{version}"), f"thing-{version}.tar.gz"
        if not (folder / file).exists():
            (folder / file).write_bytes(data)
        archives[key] = msgspec.to_builtins(archive_of((folder / file).read_bytes(), file))
    facts = {
        "id": name, "package": "thing", "base_version": "1.0", "fix_version": "1.1", "import_root": ".",
        "python": "3.11.7", "requirements": ["pytest==9.2.0"], "test_files": ["tests/test_thing.py"],
        "changelog_files": ["CHANGES.rst"], "fail_to_pass": [RIGHT], "pass_to_pass": [KEPT],
    }  # fmt: skip
    return msgspec.convert(facts | archives | fields, Task)


def honest(tree: Tree) -> dict[str, str]:
    """What the new tests would say."""
    assert tree["tests/test_thing.py"].data == b"# new tests\n"
    assert "tests/test_gone.py" not in tree
    return {RIGHT: "passed" if tree["thing.py"].data == b"answer = 42\n" else "failed", KEPT: "passed"}


class Box:
    """A sandbox whose files are a dictionary by absolute path."""

    def __init__(self, number: int, workspace: Tree, outcomes: Outcomes, result: Result) -> None:
        self.id = f"box-{number}"
        self.start = {f"{WORKSPACE}/{path}": entry for path, entry in workspace.items()}
        self.now = dict(self.start)
        self.outcomes, self.result = outcomes, result
        self.ran: list[tuple[str | Sequence[str], dict[str, Any]]] = []
        self.alive = True
        self.commands = self.files = self

    @property
    def workspace(self) -> dict[str, Entry]:
        prefix = f"{WORKSPACE}/"
        return {path.removeprefix(prefix): e for path, e in self.now.items() if path.startswith(prefix)}

    # commands

    async def run(self, cmd: str | Sequence[str], **options: Any) -> Result:
        self.ran.append((cmd, options))
        if not isinstance(cmd, str) and cmd[0] == "ln":
            self.now[cmd[-1]] = Entry(mode=0o777, link=cmd[-2])
        elif "pytest" in cmd:
            lines = [{"id": test, "outcome": said} for test, said in self.outcomes(self.workspace).items()]
            self.now[REPORT] = Entry(data="".join(json.dumps(line) + "\n" for line in lines).encode())
            return self.result
        return Result(exit_code=0)

    # files

    async def read(self, path: str, format: str = "text") -> Any:
        data = self._entry(path).data
        return data if format == "bytes" else data.decode()

    async def write(self, path: str, data: bytes | str, mode: int | None = None) -> None:
        if any(below.startswith(f"{path}/") for below in self.now):
            raise FileExists(f"{path} is a folder")
        for folder in folders_of([path]):
            if folder in self.now and not self.now[folder].folder:
                raise NotFound(f"{folder} is no folder")  # ENOTDIR
        self.now[path] = Entry(mode or 0o644, data.encode() if isinstance(data, str) else data)

    async def stat(self, path: str) -> FileInfo:
        entry = self._entry(path)
        kind = "symlink" if entry.link is not None else "directory" if entry.folder else "file"
        return FileInfo(
            name=posixpath.basename(path), path=path, kind=kind, size=len(entry.data), mode=entry.mode,
            uid=0, gid=0, mtime=0.0, link=entry.link,
        )  # fmt: skip

    async def make_dir(self, path: str) -> None:
        if path in self.now and not self.now[path].folder:
            raise NotFound(path)  # ENOTDIR
        self.now[path] = Entry(mode=0o755, folder=True)

    async def remove(self, path: str) -> None:
        gone = [each for each in self.now if each == path or each.startswith(f"{path}/")]
        if not gone:
            raise NotFound(path)
        for each in gone:
            del self.now[each]

    def _entry(self, path: str) -> Entry:
        if path not in self.now:
            raise NotFound(path)
        return self.now[path]

    # the sandbox

    async def changes(self) -> list[Change]:
        found = [Change(path, "removed", 0) for path in self.start.keys() - self.now.keys()]
        for path, entry in self.now.items():
            if self.start.get(path) != entry:
                found.append(Change(path, "changed" if path in self.start else "added", len(entry.data)))
        return sorted(found)

    async def kill(self) -> None:
        self.alive = False


class Memory:
    """A platform in memory. What it was asked for can be looked at."""

    def __init__(self, outcomes: Outcomes = honest, result: Result | None = None) -> None:
        self.outcomes, self.result = outcomes, result or Result(exit_code=0)
        self.boxes: list[Box] = []
        self.trees: dict[str, Tree] = {}
        self.failing: dict[str, Exception] = {}
        self.most_at_once = 0

    async def environment(self, task: Task) -> Layer:
        if task.id in self.failing:
            raise self.failing[task.id]
        return Layer(digest="environment", source="")

    async def workspace(self, task: Task, tree: Tree) -> Layer:
        self.trees[task.id] = tree
        return Layer(digest=task.id, source="")

    async def sandbox(self, layers: Sequence[Layer], life: float) -> Box:
        await asyncio.sleep(0)
        box = Box(len(self.boxes), self.trees[layers[-1].digest], self.outcomes, self.result)
        self.boxes.append(box)
        self.most_at_once = max(self.most_at_once, sum(each.alive for each in self.boxes))
        return box

    async def close(self) -> None:
        assert not any(box.alive for box in self.boxes)
