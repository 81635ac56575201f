from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import residue
import shoal
from shoal.sandbox.cgroup import Cgroups, Hierarchies, Limits, find_hierarchies
from shoal.sandbox.plan import Plan
from shoal.sdk import embedded
from shoal.types import Profile

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
    assert found == Hierarchies(
        {"memory": Path("/sys/fs/cgroup/memory"), "cpu": Path("/sys/fs/cgroup/cpu")}, None, NO_V2
    )


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


def test_what_cannot_be_enforced_is_said() -> None:
    groups = Cgroups(Hierarchies({}, None, NO_V2), "shoal-test")
    assert groups.unenforced == ("memory", "cpu", "processes")
    assert groups.directories == ()
    plan = Plan()
    groups.create(plan, {}, groups.new(), 0)
    groups.limit(plan, {}, groups.new(), Limits(Profile(), 0))
    assert not plan.steps


def test_names_are_never_used_twice() -> None:
    groups = Cgroups(Hierarchies({}, None, NO_V2), "shoal-test")
    assert len({groups.new().name for _ in range(100)}) == 100


# On this machine


def hierarchies() -> Hierarchies:
    return find_hierarchies(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())


@pytest.mark.root
def test_a_directory_that_is_there_belongs_to_somebody_else() -> None:
    name = f"shoal-{os.getpid()}-test"
    first, second = Cgroups(hierarchies(), name), Cgroups(hierarchies(), name)
    assert second.directories == ()
    second.close()
    assert all(Path(path).exists() for path in first.directories)
    first.close()
    assert not any(Path(path).exists() for path in first.directories)


def own_group(box: shoal.Sandbox, controller: str) -> Path:
    """The cgroup of the sandbox's commands on the hierarchy that carries a controller."""
    sleeping = box.commands.run(["sleep", "61.25"], background=True)
    (pid,) = (process.pid for process in residue.processes() if cmdline(process.pid) == ["sleep", "61.25"])
    found = find_hierarchies(Path("/proc/self/mountinfo").read_text(), Path(f"/proc/{pid}/cgroup").read_text())
    sleeping.kill()
    sleeping.wait()
    return found.v1.get(controller, found.unified or Path())


def cmdline(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]
    except (FileNotFoundError, ProcessLookupError):
        return []


@pytest.fixture
def limited() -> Iterator[shoal.Sandbox]:
    profile = shoal.Profile(cpu=0.5, memory=64 << 20, disk=16 << 20, inodes=1024, processes=7)
    with shoal.Sandbox.create(profile=profile) as box:
        if box.info().unenforced:
            pytest.skip(f"not enforced here: {', '.join(box.info().unenforced)}; see `shoal doctor`")
        yield box


def read(folder: Path, *names: str) -> str:
    """The first of these files, by its name in version 1 or 2."""
    return next((folder / name).read_text().strip() for name in names if (folder / name).exists())


@pytest.mark.root
def test_limits_are_where_the_kernel_looks(limited: shoal.Sandbox) -> None:
    """Files in memory count as memory: what they may take, with a page for each inode, comes on top."""
    memory = own_group(limited, "memory")
    assert read(memory, "memory.limit_in_bytes", "../memory.max") == str((64 << 20) + (16 << 20) + (1024 << 10))
    assert read(own_group(limited, "pids"), "pids.max", "../pids.max") == "7"
    cpu = own_group(limited, "cpu")
    assert read(cpu, "cpu.cfs_quota_us", "../../cpu.max").split()[0] == "50000"


@pytest.mark.root
def test_swap_is_no_way_around_the_limit_of_memory(limited: shoal.Sandbox) -> None:
    memory = own_group(limited, "memory")
    swap = read(memory, "memory.memsw.limit_in_bytes", "../memory.swap.max")
    assert swap in (read(memory, "memory.limit_in_bytes", "../memory.max"), "0")


@pytest.mark.root
def test_init_is_under_no_limit_that_kills_or_refuses(limited: shoal.Sandbox) -> None:
    """Neither of memory nor of processes, so no OOM kill can hit it and it can always start one more command."""
    live = embedded.engine().node._find(limited.id).box
    init = Path(f"/proc/self/fdinfo/{live._pidfd}").read_text().partition("Pid:")[2].split()[0]  # type: ignore[attr-defined]
    membership = Path(f"/proc/{init}/cgroup").read_text()
    found = find_hierarchies(Path("/proc/self/mountinfo").read_text(), membership)
    for controller in ("memory", "pids"):
        assert own_group(limited, controller) != found.v1.get(controller, found.unified)


