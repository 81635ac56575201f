"""The plan of a sandbox as text: what is in it, and in what order."""

from __future__ import annotations

from shoal.sandbox.compose import CAPABILITY_MASK, Accounting, Devices, Mount, Parts, compose
from shoal.sandbox.plan import HOST_MOUNTS, HOST_NETWORK, KEPT, NONE, OWN_MOUNTS, Plan
from shoal.sandbox.slots import FIRST, IDS

USERS, BASE, ENVIRONMENT, SYS, NETWORK, MEMORY, UNIFIED = range(KEPT + 20, KEPT + 27)

HYBRID = Accounting(
    init_group=(UNIFIED, "b0/init"),
    init_joins=((MEMORY, "b0/tasks"),),
    command_joins=((MEMORY, "b0/cmd/tasks"),),
    commands_group=(UNIFIED, "b0/cmd"),
    oom_events=(MEMORY, "b0/cmd/memory.oom_control"),
)
PARTS = Parts(
    hostname="sandbox",
    owner=FIRST,
    users=USERS,
    mounts=(Mount("/", (BASE,)), Mount("/opt/env", (ENVIRONMENT,))),
    writable=1 << 30,
    inodes=1000,
    open_files=4096,
    network=NETWORK,
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
    network=NETWORK,
    sys=SYS,
    devices=Devices((("null", KEPT + 40), ("tty", KEPT + 41))),
    accounting=Accounting(),
    seccomp=b"",
)


def names(plan: Plan) -> list[str]:
    return [name for name, _ in plan.steps]


def arguments(plan: Plan, name: str) -> list[tuple[object, ...]]:
    return [arguments for step, arguments in plan.steps if step == name]


def test_the_whole_of_it() -> None:
    """The order is the point; a change here is a change of what sandboxes are."""
    assert names(compose(PARTS)) == [
        *("mount", "mkdir", "mkdir", "mkdir", "mkdir", "mkdir", "clone_tree", "send", "idmap", "clone_tree"),
        *("open", "open", "overlay"),
        *("open", "open", "overlay"),
        *("enter", "clone_tree", "enter"),
        *("open", "open", "open", "open", "open"),
        "clone",
        *("join", "identity", "unshare"),
        *("attach", "attach", "mount", "attach", "attach", "mount", "attach", "mount", "attach", "attach", "pivot"),
        *("hostname", "write", "commands", "capabilities", "seccomp"),
    ]


def test_directories_are_made_before_the_upper_is_mapped() -> None:
    """Host root is nobody whom the mapped mount could make a file for."""
    steps = names(compose(PARTS))
    assert max(index for index, name in enumerate(steps) if name == "mkdir") < steps.index("idmap")


def test_the_upper_is_bounded_in_bytes_and_inodes() -> None:
    first = arguments(compose(PARTS), "mount")[0]
    assert first[1:] == ("tmpfs", 6, [f"size={1 << 30}", "nr_inodes=1000", "mode=755"])


def test_overlays_are_made_for_the_slot_with_user_attributes() -> None:
    root, environment = arguments(compose(PARTS), "overlay")
    assert root[4:] == (FIRST, ["userxattr"], [BASE])
    assert environment[4:] == (FIRST, ["userxattr"], [ENVIRONMENT])


def test_the_shared_trees_are_copied_where_they_were_taken_and_the_way_back_is_taken() -> None:
    assert arguments(compose(PARTS), "enter") == [(HOST_MOUNTS,), (OWN_MOUNTS,)]


def test_the_namespaces_of_the_sandbox() -> None:
    (clone,) = arguments(compose(PARTS), "clone")
    mapping = f"0 {FIRST} {IDS}"
    assert clone[1:6] == (FIRST, mapping, mapping, NETWORK, HOST_NETWORK)
    assert isinstance(clone[0], int)
    assert clone[0] == 0x20000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000


def test_the_cgroup_namespace_comes_after_the_group_is_joined() -> None:
    steps = names(compose(PARTS))
    assert steps.index("join") < steps.index("unshare")
    assert arguments(compose(PARTS), "unshare") == [(0x2000000,)]


def test_mounts_below_the_root_come_after_it_and_proc_after_them() -> None:
    targets = [target for *_, target in arguments(compose(PARTS), "attach")]
    assert targets == ["new", "opt/env", "proc", "sys", "dev/pts", "dev/mqueue", "dev/shm"]


def test_user_namespaces_are_forbidden_while_init_may_still_write_that() -> None:
    steps = names(compose(PARTS))
    assert arguments(compose(PARTS), "write") == [("/proc/sys/user/max_user_namespaces", "0")]
    assert steps.index("pivot") < steps.index("write") < steps.index("capabilities")


def test_the_filter_is_last() -> None:
    assert compose(PARTS).steps[-1] == ("seccomp", (1, PARTS.seccomp))


def test_commands_keep_neither_admin_nor_resource_nor_ptrace_nor_net() -> None:
    assert arguments(compose(PARTS), "capabilities") == [(CAPABILITY_MASK,)]
    for refused in (12, 13, 16, 17, 19, 21, 23, 24, 25, 27, 34, 37, 38, 39, 40):
        assert not CAPABILITY_MASK >> refused & 1, refused


def test_without_root_there_is_one_id_and_devices_are_bound() -> None:
    plan = compose(ORDINARY)
    (clone,) = arguments(plan, "clone")
    assert clone[2:4] == ("0 0 1", "0 0 1")
    assert "idmap" not in names(plan)
    targets = [target for *_, target in arguments(plan, "attach")]
    assert targets == ["new", "proc", "sys", "dev/null", "dev/tty", "dev/pts", "dev/mqueue", "dev/shm"]
    assert all("gid=5" not in options for *_, options in arguments(plan, "mount"))


def test_without_cgroups_nothing_is_joined() -> None:
    plan = compose(ORDINARY)
    assert "join" not in names(plan)
    assert arguments(plan, "commands") == [(NONE, NONE, 64, [])]
    (clone,) = arguments(plan, "clone")
    assert clone[-1] == NONE


