"""Which files are tests, and the difference of two trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InvalidRequest
from shoal.rollouts.trees import (
    CONFIG_FILES,
    Entry,
    check_tree,
    diff,
    exam,
    is_graders,
    is_test_file,
    solution,
    write_tree,
)

from .stand_in import BASE, FIX, apply

TESTS = (
    "tests/x.txt", "test/data/a", "src/pkg/tests/b.json", "a/testsuite/c", "a/b/testcases/d", "testing/e.py",
    "testing/deep/f", "test_g.py", "a/test_h.py", "a/i_test.py", "j_tests.py", "conftest.py", "a/conftest.py",
    "test.py", "tests.py", "tests/__init__.py",
)  # fmt: skip
OTHERS = (
    "a/testing/x.py", "testing.py", "a/test.py", "a/tests.py", "test_x.txt", "a/test_x", "x_test.pyi",
    "contest.py", "tests.egg-info/x.py", "tests/x.egg-info/y", "tests/PKG-INFO", "tests/x.dist-info/METADATA",
    "tests", "latest/x.py", "Tests/x.py", "pytest.ini", "setup.cfg", "testdata/x",
)  # fmt: skip


@pytest.mark.parametrize("path", TESTS)
def test_these_are_tests(path: str) -> None:
    assert is_test_file(path)
    assert is_graders(path)


@pytest.mark.parametrize("path", OTHERS)
def test_these_are_not(path: str) -> None:
    assert not is_test_file(path)


def test_settings_and_folders_of_tests_are_the_graders() -> None:
    assert all(map(is_graders, (*CONFIG_FILES, "tests", "src/pkg/tests", "testing")))
    assert not any(map(is_graders, ("src/pyproject.toml", "a/testing", "src", "thing.py")))


names = st.sampled_from(["a", "b", "tests", "test_x.py", "conftest.py", "setup.cfg", "PKG-INFO", "c.egg-info"])
paths = st.lists(names, min_size=1, max_size=3).map("/".join)
entries = st.builds(Entry, mode=st.sampled_from([0o644, 0o755]), data=st.binary(max_size=2))
trees = st.dictionaries(paths, entries, max_size=8)


@given(trees, trees)
def test_a_difference_makes_the_one_tree_of_the_other(before: dict[str, Entry], after: dict[str, Entry]) -> None:
    assert apply(before, diff(before, after)) == after
    assert diff(after, after).written == {}


@given(trees, trees)
def test_solution_and_exam_together_make_the_fix(base: dict[str, Entry], fix: dict[str, Entry]) -> None:
    assert apply(apply(base, solution(base, fix)), exam(base, fix)) == fix


@given(trees, trees, trees)
def test_no_agent_decides_what_the_grader_decides(
    base: dict[str, Entry], fix: dict[str, Entry], theirs: dict[str, Entry]
) -> None:
    changes = diff(base, theirs).select(lambda path: not is_graders(path))
    graded = apply(apply(base, changes), exam(base, fix))
    for decided in (is_test_file, CONFIG_FILES.__contains__):
        assert {p: e for p, e in graded.items() if decided(p)} == {p: e for p, e in fix.items() if decided(p)}


def test_the_solution_keeps_modes_and_knows_what_is_gone() -> None:
    patch = solution(BASE, FIX)
    assert patch.written["run.sh"].mode == 0o755
    assert patch.removed == ("old.py",)
    assert not any(map(is_test_file, patch.written))


def test_the_exam_deletes_settings_that_the_fix_does_not_have() -> None:
    patch = exam(BASE, FIX)
    assert list(patch.written) == ["pyproject.toml", "tests/test_thing.py"]
    assert set(patch.removed) == {"tests/test_gone.py", *CONFIG_FILES} - {"pyproject.toml"}


def test_a_tree_is_laid_down_as_it_is(tmp_path: Path) -> None:
    tree = {"a/b/run": Entry(0o755, b"x"), "a/link": Entry(link="b/run"), "empty": Entry(folder=True)}
    check_tree(tree, "t")
    write_tree(tree, tmp_path)
    assert (tmp_path / "a/link").read_bytes() == b"x"
    assert os.stat(tmp_path / "a/b/run").st_mode & 0o7777 == 0o755
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize("way", [Entry(link="/etc"), Entry(data=b"")])
def test_no_path_leads_through_a_file_or_a_link(way: Entry) -> None:
    with pytest.raises(InvalidRequest, match="'a' is a file or a link"):
        check_tree({"a": way, "a/passwd": Entry()}, "t")
