"""A tree of files as plain data, the difference of two, and which files are tests.

Trees that came out of an archive or a sandbox stay data: their paths are never followed on the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath

from msgspec import Struct

from shoal.errors import InvalidRequest

TEST_FOLDERS = frozenset({"test", "tests", "testsuite", "testcases"})
METADATA_SUFFIXES = (".egg-info", ".dist-info")
CONFIG_FILES = (
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
)
"""What pytest reads its settings from, at the top of a tree."""


class Entry(Struct, frozen=True):
    """A regular file, a symbolic link, or an empty folder."""

    mode: int = 0o644
    """Permission bits."""
    data: bytes = b""
    link: str | None = None
    """Where it points, if it is a link."""
    folder: bool = False


Tree = Mapping[str, Entry]
"""Relative POSIX paths to what is there; folders that hold something are implied."""


class Patch(Struct, frozen=True):
    """What turns one tree into another. Removals come first."""

    written: dict[str, Entry] = {}
    removed: tuple[str, ...] = ()

    def select(self, keep: Callable[[str], bool]) -> Patch:
        """The part of it that is about paths for which `keep` is true."""
        written = {path: entry for path, entry in self.written.items() if keep(path)}
        return Patch(written, tuple(path for path in self.removed if keep(path)))


def is_test_file(path: str) -> bool:
    """Whether a path of a source tree belongs to its tests, by name alone."""
    parts = PurePosixPath(path).parts
    *folders, name = parts
    if name == "PKG-INFO" or any(part.endswith(METADATA_SUFFIXES) for part in parts):
        return False
    if folders and (folders[0] == "testing" or not TEST_FOLDERS.isdisjoint(folders)):
        return True
    if not folders and name in ("test.py", "tests.py"):
        return True
    if name == "conftest.py":
        return True
    return name.endswith((".py",)) and (name.startswith("test_") or name.endswith(("_test.py", "_tests.py")))


def is_graders(path: str) -> bool:
    """Whether the grader decides about this path, and nothing that an agent puts there counts.

    Also true of a folder of tests by itself, lest an agent put a link in its place.
    """
    return is_test_file(path) or is_test_file(f"{path}/x") or path in CONFIG_FILES


def diff(before: Tree, after: Tree) -> Patch:
    """What makes `after` of `before`: changed content, mode, link or kind, in the order of paths."""
    written = {path: after[path] for path in sorted(after) if before.get(path) != after[path]}
    return Patch(written, tuple(sorted(before.keys() - after.keys())))


def solution(base: Tree, fix: Tree) -> Patch:
    """All files of the fix over the base but the tests."""
    return diff(base, fix).select(lambda path: not is_test_file(path))


def exam(base: Tree, fix: Tree) -> Patch:
    """The fix's tests and test settings in place of the base's: all, since an agent may have changed any."""
    theirs = {path: entry for path, entry in fix.items() if is_test_file(path) or path in CONFIG_FILES}
    gone = {path for path in base if is_test_file(path)} | set(CONFIG_FILES)
    return Patch(dict(sorted(theirs.items())), tuple(sorted(gone - theirs.keys())))


def folders_of(paths: Iterable[str]) -> set[str]:
    """Every folder on the way to these paths, the root left out."""
    return {str(folder) for path in paths for folder in PurePosixPath(path).parents} - {"."}


def check_tree(tree: Tree, name: str) -> None:
    """Raises InvalidRequest where a path would lead through a file or a link."""
    for folder in folders_of(tree):
        if folder in tree and not tree[folder].folder:
            raise InvalidRequest(name, f"{folder!r} is a file or a link and a folder at once")


def write_tree(tree: Tree, folder: Path) -> None:
    """Lays the tree down in an empty private folder. `check_tree` has passed, so no link is on the way."""
    for path in sorted(folders_of(tree) | {path for path, entry in tree.items() if entry.folder}):
        (folder / path).mkdir(mode=0o755)
    for path, entry in tree.items():
        _write_entry(folder / path, entry)


def _write_entry(path: Path, entry: Entry) -> None:
    if entry.folder:
        return
    if entry.link is not None:
        path.symlink_to(entry.link)
        return
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(entry.data)
        os.fchmod(fd, entry.mode)
