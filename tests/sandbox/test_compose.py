"""The plan of a sandbox as text: what is in it, and in what order."""

from __future__ import annotations

from itertools import pairwise

from shoal.sandbox.compose import CAPABILITY_MASK, Accounting, Devices, Mount, Parts, compose
from shoal.sandbox.machine import PROC_FILES
from shoal.sandbox.plan import HOST_NETWORK, KEPT, NONE, Plan
from shoal.sandbox.slots import FIRST, IDS

USERS, BASE, ENVIRONMENT, SYS, CPU, MEMORY, PIDS, UNIFIED = range(KEPT + 20, KEPT + 28)
CHANNEL, NETWORK = 0, 1
"""What is sent along."""

HYBRID = Accounting(
    init_group=(UNIFIED, "b0"),
    init_joins=((CPU, "b0/tasks"),),
    command_joins=((MEMORY, "b0/tasks"), (PIDS, "b0/tasks")),
    leaves=((MEMORY, "tasks"), (PIDS, "tasks")),
    commands_group=(UNIFIED, "b0/cmd"),
    oom_events=(MEMORY, "b0/memory.oom_control"),
    process_events=(PIDS, "b0/pids.events"),
)
PARTS = Parts(
    hostname="sandbox",
    owner=FIRST,
    users=USERS,
    mounts=(Mount("/", (BASE,)), Mount("/opt/env", (ENVIRONMENT,))),
    writable=1 << 30,
    inodes=1000,
    open_files=4096,
    processes=0,
    device=None,
    sys=SYS,
    devices=Devices(),
    accounting=HYBRID,
    seccomp=b"\0" * 8,
)
ORDINARY = Parts(
    hostname="sandbox",
    owner=0,
    users=NONE,
    mounts=(Mount("/", (BASE,)),),
    writable=1 << 20,
    inodes=100,
    open_files=64,
    processes=32,
    device=None,
    sys=SYS,
    devices=Devices((("null", KEPT + 40), ("tty", KEPT + 41))),
    accounting=Accounting(),
    seccomp=b"",
)


def composed(parts: Parts) -> Plan:
    plan = Plan()
    compose(plan, parts)
    return plan


def before(plan: Plan, *steps: str) -> bool:
    """Whether the last of each stands before the first of the next."""
    order = names(plan)
    last = {name: index for index, name in enumerate(order)}
    return all(last[first] < order.index(second) for first, second in pairwise(steps))


def names(plan: Plan) -> list[str]:
    return [name for name, _ in plan.steps]


def arguments(plan: Plan, name: str) -> list[tuple[object, ...]]:
    return [arguments for step, arguments in plan.steps if step == name]


def test_what_is_made_outside_comes_first_and_what_locks_comes_last() -> None:
    assert before(composed(PARTS), "overlay", "clone", "identity", "pivot", "hostname", "capabilities", "seccomp")


def test_directories_are_made_before_the_upper_is_mapped() -> None:
    """Host root is nobody whom the mapped mount could make a file for."""
    assert before(composed(PARTS), "mkdir", "idmap", "overlay")


def test_the_upper_is_bounded_in_bytes_and_inodes() -> None:
    first = arguments(composed(PARTS), "mount")[0]
    assert first[1:] == ("tmpfs", 6, (f"size={1 << 30}", "nr_inodes=1000", "mode=755"))


def test_overlays_are_made_for_the_slot_with_user_attributes() -> None:
    root, environment = arguments(composed(PARTS), "overlay")
    assert root[4:] == (FIRST, ("userxattr",), (BASE,))
    assert environment[4:] == (FIRST, ("userxattr",), (ENVIRONMENT,))


def test_the_namespaces_of_the_sandbox() -> None:
    (clone,) = arguments(composed(PARTS), "clone")
    mapping = f"0 {FIRST} {IDS}"
    assert clone[1:7] == (FIRST, mapping, mapping, NETWORK, HOST_NETWORK, CHANNEL)
    assert isinstance(clone[0], int)
    assert clone[0] == 0x20000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000


def test_the_cgroup_namespace_is_made_in_all_groups_and_those_with_limits_are_left_again() -> None:
    plan = composed(PARTS)
    order = names(plan)
    unshared = order.index("unshare")
    visited = len(HYBRID.init_joins) + len(HYBRID.command_joins)
    assert arguments(plan, "unshare") == [(0x2000000,)]
    assert order[:unshared].count("join") == visited
    assert order[unshared + 1 : unshared + 1 + len(HYBRID.leaves)] == ["join"] * len(HYBRID.leaves)
    assert len(HYBRID.leaves) == len(HYBRID.command_joins) > 0
    left = [opened for opened in arguments(plan, "open") if opened[2] == "tasks"]
    assert [register for (register,) in arguments(plan, "join")[visited:]] == [opened[0] for opened in left]


def test_mounts_below_the_root_come_after_it_and_proc_after_them() -> None:
    targets = [target for *_, target in arguments(composed(PARTS), "attach")]
    assert targets == ["new", "opt/env", "proc", "sys", "dev/pts", "dev/mqueue", "dev/shm"]


def test_files_of_proc_are_covered_before_anybody_could_look() -> None:
    plan = composed(PARTS)
    assert arguments(plan, "bind") == [(4, "sys/kernel/limits", "proc", PROC_FILES)]
    assert before(plan, "attach", "pivot")
    order = names(plan)
    assert order.index("clone") < order.index("bind") < order.index("pivot")


def test_user_namespaces_are_forbidden_while_init_may_still_write_that() -> None:
    assert (NONE, "/proc/sys/user/max_user_namespaces", "0") in arguments(composed(PARTS), "write")
    assert before(composed(PARTS), "pivot", "write", "capabilities")


def test_the_filter_is_last() -> None:
    assert composed(PARTS).steps[-1] == ("seccomp", (1, PARTS.seccomp))


def test_commands_keep_neither_admin_nor_resource_nor_ptrace_nor_net() -> None:
    assert arguments(composed(PARTS), "capabilities") == [(CAPABILITY_MASK,)]
    for refused in (12, 13, 16, 17, 19, 21, 23, 24, 25, 27, 34, 37, 38, 39, 40):
        assert not CAPABILITY_MASK >> refused & 1, refused


def test_without_root_there_is_one_id_and_devices_are_bound() -> None:
    plan = composed(ORDINARY)
    (clone,) = arguments(plan, "clone")
    assert clone[2:4] == ("0 0 1", "0 0 1")
    assert "idmap" not in names(plan)
    targets = [target for *_, target in arguments(plan, "attach")]
    assert targets == ["new", "proc", "sys", "dev/null", "dev/tty", "dev/pts", "dev/mqueue", "dev/shm"]


def test_without_cgroups_nothing_is_joined() -> None:
    plan = composed(ORDINARY)
    assert "join" not in names(plan)
    ((commands, events, refusals, *_, joins),) = arguments(plan, "commands")
    assert (commands, events, refusals, joins) == (NONE, NONE, NONE, [])
    (clone,) = arguments(plan, "clone")
    assert clone[-1] == NONE
