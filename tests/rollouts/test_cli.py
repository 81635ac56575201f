"""The command's options, exit codes and streams. What it runs is tested elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from click.testing import Result as Outcome
from typer.testing import CliRunner

from shoal.cli.rollouts import exit_code, rollouts
from shoal.errors import InvalidRequest
from shoal.rollouts import batch
from shoal.rollouts.report import summarize
from shoal.rollouts.results import Failure, Rollout

from .stand_in import Memory, make_task


@pytest.fixture
def manifest(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two tasks, and a machine that keeps its sandboxes in memory."""
    monkeypatch.setattr(batch, "Machine", lambda scratch: Memory())
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(b"\n".join(msgspec.json.encode(make_task(shelf, name)) for name in ("one", "two")))
    return file


def call(*arguments: Any) -> Outcome:
    app = typer.Typer()
    app.command()(rollouts)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_run_prints_its_summary(manifest: Path) -> None:
    outcome = call("--tasks", manifest, "--agent", "oracle", "--parallel", 2, "--group", 2)
    assert outcome.exit_code == 0
    assert "oracle: mean reward 1.000 over 4 rollouts of 2 tasks" in outcome.stdout
    assert outcome.stderr == ""


def test_json_is_one_document_and_nothing_else(manifest: Path, tmp_path: Path) -> None:
    outcome = call("--tasks", manifest, "--agent", "noop", "--json", "--limit", 1, "--out", tmp_path / "out")
    assert outcome.exit_code == 0
    report = json.loads(outcome.stdout)
    assert (report["reward"], report["tasks"]) == (0.0, 1)
    assert json.loads((tmp_path / "out/report.json").read_text()) == report


def test_one_task_can_be_chosen(manifest: Path) -> None:
    outcome = call("--tasks", manifest, "--agent", "noop", "--json", "--task", "tw*")
    assert json.loads(outcome.stdout)["tasks"] == 1


@pytest.mark.parametrize(
    "arguments",
    [("--agent", "noop"), ("--tasks", "pypi"), ("--tasks", "pypi", "--agent", "noop", "--group", "0"),
     ("--tasks", "pypi", "--agent", "noop", "--limit", "x"),
     ("--tasks", "pypi", "--agent", "noop", "--colour")],
)  # fmt: skip
def test_misuse_exits_with_2(arguments: tuple[str, ...]) -> None:
    assert call(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--tasks", "pipy", "--agent", "noop"), "tasks"),
        (("--tasks", "pypi", "--agent", "nobody"), "agent"),
        (("--tasks", "pypi", "--agent", "noop", "--task", "nothing"), "task"),
        (("--tasks", "pypi", "--agent", "noop", "--resume"), "resume"),
    ],
)
def test_a_wrong_value_is_a_typed_error_with_its_field(shelf: Path, arguments: tuple[str, ...], field: str) -> None:
    error = call(*arguments).exception
    assert isinstance(error, InvalidRequest)
    assert error.field == field


def test_platform_failures_are_told_on_stderr(manifest: Path, shelf: Path) -> None:
    for archive in shelf.iterdir():
        archive.write_bytes(b"not what was promised")
    outcome = call("--tasks", manifest, "--agent", "noop", "--json")
    assert outcome.exit_code == 4
    assert json.loads(outcome.stdout)["reward"] is None
    assert len(outcome.stderr.splitlines()) == 2
    assert outcome.stderr.startswith("one: platform_error: thing-1.")


def failed(code: str) -> Rollout:
    return Rollout(task="t", agent="a", group=0, verdict="platform_error", error=Failure(code, "why"))


@pytest.mark.parametrize(
    ("codes", "wanted"), [([], 0), (["capacity"], 3), (["capacity", "platform_error"], 4), (["not_found"], 4)]
)
def test_exit_codes(codes: list[str], wanted: int) -> None:
    results = [Rollout(task="t", agent="a", group=0, reward=0.0), *map(failed, codes)]
    assert exit_code(summarize("a", results, tasks=1, planned=1, elapsed=0)) == wanted
