from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.sandbox.cgroup import Hierarchies
from shoal.sandbox.leftovers import claim, sweep

DEAD = 2**22 + 1
"""No pid: above what any kernel gives."""


@pytest.fixture
def hierarchies(tmp_path: Path) -> Hierarchies:
    """Folders in place of cgroups, which likewise can be removed only when nothing is in them."""
    (tmp_path / "memory").mkdir()
    (tmp_path / "unified").mkdir()
    return Hierarchies({"memory": tmp_path / "memory"}, tmp_path / "unified", frozenset())


def left(hierarchies: Hierarchies, name: str) -> list[Path]:
    """A node's directories with a sandbox's in them."""
    parents = [*hierarchies.v1.values(), hierarchies.unified]
    paths = [parent / name for parent in parents if parent is not None]
    for path in paths:
        (path / "b1" / "cmd" / "0").mkdir(parents=True)
    return paths


def exist(paths: list[Path]) -> set[bool]:
    return {path.exists() for path in paths}


def test_names_are_of_this_process_and_differ(tmp_path: Path) -> None:
    (one, first), (two, second) = claim(tmp_path), claim(tmp_path)
    assert one != two
    assert {name.split("-")[1] for name in (one, two)} == {str(os.getpid())}
    first.release()
    second.release()
    assert os.listdir(tmp_path / "nodes") == []


def test_what_a_dead_node_left_is_removed(tmp_path: Path, hierarchies: Hierarchies) -> None:
    paths = left(hierarchies, f"shoal-{DEAD}-0123abcd")
    sweep(hierarchies, tmp_path)
    assert exist(paths) == {False}


def test_a_live_node_is_left_alone(tmp_path: Path, hierarchies: Hierarchies) -> None:
    name, held = claim(tmp_path)
    paths = left(hierarchies, name)
    sweep(hierarchies, tmp_path)
    assert exist(paths) == {True}
    held.release()
    sweep(hierarchies, tmp_path)
    assert exist(paths) == {True}, "its process lives; the lock may lie in another run folder"


def test_a_node_in_another_process_whose_pid_is_not_to_be_seen_here(tmp_path: Path, hierarchies: Hierarchies) -> None:
    """In another pid namespace: what counts is its lock."""
    script = f"""
import sys
from pathlib import Path
from shoal.sandbox.leftovers import Claim
held = Claim(Path({str(tmp_path)!r}) / "nodes" / "shoal-{DEAD}-0123abcd")
print("held", flush=True)
sys.stdin.read()
"""
    (tmp_path / "nodes").mkdir()
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    paths = left(hierarchies, f"shoal-{DEAD}-0123abcd")
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        sweep(hierarchies, tmp_path)
        assert exist(paths) == {True}
        process.kill()
    sweep(hierarchies, tmp_path)
    assert exist(paths) == {False}
    assert os.listdir(tmp_path / "nodes") == []


def test_a_pid_that_another_has_by_now(tmp_path: Path, hierarchies: Hierarchies) -> None:
    """The lock is there and nobody holds it: the node is dead, whoever has its pid."""
    name = f"shoal-{os.getpid()}-0123abcd"
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / name).touch()
    paths = left(hierarchies, name)
    sweep(hierarchies, tmp_path)
    assert exist(paths) == {False}


OTHERS = ["other", "shoal-doctor-12", f"shoal-{DEAD}", f"shoal-{DEAD}-xyz", f"shoal-{DEAD}-0123abcd-more"]


@pytest.mark.parametrize("name", OTHERS)
def test_what_others_made_is_not_touched(tmp_path: Path, hierarchies: Hierarchies, name: str) -> None:
    paths = left(hierarchies, name)
    sweep(hierarchies, tmp_path)
    assert exist(paths) == {True}


def test_what_is_in_use_stays(tmp_path: Path, hierarchies: Hierarchies) -> None:
    paths = left(hierarchies, f"shoal-{DEAD}-0123abcd")
    (paths[0] / "b1" / "cmd" / "process").touch()
    sweep(hierarchies, tmp_path)
    assert paths[0].exists()
    assert not paths[1].exists()


def test_links_lead_nowhere(tmp_path: Path, hierarchies: Hierarchies) -> None:
    precious = tmp_path / "precious" / "below"
    precious.mkdir(parents=True)
    (path, _) = left(hierarchies, f"shoal-{DEAD}-0123abcd")
    (path / "b1" / "link").symlink_to(precious.parent)
    sweep(hierarchies, tmp_path)
    assert precious.exists()
