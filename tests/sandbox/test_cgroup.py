from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import residue

from shoal.sandbox.cgroup import Cgroups, Group, Hierarchies, find_hierarchies
from shoal.sandbox.janitor import Janitor
from shoal.types import MiB, Profile

NO_V2: frozenset[str] = frozenset()

HYBRID = """
35 24 0:30 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
36 35 0:31 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct
37 35 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
38 35 0:33 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
39 35 0:34 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
40 35 0:35 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
""".strip()
HYBRID_MEMBERSHIP = "9:name=systemd:/x\n4:pids:/\n3:memory:/jobs/a:b\n2:cpu,cpuacct:/\n0::/user.slice"


def test_hybrid() -> None:
    found = find_hierarchies(HYBRID, HYBRID_MEMBERSHIP)
    assert found == Hierarchies(
        {
            "memory": Path("/sys/fs/cgroup/memory/jobs/a:b"),
            "cpu": Path("/sys/fs/cgroup/cpu"),
            "pids": Path("/sys/fs/cgroup/pids"),
        },
        Path("/sys/fs/cgroup/unified/user.slice"),
        NO_V2,
    )


def test_version_1_alone() -> None:
    mounts = HYBRID.rpartition("\n")[0]
    found = find_hierarchies(mounts, "3:memory:/\n2:cpu,cpuacct:/\n")
    assert found == Hierarchies({"memory": Path("/sys/fs/cgroup/memory"), "cpu": Path("/sys/fs/cgroup/cpu")}, None, NO_V2)