@pytest.mark.root
@pytest.mark.parametrize("runs", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_t11_orphans_are_gone_from_the_count(runs: int) -> None:
    with shoal.Sandbox.create(profile=shoal.Profile(disk=16 << 20, processes=40)) as box:
        group = own_group(box, "pids")
        before = read(group, "pids.current", "../pids.current")
        for _ in range(runs):
            assert box.commands.run("(sleep 0.05 &) ; true").exit_code == 0
        assert not residue.settled(lambda: read(group, "pids.current", "../pids.current") != before)


@pytest.mark.root
def test_inside_only_the_commands_own_groups_can_be_written(limited: shoal.Sandbox) -> None:
    """Init makes a group for each command, as root inside; everything above is the host's."""
    for controller in ("memory", "cpu", "pids"):
        folder = own_group(limited, controller)
        if not (folder / "memory.limit_in_bytes").exists() and not (folder / "cpu.cfs_quota_us").exists():
            continue
        assert all(path.stat().st_uid == 0 for path in (folder, *folder.iterdir()))


def inhabited(folders: list[Path]) -> list[Path]:
    """Those with a process, or with a directory below them."""
    return [folder for folder in folders if folder.exists() and (folder / "cgroup.procs").read_text()]


@pytest.mark.root
def test_of_a_dead_sandbox_the_unified_group_is_removed_and_the_others_are_empty(limited: shoal.Sandbox) -> None:
    groups = [own_group(limited, controller) for controller in ("memory", "cpu", "pids", "unified")]
    # A command's own group goes when it was killed, at the latest with the next command: the one above it stays.
    folders = [group.parent if group.parent.name == "cmd" else group for group in groups]
    unified = [folder for folder in folders if (folder / "cgroup.kill").exists()]
    assert unified
    assert all(folder.exists() for folder in folders)
    limited.kill()
    assert not residue.settled(lambda: [folder for folder in unified if folder.exists()])
    assert not residue.settled(lambda: inhabited(folders))


@pytest.mark.root
def test_a_used_group_takes_the_limits_of_the_next_sandbox() -> None:
    """Whatever order small and large ones come in; a limit must not be below what the last one had with swap."""
    seen = set()
    for memory in (64 << 20, 1 << 30, 96 << 20) * 4:
        profile = shoal.Profile(memory=memory, disk=16 << 20, inodes=1024, processes=9 + (memory >> 26))
        with shoal.Sandbox.create(profile=profile) as box:
            if box.info().unenforced:
                pytest.skip(f"not enforced here: {', '.join(box.info().unenforced)}; see `shoal doctor`")
            group = own_group(box, "memory")
            assert read(group, "memory.limit_in_bytes", "../memory.max") == str(memory + (16 << 20) + (1024 << 10))
            assert read(own_group(box, "pids"), "pids.max", "../pids.max") == str(9 + (memory >> 26))
            seen.add(group)
    assert seen


@pytest.mark.root
def test_a_group_that_still_pays_for_much_is_not_used_again(limited: shoal.Sandbox) -> None:
    """What a sandbox was the first to read of a layer stays charged to it; the next one must not begin with that."""
    group = own_group(limited, "memory")
    if not (group / "memory.usage_in_bytes").exists():
        pytest.skip("no version-1 memory controller; groups of version 2 are never used again")
    limited.files.write("/workspace/held", b"x" * (4 << 20))
    held = os.open(f"/proc/self/fd/{embedded.engine().node.upper(limited.id)}/up0/workspace/held", os.O_RDONLY)
    try:
        limited.kill()
        assert not residue.settled(lambda: [group] if group.exists() else [])
    finally:
        os.close(held)


@pytest.mark.root
def test_inside_a_group_does_not_tell_of_the_host(limited: shoal.Sandbox) -> None:
    """Neither which node made it nor the how manieth it is."""
    shown = limited.commands.run("cat /proc/self/cgroup /proc/1/cgroup").stdout
    assert "shoal" not in shown
    assert str(os.getpid()) not in shown
