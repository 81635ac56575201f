"""Repositories as workspaces: the commit and its past, and nothing of what came after."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import shoal
from shoal.errors import InvalidRequest, NotFound
from shoal.image.workspace import GitSpec
from shoal.sdk.embedded import call, engine
from shoal.types import Layer

Git = Callable[..., str]
IDENTITY = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}


@pytest.fixture
def git(tmp_path: Path) -> Git:
    """Runs git in a repository with four commits, tags, a branch and a dangling object."""
    folder = tmp_path / "source"
    folder.mkdir()

    def run(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        env = {**os.environ, **IDENTITY, "GIT_CONFIG_GLOBAL": "/dev/null"}
        return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout.strip()

    run("init", "-q", "-b", "main")
    for number in range(4):
        (folder / "file").write_text(f"state {number}")
        run("add", ".")
        run("commit", "-qm", f"change {number}")
        run("tag", f"v{number}")
    run("branch", "answer")
    (folder / "file").write_text("the secret answer")
    run("commit", "-qam", "dangling")
    run("reset", "-q", "--hard", "v3")
    return run


def build(tmp_path: Path, commit: str, target: str = "/workspace") -> Layer:
    return call(engine().builds.repository(GitSpec(str(tmp_path / "source"), commit, target)))


def test_the_future_is_not_reachable(git: Git, tmp_path: Path) -> None:
    later = [git("rev-parse", name) for name in ("v2", "v3", "v3:file", "ORIG_HEAD")]
    layer = build(tmp_path, git("rev-parse", "v1"))
    with shoal.Sandbox.create(layers=[layer.digest]) as box:
        assert box.commands.run("git log --all --format=%s").stdout.split("\n")[:2] == ["change 1", "change 0"]
        assert box.files.read("/workspace/file") == "state 1"
        assert not box.commands.run("git status --porcelain; git tag; git remote; git reflog; git stash list").stdout
        for object in later:
            assert not box.commands.run(["git", "cat-file", "-e", object]).ok
        everything = box.commands.run("git cat-file --batch-all-objects --batch-check | wc -l").stdout
        assert int(everything) == 6
        assert box.commands.run("git commit -q --allow-empty -m x", env=IDENTITY).ok
        assert str(tmp_path) not in box.commands.run("grep -r . .git/config .git/info || true").stdout


def test_names_are_looked_up_and_the_layer_is_found_again(git: Git, tmp_path: Path) -> None:
    layer = build(tmp_path, git("rev-parse", "v2"))
    assert build(tmp_path, "v2") == layer
    assert build(tmp_path, "main") != layer
    git("branch", "-f", "answer", "v2")
    assert build(tmp_path, "answer") == layer


def test_another_place(git: Git, tmp_path: Path) -> None:
    layer = build(tmp_path, git("rev-parse", "v0"), "/srv/code")
    with shoal.Sandbox.create(layers=[layer.digest]) as box:
        assert box.files.read("/srv/code/file") == "state 0"
        assert box.files.stat("/srv").mode == 0o755


@pytest.mark.parametrize("commit", ["0" * 40, "nothing"])
def test_a_commit_that_is_not_there(git: Git, tmp_path: Path, commit: str) -> None:
    with pytest.raises(NotFound, match="has no"):
        build(tmp_path, commit)


@pytest.mark.parametrize(
    ("source", "commit", "field"),
    [("git@host:x", "main", "source"), ("ssh://host/x", "main", "source"), (".", "--upload-pack=x", "commit"),
     (".", "a..b", "commit")],
)  # fmt: skip
def test_what_is_refused(source: str, commit: str, field: str) -> None:
    with pytest.raises((InvalidRequest, NotFound)) as caught:
        call(engine().builds.repository(GitSpec(source, commit)))
    assert field in str(caught.value) or "no folder" in str(caught.value)