def test_version_2_alone(tmp_path: Path) -> None:
    own = tmp_path / "system.slice" / "node.service"
    own.mkdir(parents=True)
    (own / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    found = find_hierarchies(f"30 24 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw", "0::/system.slice/node.service\n")
    assert found == Hierarchies({}, own, frozenset({"cpuset", "cpu", "io", "memory", "pids"}))


def test_in_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    """A private cgroup namespace: membership "/", and the mount's root is "/" too."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    found = find_hierarchies(f"30 24 0:26 / {tmp_path} ro,nosuid - cgroup2 cgroup rw", "0::/\n")
    assert found == Hierarchies({}, tmp_path, frozenset({"cpu", "memory", "pids"}))


def test_in_a_container_whose_mount_begins_at_its_own_group() -> None:
    """Docker on version 1: the mount shows the container's group, the membership is as the host names it."""
    mounts = "50 49 0:40 /docker/abc /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory"
    found = find_hierarchies(mounts, "5:memory:/docker/abc\n")
    assert found.v1 == {"memory": Path("/sys/fs/cgroup/memory")}
    assert find_hierarchies(mounts, "5:memory:/docker/abc/job\n").v1 == {"memory": Path("/sys/fs/cgroup/memory/job")}


def test_a_group_outside_of_what_is_mounted_is_not_guessed_at() -> None:
    mounts = "50 49 0:40 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory"
    assert find_hierarchies(mounts, "5:memory:/docker/other\n").v1 == {"memory": Path("/sys/fs/cgroup/memory")}


def test_a_mount_point_with_blanks() -> None:
    mounts = r"50 49 0:40 / /my\040groups/memory rw - cgroup cgroup rw,memory"
    assert find_hierarchies(mounts, "5:memory:/\n").v1 == {"memory": Path("/my groups/memory")}


def test_no_cgroups_at_all() -> None:
    assert find_hierarchies("21 1 254:0 / / rw - ext4 /dev/vda rw", "") == Hierarchies({}, None, NO_V2)


def test_what_cannot_be_enforced_is_said(tmp_path: Path) -> None:
    groups = Cgroups(Hierarchies({}, None, NO_V2), "shoal-test")
    assert groups.unenforced == ("memory", "cpu", "processes")
    assert groups.directories == ()
    group = groups.create()
    groups.limit(group, Profile(), 0, 0)
    assert groups.remove(group)


# On this machine


def own_hierarchies() -> Hierarchies:
    return find_hierarchies(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())


@pytest.fixture
def groups() -> Iterator[Cgroups]:
    made = Cgroups(own_hierarchies(), f"shoal-{os.getpid()}-test")
    if made.unenforced:
        made.close()
        pytest.skip(f"this machine has no cgroups for {', '.join(made.unenforced)}; see `shoal doctor`")
    yield made
    made.close()
    assert not residue.settled(lambda: [path for path in residue.cgroups(os.getpid()) if path.name.endswith("-test")])


def read(groups: Cgroups, controller: str, group: Group, *names: str) -> str:
    """The first of these files, by its name in version 1 or 2."""
    roots = groups.roots()
    root = roots.get(controller, roots.get("unified"))
    assert root is not None
    return next((root / group.name / name).read_text().strip() for name in names if (root / group.name / name).exists())


@pytest.mark.root
def test_limits_are_where_the_kernel_looks(groups: Cgroups) -> None:
    group = groups.create()
    groups.limit(group, Profile(cpu=0.5, memory=64 * MiB, processes=7), 16 * MiB, 1000)
    assert read(groups, "memory", group, "cmd/memory.limit_in_bytes", "cmd/memory.max") == str(80 * MiB)
    assert read(groups, "pids", group, "cmd/pids.max") == "7"
    assert read(groups, "cpu", group, "cpu.cfs_quota_us", "cpu.max").split()[0] == "50000"
    assert groups.remove(group)


@pytest.mark.root
def test_only_the_owner_may_make_groups_for_commands_and_only_below_cmd(groups: Cgroups) -> None:
    if "unified" not in groups.roots():
        pytest.skip("no unified hierarchy here")
    group = groups.create()
    groups.limit(group, Profile(), 0, 4242)
    root = groups.roots()["unified"] / group.name
    owned = {path.relative_to(root) for path in (root, *root.rglob("*")) if path.stat().st_uid == 4242}
    assert owned == {Path("cgroup.procs"), Path("cmd"), Path("cmd/cgroup.procs")}
    assert (root / "cmd" / "cgroup.max.descendants").read_text() == "2048\n"


@contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.root
def test_a_group_in_use_stays(groups: Cgroups) -> None:
    group = groups.create()
    with sleeper() as process:
        for controller, path in groups.command_joins(group):
            (groups.roots()[controller] / path).write_text(str(process.pid))
        assert not groups.remove(group)
    assert residue.settled(lambda: not groups.remove(group)) is False


@pytest.mark.root
def test_the_janitor_removes_a_group_as_soon_as_it_can(groups: Cgroups) -> None:
    group, janitor = groups.create(), Janitor(groups)
    janitor.start()
    with sleeper() as process:
        for controller, path in groups.command_joins(group):
            (groups.roots()[controller] / path).write_text(str(process.pid))
        janitor.remove_group(group)
        time.sleep(0.3)
        assert exists(groups, group)
    assert not residue.settled(lambda: exists(groups, group))
    janitor.close()


def exists(groups: Cgroups, group: Group) -> bool:
    return any((root / group.name).exists() for root in groups.roots().values())


@pytest.mark.root
def test_killing_takes_everything_in_it(groups: Cgroups) -> None:
    if "unified" not in groups.roots():
        pytest.skip("no unified hierarchy here")
    group = groups.create()
    with sleeper() as process:
        (groups.roots()["unified"] / group.name / "cmd" / "cgroup.procs").write_text(str(process.pid))
        groups.kill(group)
        assert process.wait(5) == -9
    assert groups.remove(group)


@pytest.mark.root
def test_names_are_never_used_twice(groups: Cgroups) -> None:
    made = [groups.create() for _ in range(3)]
    for group in made:
        groups.remove(group)
    assert groups.create() not in made


@pytest.mark.root
def test_nothing_is_left_when_the_name_is_taken_by_another(groups: Cgroups) -> None:
    """Two nodes cannot have one directory: what exists already belongs to somebody else and is not touched."""
    other = Cgroups(own_hierarchies(), f"shoal-{os.getpid()}-test")
    assert other.directories == ()
    other.close()
    assert all(Path(path).exists() for path in groups.directories)
