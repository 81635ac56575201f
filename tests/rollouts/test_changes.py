"""What is taken out of an agent's sandbox, and what is not."""

from __future__ import annotations

import asyncio

import pytest

from shoal.errors import LimitExceeded, PlatformError
from shoal.rollouts.changes import ChangeBounds, apply_patch, collect_changes
from shoal.rollouts.trees import Entry, Patch, exam, folders_of
from shoal.types import FileInfo, Result

from .stand_in import BASE, FIX, Box, apply, honest

EXAM = exam(BASE, FIX)


def box_with(**paths: Entry | None) -> Box:
    """A box where these paths of the workspace were written, or removed."""
    box = Box(0, BASE, honest, Result(exit_code=0))
    change(box, {path.replace("__", "/"): entry for path, entry in paths.items()})
    return box


def change(box: Box, paths: dict[str, Entry | None]) -> None:
    for path, entry in paths.items():
        if entry is None:
            del box.now[f"/workspace/{path}"]
        else:
            box.now[f"/workspace/{path}"] = entry


def collect(box: Box, bounds: ChangeBounds | None = None) -> Patch:
    return asyncio.run(collect_changes(box, EXAM, bounds or ChangeBounds()))


def test_files_links_folders_and_removals_are_taken_with_their_modes() -> None:
    box = box_with()
    theirs = {
        "thing.py": Entry(0o755, b"answer = 42\n"),
        "src/new.py": Entry(data=b"x"),
        "soft": Entry(0o777, link="/etc/passwd"),
        "empty": Entry(0o755, folder=True),
    }
    change(box, {**theirs, "old.py": None})
    box.now["/etc/motd"] = Entry(data=b"not in the workspace")
    assert collect(box) == Patch(dict(sorted(theirs.items())), ("old.py",))


@pytest.mark.parametrize(
    "path",
    [
        "tests/test_thing.py", "tests/new.py", "conftest.py", "src/test_x.py", "pytest.ini", "pytest.toml",
        "setup.cfg", "__pycache__/thing.cpython-311.pyc", "a/__pycache__/b.pyc", "testing",
    ],
)  # fmt: skip
def test_what_the_grader_decides_is_left_behind(path: str) -> None:
    box = box_with()
    change(box, {path: Entry(data=b"forged")})
    assert collect(box) == Patch()


def test_a_link_in_place_of_the_tests_folder_is_left_behind() -> None:
    box = box_with()
    change(box, {"tests/test_thing.py": None, "tests/test_gone.py": None, "tests": Entry(link="/tmp")})
    assert collect(box) == Patch()


def test_a_link_on_the_way_to_a_test_is_left_behind() -> None:
    deep = Patch({"src/pkg/tests/test_x.py": Entry()})
    box = box_with()
    change(box, {"src": Entry(link="/tmp"), "lib": Entry(link="/tmp")})
    taken = asyncio.run(collect_changes(box, deep))
    assert list(taken.written) == ["lib"]


def test_pipes_and_files_that_vanish_are_not_taken() -> None:
    class Odd(Box):
        async def stat(self, path: str) -> FileInfo:
            if path.endswith("thing.py"):
                del self.now[path]
            info = await super().stat(path)
            return FileInfo(info.name, path, "fifo", 0, 0o644, 0, 0, 0.0) if path.endswith("pipe") else info

    box = Odd(0, BASE, honest, Result())
    change(box, {"pipe": Entry(), "thing.py": Entry(data=b"new")})
    assert collect(box) == Patch({}, ("thing.py",))


def test_too_much_is_the_agents_fault() -> None:
    with pytest.raises(LimitExceeded, match="more than 10"):
        collect(box_with(a=Entry(data=bytes(6)), b=Entry(data=bytes(6))), ChangeBounds(bytes=10))
    many = {f"f{number}": Entry() for number in range(4)}
    with pytest.raises(LimitExceeded, match="workspace: more than 3"):
        collect(box_with(**many), ChangeBounds(entries=3))
    box = box_with()
    box.now |= {f"/tmp/{number}": Entry() for number in range(20)}
    with pytest.raises(LimitExceeded, match="more than 12"):
        collect(box, ChangeBounds(entries=3))


def test_a_file_that_grows_while_it_is_read_does_not_get_past_the_limit() -> None:
    class Growing(Box):
        async def stat(self, path: str) -> FileInfo:
            info = await super().stat(path)
            self.now[path] = Entry(data=bytes(100))
            return info

    box = Growing(0, BASE, honest, Result())
    change(box, {"x": Entry(data=b"small")})
    with pytest.raises(LimitExceeded):
        collect(box, ChangeBounds(bytes=10))


@pytest.mark.parametrize(
    "patch",
    [
        Patch({"thing.py": Entry(0o755, folder=True), "thing.py/x": Entry(data=b"x")}),
        Patch({"tests": Entry(data=b"a file now")}, ("tests/test_gone.py", "tests/test_thing.py")),
        Patch({"new": Entry(0o777, link="thing.py"), "deep/er/x": Entry(0o755, b"x")}, ("old.py",)),
        Patch({}, ("not there",)),
        Patch({"thing.py/deep/tests/test_x.py": Entry(data=b"x")}, ("thing.py",)),
        Patch({"thing.py/deep/tests/test_x.py": Entry(data=b"x")}),
    ],
)
def test_a_patch_replaces_whatever_is_in_its_way(patch: Patch) -> None:
    box = box_with()
    asyncio.run(apply_patch(box, patch))
    in_the_way = {path: box.workspace.get(path) for path in folders_of(patch.written) if path in BASE}
    assert all(entry is None or entry.folder for entry in in_the_way.values())
    assert box.workspace == {p: e for p, e in apply(BASE, patch).items() if p not in in_the_way or e.folder}


def test_a_link_that_can_not_be_made_is_the_platforms_failure() -> None:
    class Odd(Box):
        async def run(self, cmd: object, **options: object) -> Result:
            return Result(exit_code=1, stderr_bytes=b"ln: no")

    with pytest.raises(PlatformError, match="ln: no"):
        asyncio.run(apply_patch(Odd(0, BASE, honest, Result()), Patch({"l": Entry(link="x")})))
