"""Where on a unified hierarchy a node takes its place: with folders in place of groups, and on this machine's tree."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import residue
from shoal.node import facts
from shoal.sandbox.cgroup import Cgroups, Hierarchies
from shoal.sandbox.delegation import take_place

ALL = frozenset({"cpu", "memory", "pids"})


def made(
    path: Path,
    kind: str | None = "domain",
    members: str = "",
    controllers: str = "cpuset cpu memory pids",
    *,
    delegated: bool = False,
) -> Path:
    """A folder in place of a group. `kind` None: the real root, which has no type."""
    path.mkdir()
    (path / "cgroup.procs").write_text(members)
    (path / "cgroup.subtree_control").write_text("")
    (path / "cgroup.controllers").write_text(f"{controllers}\n")
    if kind is not None:
        (path / "cgroup.type").write_text(f"{kind}\n")
    if delegated:
        os.setxattr(path, "user.delegate", b"1")
    return path


def test_without_controllers_nothing_is_moved(tmp_path: Path) -> None:
    """Hybrid: kill and freeze need none."""
    own = made(tmp_path / "root", members="1\n", controllers="hugetlb")
    found = Hierarchies({}, own, frozenset())
    assert take_place(found) == found
    assert not (own / "node").exists()


def test_the_real_root_may_have_processes(tmp_path: Path) -> None:
    root = made(tmp_path / "root", kind=None, members="1\n2\n")
    found = take_place(Hierarchies({}, root, ALL))
    assert (found.unified, found.home) == (root, root)
    assert {"cpu", "memory", "pids"} <= found.v2_controllers
    assert not (root / "node").exists()


def test_in_a_group_that_is_not_ours_the_root_is_taken(tmp_path: Path) -> None:
    """A login session's: systemd owns it."""
    root = made(tmp_path / "root", kind=None)
    own = made(root / "session.scope", members="7\n")
    found = take_place(Hierarchies({}, own, ALL))
    assert (found.unified, found.home) == (root, own)
    assert not (own / "node").exists()


def test_a_delegated_group_above_is_taken(tmp_path: Path) -> None:
    """A second node of one service, or systemd's DelegateSubgroup=."""
    service = made(made(tmp_path / "root", kind=None) / "x.service", delegated=True)
    own = made(service / "node", members="7\n", controllers="")
    found = take_place(Hierarchies({}, own, frozenset()))
    assert (found.unified, found.home) == (service, own)
    assert found.v2_controllers >= ALL


def test_a_threaded_group_is_no_place(tmp_path: Path) -> None:
    own = made(tmp_path / "container", kind="domain threaded", members="7\n")
    assert take_place(Hierarchies({}, own, ALL)) == Hierarchies({}, own, frozenset())


def test_what_has_its_own_version_1_hierarchy_is_left_there(tmp_path: Path) -> None:
    root = made(tmp_path / "root", kind=None)
    found = take_place(Hierarchies({"memory": tmp_path}, root, frozenset({"cpu"})))
    assert "memory" not in found.v2_controllers


# On this machine, where it has nothing but version 2

real = pytest.mark.skipif(facts.cgroup_mode() != "v2", reason="cgroup version 1 is in use here, see `shoal doctor`")
TOP = Path("/sys/fs/cgroup")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.send_signal(signal.SIGKILL)


@pytest.fixture
def service() -> Iterator[Path]:
    """A group as systemd makes one; removed with its leaf."""
    path = TOP / f"delegation-{os.getpid()}"
    path.mkdir()
    yield path
    for folder in (path / "node", path):
        with suppress(FileNotFoundError):
            assert not residue.settled(lambda folder=folder: (folder / "cgroup.procs").read_text())
            folder.rmdir()


@real
@pytest.mark.root
def test_the_processes_of_a_delegated_group_go_to_a_leaf(service: Path, sleeper: subprocess.Popen[bytes]) -> None:
    os.setxattr(service, "trusted.delegate", b"1")
    (service / "cgroup.procs").write_text(str(sleeper.pid))
    found = take_place(Hierarchies({}, service, ALL))
    assert (found.unified, found.home) == (service, service / "node")
    assert (service / "node" / "cgroup.procs").read_text() == f"{sleeper.pid}\n"
    groups = Cgroups(found, "shoal-1-test")
    assert groups.unenforced == ()
    groups.close()
    assert (service / "cgroup.type").read_text() == "domain\n"
    sleeper.kill()


@real
@pytest.mark.root
def test_a_group_of_somebody_else_keeps_its_processes_and_kind(service: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """To pass on cpu and pids alone would be allowed, and would make it threaded: nothing could be started below it."""
    (service / "cgroup.procs").write_text(str(sleeper.pid))
    found = take_place(Hierarchies({}, service, ALL))
    assert found.unified == TOP
    assert (service / "cgroup.procs").read_text() == f"{sleeper.pid}\n"
    assert (service / "cgroup.subtree_control").read_text().strip() == ""
    assert (service / "cgroup.type").read_text() == "domain\n"
    sleeper.kill()
