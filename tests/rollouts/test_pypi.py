"""From two releases to what an agent sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import InvalidRequest
from shoal.rollouts.pypi import LONGEST_STATEMENT, Releases, base_tree, entry_points, with_statement
from shoal.rollouts.trees import Entry

from .stand_in import BASE, FIX, RIGHT, make_task

RELEASES = Releases(BASE, FIX)


def test_a_tree_without_metadata_gets_what_an_installation_would_make(tmp_path: Path) -> None:
    tree = base_tree(make_task(tmp_path), BASE)
    added = {path: tree[path].data for path in tree.keys() - BASE.keys()}
    assert added == {
        "thing-1.0.dist-info/METADATA": BASE["PKG-INFO"].data,
        "thing-1.0.dist-info/entry_points.txt": b"[console_scripts]\nthing = thing:main\n\n",
    }


def test_metadata_goes_where_the_package_is_imported_from(tmp_path: Path) -> None:
    task = make_task(tmp_path, package="some-thing", import_root={"base": "src", "fix": "."})
    tree = base_tree(task, {"src/thing.py": Entry(), "some_thing.egg-info/PKG-INFO": Entry()})
    assert tree["src/some_thing-1.0.dist-info/METADATA"].data.endswith(b"Name: some-thing\nVersion: 1.0\n")
    assert task.import_roots == (".", "src")


@pytest.mark.parametrize("root", [".", "src"])
def test_metadata_that_is_there_is_left_alone(tmp_path: Path, root: str) -> None:
    info = "thing.egg-info/PKG-INFO" if root == "." else "src/thing.egg-info/PKG-INFO"
    base = {**BASE, info: Entry()}
    assert base_tree(make_task(tmp_path, import_root=root), base) == base


def test_entry_points_of_all_kinds_keep_their_case() -> None:
    text = b"""
        [project.scripts]
        A = "b:c"
        [project.gui-scripts]
        d = "e:f [g]"
        [project.entry-points."pytest11"]
        Mixed_Case = "h"
    """
    assert entry_points(text) == (
        b"[console_scripts]\nA = b:c\n\n[gui_scripts]\nd = e:f [g]\n\n[pytest11]\nMixed_Case = h\n\n"
    )


@pytest.mark.parametrize("text", [b"", b"[tool.x]\n", b"[project]\nname = 'x'\n", b"[project.scripts]\n"])
def test_no_entry_points_no_file(text: bytes) -> None:
    assert entry_points(text) == b""


@pytest.mark.parametrize("text", [b"\xff", b"[", b"project = 3", b"[project]\nscripts = [1]"])
def test_a_pyproject_that_can_not_be_read_is_named(text: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"pyproject\.toml"):
        entry_points(text)


def test_the_statement_is_what_the_changelog_adds(tmp_path: Path) -> None:
    told = with_statement(make_task(tmp_path), RELEASES).statement
    assert "thing 1.0" in told
    assert "- the answer is right" in told
    assert "- first" not in told
    assert RIGHT not in told


@pytest.mark.parametrize("files", [[], ["README"], ["PKG-INFO.missing"]])
def test_without_a_changelog_it_names_the_tests(tmp_path: Path, files: list[str]) -> None:
    told = with_statement(make_task(tmp_path, changelog_files=files), RELEASES).statement
    assert f"- {RIGHT}\n" in told


def test_a_manifests_own_statement_stands_and_a_long_one_is_cut(tmp_path: Path) -> None:
    assert with_statement(make_task(tmp_path, statement="Do it."), RELEASES).statement == "Do it."
    long = Releases(BASE, {**FIX, "CHANGES.rst": Entry(data=b"x" * 100_000)})
    assert len(with_statement(make_task(tmp_path), long).statement) == LONGEST_STATEMENT
