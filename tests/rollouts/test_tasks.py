"""Manifests: the ones that come with Shoal, and bad lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.errors import InvalidRequest, Unsupported
from shoal.rollouts.tasks import load_tasks, parse_manifest, select_tasks

from .stand_in import make_task


@pytest.fixture
def facts(tmp_path: Path) -> dict[str, Any]:
    return msgspec.to_builtins(make_task(tmp_path))


def test_the_packaged_manifests_are_whole() -> None:
    tasks, hanging = load_tasks("pypi"), load_tasks("pypi-hanging")
    assert (len(tasks), len(hanging)) == (72, 2)
    assert all(task.fail_to_pass and task.pass_to_pass and not task.must_pass for task in tasks)
    assert all(task.must_pass and task.test_limit == 40 for task in hanging)


def test_limit_takes_the_shortest_recorded_tests_first() -> None:
    tasks = load_tasks("pypi")
    chosen = select_tasks(tasks, limit=8)
    assert len(chosen) == 8
    assert [task.shortest for task in chosen] == sorted(task.shortest for task in tasks)[:8]


def test_time_limit_is_ten_times_what_was_measured_and_a_minute_at_least(facts: dict[str, Any]) -> None:
    quick, slow = ({**facts, "id": str(i), "measured": {"test_fix_s": [0.5, s]}} for i, s in enumerate((2, 20)))
    lines = "\n".join(map(json.dumps, (quick, slow))).encode()
    assert [task.test_limit for task in parse_manifest(lines, "m")] == [60, 200]


def test_selection_is_by_pattern() -> None:
    chosen = select_tasks(load_tasks("pypi"), ["flask__3.1.1__3.1.2", "validators*"])
    assert [task.package for task in chosen] == ["flask", "validators", "validators", "validators"]
    with pytest.raises(InvalidRequest, match=r"task: .*'nothing'.*more-itertools"):
        select_tasks(load_tasks("pypi"), ["nothing"])
    with pytest.raises(InvalidRequest, match="limit"):
        select_tasks(load_tasks("pypi"), limit=0)


def test_a_file_is_read_and_its_unknown_fields_ignored(facts: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("\n" + json.dumps({**facts, "colour": "blue"}) + "\n\n")
    assert [task.id for task in load_tasks(str(file))] == ["thing__1.0__1.1"]
    assert load_tasks(file) == load_tasks(str(file))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"id": 3}, "$.id"),
        ({"id": "../x"}, "$.id"),
        ({"package": "a/b"}, "$.package"),
        ({"base_sdist": {"file": "../x.tar.gz", "sha256": "0" * 64, "bytes": 1}}, "$.base_sdist.file"),
        ({"fix_sdist": {"file": "x.tar.gz", "sha256": "0" * 63, "bytes": 1}}, "$.fix_sdist.sha256"),
        ({"fix_sdist": {"file": "x.tar.gz", "sha256": "0" * 64, "bytes": 0}}, "$.fix_sdist.bytes"),
        ({"import_root": "/usr"}, "$.import_root"),
        ({"import_root": "a/../../b"}, "$.import_root"),
        ({"import_root": 7}, "$.import_root"),
        ({"python": "three"}, "$.python"),
        ({"requirements": ["pytest>=9"]}, "$.requirements[0]"),
        ({"requirements": ["--index-url=x==1"]}, "$.requirements[0]"),
        ({"test_files": []}, "$.test_files"),
        ({"test_files": ["--pdb"]}, "$.test_files[0]"),
        ({"test_files": ["../test.py"]}, "$.test_files[0]"),
        ({"fail_to_pass": []}, "fail_to_pass"),
        ({"base_limit_s": 0}, "$.base_limit_s"),
    ],
)
def test_a_bad_line_is_named_with_its_field(facts: dict[str, Any], change: dict[str, Any], field: str) -> None:
    lines = b"\n".join(json.dumps(each).encode() for each in (facts, {**facts, "id": "two", **change}))
    with pytest.raises(InvalidRequest) as caught:
        parse_manifest(lines, "mine.jsonl")
    assert caught.value.field == "tasks"
    assert "mine.jsonl, line 2: " in str(caught.value)
    assert field in str(caught.value)


@pytest.mark.parametrize("line", [b"{", b"[]", b"\xff", b"null", b'{"id": "x"}'])
def test_what_is_no_task_at_all_is_refused(line: bytes) -> None:
    with pytest.raises(InvalidRequest, match="line 1"):
        parse_manifest(line, "m")


def test_ids_are_unique_and_a_manifest_is_not_empty(facts: dict[str, Any]) -> None:
    line = json.dumps(facts).encode()
    with pytest.raises(InvalidRequest, match=r"id 'thing__.*' was there before"):
        parse_manifest(line + b"\n" + line, "m")
    with pytest.raises(InvalidRequest, match="has no task"):
        parse_manifest(b"\n \n", "m")


def test_what_can_not_be_read_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no file 'pipy'.*pypi"):
        load_tasks("pipy")
    with pytest.raises(Unsupported, match="folder"):
        load_tasks(tmp_path)
