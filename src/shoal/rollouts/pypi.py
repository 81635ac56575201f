"""From a line of the manifest to a task: two releases of a package, read as data."""

from __future__ import annotations

import asyncio
import configparser
import difflib
import io
import tomllib
from pathlib import PurePosixPath
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from shoal.errors import InvalidRequest
from shoal.rollouts.archives import read_archive
from shoal.rollouts.downloads import Downloads
from shoal.rollouts.tasks import Archive, Task
from shoal.rollouts.trees import Entry, Tree

LONGEST_STATEMENT = 64 * 1024


class Releases(Struct, frozen=True):
    """The two source trees of a task, as released."""

    base: Tree
    fix: Tree


async def fetch_releases(task: Task, downloads: Downloads) -> Releases:
    """Both releases. Raises DigestMismatch, NotFound, PlatformError, or InvalidRequest for a bad archive."""
    base, fix = await asyncio.gather(
        _fetch_tree(task.package, task.base_sdist, downloads),
        _fetch_tree(task.package, task.fix_sdist, downloads),
    )
    return Releases(base, fix)


async def _fetch_tree(package: str, archive: Archive, downloads: Downloads) -> Tree:
    return await asyncio.to_thread(read_archive, await downloads.fetch(package, archive))


def base_tree(task: Task, base: Tree) -> Tree:
    """What the agent works on: the base release, with the metadata that an installation would have made."""
    root = "" if task.base_root == "." else f"{task.base_root.rstrip('/')}/"
    top = {path.removeprefix(root).split("/")[0] for path in base if path.startswith(root)}
    if any(name.endswith(".egg-info") for name in top):
        return base
    folder = f"{root}{task.package.replace('-', '_')}-{task.base_version}.dist-info"
    return {**base, **{f"{folder}/{name}": Entry(data=data) for name, data in _metadata(task, base).items()}}


def _metadata(task: Task, base: Tree) -> dict[str, bytes]:
    least = f"Metadata-Version: 2.1\nName: {task.package}\nVersion: {task.base_version}\n".encode()
    files = {"METADATA": base["PKG-INFO"].data if "PKG-INFO" in base else least}
    if points := entry_points(base["pyproject.toml"].data if "pyproject.toml" in base else b""):
        files["entry_points.txt"] = points
    return files


def entry_points(pyproject: bytes) -> bytes:
    """`entry_points.txt` from the scripts and entry points of a pyproject.toml; empty if there are none."""
    try:
        project: Any = tomllib.loads(pyproject.decode()).get("project", {})
        groups = {
            "console_scripts": project.get("scripts", {}),
            "gui_scripts": project.get("gui-scripts", {}),
        }
        groups |= project.get("entry-points", {})
        return _as_ini({group: points for group, points in groups.items() if points})
    except (ValueError, AttributeError, TypeError, configparser.Error) as error:
        raise InvalidRequest("pyproject.toml", f"its entry points can't be read: {error}") from error


def _as_ini(groups: dict[str, dict[str, str]]) -> bytes:
    ini = configparser.RawConfigParser(delimiters=("=",))
    ini.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their case
    ini.read_dict(groups)
    text = io.StringIO()
    ini.write(text)
    return text.getvalue().encode()


def with_statement(task: Task, releases: Releases) -> Task:
    """The task with what the agent is told; a manifest's own statement stands."""
    if task.statement:
        return task
    told = _changelog(task, releases) or _failing_tests(task)
    head = (
        f"This is the source of {task.package} {task.base_version}. Change it so that it does what the next "
        f"release, {task.fix_version}, does. Tests that you don't see decide whether it does.\n\n"
    )
    return replace(task, statement=(head + told)[:LONGEST_STATEMENT])


def _changelog(task: Task, releases: Releases) -> str:
    parts = []
    for path in task.changelog_files:
        added = _added_lines(*(_lines(tree.get(path)) for tree in (releases.base, releases.fix)))
        if any(line.strip() for line in added):
            parts.append(f"{PurePosixPath(path).name} of {task.fix_version} adds:\n\n" + "\n".join(added).strip("\n"))
    return "\n\n".join(parts) + ("\n" if parts else "")


def _added_lines(before: list[str], after: list[str]) -> list[str]:
    opcodes = difflib.SequenceMatcher(None, before, after).get_opcodes()
    return [line for tag, _, _, start, end in opcodes if tag in ("insert", "replace") for line in after[start:end]]


def _lines(entry: Entry | None) -> list[str]:
    return entry.data.decode("utf-8", "replace").splitlines() if entry else []


def _failing_tests(task: Task) -> str:
    tests = "\n".join(f"- {test}" for test in task.must_start_passing)
    return f"Tests of {task.fix_version} that do not pass yet:\n\n{tests}\n"
