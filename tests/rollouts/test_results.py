"""The file of results: whole after any end."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import InvalidRequest
from shoal.rollouts.results import RESULTS, ResultsFile, Rollout, write_atomically


def rollout(group: int, reward: float | None = 1.0) -> Rollout:
    return Rollout(task="t", agent="a", group=group, reward=reward)


def written(folder: Path, *rollouts: Rollout) -> None:
    with ResultsFile(folder, resume=True) as file:
        for each in rollouts:
            file.append(each)


def test_what_was_written_is_read_and_the_last_line_for_each_counts(tmp_path: Path) -> None:
    written(tmp_path / "new/folder", rollout(0, None), rollout(1), rollout(0))
    with ResultsFile(tmp_path / "new/folder", resume=True) as file:
        assert file.read() == {("a", "t", 0): rollout(0), ("a", "t", 1): rollout(1)}


@pytest.mark.parametrize("torn", [b"{", b'{"task": "t", "agent": "a"', b"\xff\xfe"])
def test_a_line_cut_short_is_taken_away(tmp_path: Path, torn: bytes) -> None:
    written(tmp_path, rollout(0))
    whole = (tmp_path / RESULTS).read_bytes()
    (tmp_path / RESULTS).write_bytes(whole + torn)
    with ResultsFile(tmp_path, resume=True) as file:
        assert list(file.read()) == [("a", "t", 0)]
        file.append(rollout(1))
    assert (tmp_path / RESULTS).read_bytes().startswith(whole)
    with ResultsFile(tmp_path, resume=True) as file:
        assert len(file.read()) == 2


def test_only_a_torn_line_is_as_good_as_nothing(tmp_path: Path) -> None:
    (tmp_path / RESULTS).write_bytes(b'{"task"')
    with ResultsFile(tmp_path, resume=True) as file:
        assert file.read() == {}
    assert (tmp_path / RESULTS).read_bytes() == b""


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / RESULTS).write_bytes(b'{"colour": "blue"}\n')
    with (
        ResultsFile(tmp_path, resume=True) as file,
        pytest.raises(InvalidRequest, match=r"out: .*results\.jsonl"),
    ):
        file.read()
    assert (tmp_path / RESULTS).read_bytes() == b'{"colour": "blue"}\n'


def test_results_are_never_mixed_by_accident(tmp_path: Path) -> None:
    written(tmp_path, rollout(0))
    with (
        pytest.raises(InvalidRequest, match="has results already; resume"),
        ResultsFile(tmp_path, resume=False),
    ):
        pass
    with (
        ResultsFile(tmp_path, resume=True),
        pytest.raises(InvalidRequest, match="another run"),
        ResultsFile(tmp_path, resume=True),
    ):
        pass


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    for text in (b"old", b"new"):
        write_atomically(tmp_path / "report.json", text)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"new"]
