"""The plan of one namespace sandbox: pure functions from what it consists of to operations."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from shoal.sandbox.access import Access, add_domain, add_policy
from shoal.sandbox.machine import PROC_FILES, PROC_FOLDER
from shoal.sandbox.plan import HOST_MOUNTS, HOST_NETWORK, NONE, NULL_DEVICE, OWN_MOUNTS, Plan
from shoal.sandbox.slots import IDS

RDONLY, NOSUID, NODEV, NOEXEC, _NOATIME = 1, 2, 4, 8, 16
"""MOUNT_ATTR_*"""
_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID = (
    0x20000,
    0x2000000,
    0x4000000,
    0x8000000,
    0x10000000,
    0x20000000,
)
_NAMESPACES: Final = _NEWNS | _NEWUTS | _NEWIPC | _NEWUSER | _NEWPID
_RLIMIT_CORE: Final = 4
_TERMINALS_MAX: Final = 64
"""Terminals are an account of the whole machine (kernel.pty.max)."""
_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY

_CAPABILITIES: Final = {
    "CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7, "SETPCAP": 8,
    "NET_BIND_SERVICE": 10, "SYS_CHROOT": 18, "SETFCAP": 31,
}  # fmt: skip
"""What root inside keeps, over its own user namespace only. Without SYS_ADMIN it could not mount cgroup2 and leave its
command's group; without SYS_RESOURCE not raise limits."""
CAPABILITY_MASK: Final = sum(1 << number for number in _CAPABILITIES.values())

# Registers. The first two are sent along.
_CHANNEL, _NETWORK, _UPPER, _RAW, _ROOT, _SHM, _SCRATCH, _COMMANDS, _EVENTS, _INIT_GROUP, _SYS, _TERMINALS = range(12)
_FIRST_JOIN: Final = 12
_PROCESS_EVENTS: Final = 17
_FIRST_DEVICE: Final = 18
_FIRST_OVERLAY: Final = 24
MOUNTS_MAX: Final = 40
"""Writable mounts that one plan has registers for."""


class Mount(Struct, frozen=True):
    """A writable mount made of read-only layers."""

    target: str
    lowers: tuple[int, ...]
    """Kept descriptors of detached mounts, highest first."""


class Devices(Struct, frozen=True):
    """Device nodes to bind over files of the same name in /dev, where the layers cannot bring them."""

    nodes: tuple[tuple[str, int], ...] = ()


class Accounting(Struct, frozen=True):
    """A sandbox's cgroup files: (kept descriptor of a hierarchy's directory, path below it)."""

    init_group: tuple[int, str] | None = None
    init_joins: tuple[tuple[int, str], ...] = ()
    command_joins: tuple[tuple[int, str], ...] = ()
    leaves: tuple[tuple[int, str], ...] = ()
    """Files by which init leaves the groups of `command_joins` again."""
    commands_group: tuple[int, str] | None = None
    oom_events: tuple[int, str] | None = None
    process_events: tuple[int, str] | None = None
    own_namespace: bool = True
    """Whether init makes a cgroup namespace; else it keeps the spawner's."""


class Parts(Struct, frozen=True, kw_only=True):
    """Everything that a sandbox is put together from."""

    hostname: str
    owner: int
    """First id of its slot; 0 for an ordinary user's sandbox, which has one id only."""
    users: int
    """Kept descriptor of the slot's user namespace, NONE where layers can't be id-mapped."""
    mounts: tuple[Mount, ...]
    """The root first."""
    writable: int
    inodes: int
    device: str | None
    """Block device with the file system for what is written; None means memory."""
    open_files: int
    processes: int
    """Limit by the kernel's count of the sandbox's root; 0 where a cgroup limits them."""
    sys: int
    """Kept descriptor of the /sys tree, which has the files for /proc too."""
    devices: Devices
    accounting: Accounting
    seccomp: bytes
    access: Access | None = None
    """What of all this commands may use; None for all."""


def compose(plan: Plan, parts: Parts) -> None:
    """Adds all that makes the sandbox. Takes init's end of the channel and the network namespace as the first two
    descriptors; sends out the raw upper tree, and the spawner adds a pidfd of the init."""
    _make_upper(plan, parts)
    for index, mount in enumerate(parts.mounts):
        _make_overlay(plan, parts, mount, index)
    _copy_shared(plan, parts)
    _open_cgroups(plan, parts.accounting)
    identity_map = f"0 {parts.owner} {IDS}" if parts.owner else "0 0 1"
    group = _INIT_GROUP if parts.accounting.init_group else NONE
    plan.add(
        "clone",
        _NAMESPACES,
        parts.owner,
        identity_map,
        identity_map,
        _NETWORK,
        HOST_NETWORK,
        _CHANNEL,
        group,
    )
    plan.extend(_inside(_shape(parts)))


class Shape(Struct, frozen=True):
    """All that decides what is done inside: the same for most sandboxes of a node, so it is written once."""

    hostname: str
    targets: tuple[str, ...]
    devices: tuple[str, ...]
    init_joins: int
    command_joins: int
    commands_group: bool
    oom_events: bool
    process_events: bool
    open_files: int
    processes: int
    seccomp: bytes
    own_namespace: bool
    access: Access | None


def _shape(parts: Parts) -> Shape:
    accounting = parts.accounting
    return Shape(
        parts.hostname,
        tuple(mount.target for mount in parts.mounts),
        tuple(name for name, _ in parts.devices.nodes),
        len(accounting.init_joins),
        len(accounting.command_joins),
        accounting.commands_group is not None,
        accounting.oom_events is not None,
        accounting.process_events is not None,
        parts.open_files,
        parts.processes,
        parts.seccomp,
        accounting.own_namespace,
        parts.access,
    )


@functools.lru_cache(maxsize=64)
def _inside(shape: Shape) -> Plan:
    plan = Plan()
    _enter(plan, shape)
    _mount_inside(plan, shape)
    _lock_down(plan, shape)
    return plan


def _make_upper(plan: Plan, parts: Parts) -> None:
    if parts.device is None:
        options = (f"size={parts.writable}", f"nr_inodes={parts.inodes}", "mode=755")
        plan.add("mount", _UPPER, "tmpfs", NOSUID | NODEV, options)
    else:
        plan.add("enter", HOST_MOUNTS)
        plan.add("mount", _UPPER, "ext4", NOSUID | NODEV | _NOATIME, [f"source={parts.device}"])
        plan.add("enter", OWN_MOUNTS)
    # Made before the mount is id-mapped: host root is no one that the mapped mount could create files for.
    plan.add("mkdir", _UPPER, "shm", 0o1777)
    for index in range(len(parts.mounts)):
        plan.add("mkdir", _UPPER, f"up{index}", 0o755)
        plan.add("mkdir", _UPPER, f"work{index}", 0o755)
    plan.add("clone_tree", _RAW, _UPPER, "")
    plan.add("send", _RAW)
    if parts.users != NONE:
        plan.add("idmap", _UPPER, parts.users)
    plan.add("clone_tree", _SHM, _UPPER, "shm")


def _make_overlay(plan: Plan, parts: Parts, mount: Mount, index: int) -> None:
    overlay, upper, work = _ROOT if index == 0 else _FIRST_OVERLAY + index, _SCRATCH, _EVENTS
    plan.add("open", upper, _UPPER, f"up{index}", _DIRECTORY)
    plan.add("open", work, _UPPER, f"work{index}", _DIRECTORY)
    # On a disk an overlay would sync it all when it is unmounted.
    options = ("userxattr",) if parts.device is None else ("userxattr", "volatile")
    plan.add("overlay", overlay, upper, work, 0, parts.owner, options, mount.lowers)


def _copy_shared(plan: Plan, parts: Parts) -> None:
    """What all sandboxes have the same. A detached copy may only be copied again where it was first taken from."""
    plan.add("clone_tree", _SYS, parts.sys, "")
    if not parts.devices.nodes:
        return
    plan.add("enter", HOST_MOUNTS)
    for index, (_, node) in enumerate(parts.devices.nodes):
        plan.add("clone_tree", _FIRST_DEVICE + index, node, "")
    plan.add("enter", OWN_MOUNTS)


def _open_cgroups(plan: Plan, accounting: Accounting) -> None:
    if accounting.init_group:
        plan.add("open", _INIT_GROUP, *accounting.init_group, _DIRECTORY)
    if accounting.commands_group:
        plan.add("open", _COMMANDS, *accounting.commands_group, os.O_RDONLY | os.O_DIRECTORY)
    if accounting.oom_events:
        plan.add("open", _EVENTS, *accounting.oom_events, os.O_RDONLY)
    if accounting.process_events:
        plan.add("open", _PROCESS_EVENTS, *accounting.process_events, os.O_RDONLY)
    for index, join in enumerate((*accounting.init_joins, *accounting.command_joins, *accounting.leaves)):
        plan.add("open", _FIRST_JOIN + index, *join, os.O_WRONLY)


def _enter(plan: Plan, shape: Shape) -> None:
    """The cgroup namespace takes for its root the groups that we are in when it is made. So init visits those that are
    for its commands, whose names would tell of the host otherwise, and leaves them again, to be outside their limits.
    """
    visited = shape.init_joins + shape.command_joins
    for index in range(visited):
        plan.add("join", _FIRST_JOIN + index)
    plan.add("identity")
    if shape.own_namespace:
        plan.add("unshare", _NEWCGROUP)
    for index in range(shape.command_joins):
        plan.add("join", _FIRST_JOIN + visited + index)


def _mount_inside(plan: Plan, shape: Shape) -> None:
    plan.add("attach", _ROOT, NONE, "new")
    for index, target in enumerate(shape.targets[1:], start=1):
        plan.add("attach", _FIRST_OVERLAY + index, _ROOT, target.lstrip("/"))
    _mount_new(plan, "proc", NOSUID | NODEV | NOEXEC, [], "proc")
    plan.add("attach", _SYS, _ROOT, "sys")
    plan.add("bind", _ROOT, f"sys/{PROC_FOLDER}", "proc", PROC_FILES)
    for index, name in enumerate(shape.devices):
        plan.add("attach", _FIRST_DEVICE + index, _ROOT, f"dev/{name}")
    plan.add("mount", _TERMINALS, "devpts", NOSUID | NOEXEC, ["ptmxmode=0666", "mode=0620", f"max={_TERMINALS_MAX}"])
    plan.add("attach", _TERMINALS, _ROOT, "dev/pts")
    _mount_new(plan, "mqueue", NOSUID | NODEV | NOEXEC, [], "dev/mqueue")
    plan.add("attach", _SHM, _ROOT, "dev/shm")
    if shape.access is not None:
        # File operations of the sandbox's owner go by the tree as it is before.
        plan.add("clone_all", _SCRATCH, _ROOT)
        plan.add("view", _SCRATCH)
        add_policy(plan, _ROOT, shape.access, shape.targets)
    plan.add("pivot", _ROOT)


def _mount_new(plan: Plan, kind: str, attributes: int, options: Sequence[str], target: str) -> None:
    plan.add("mount", _SCRATCH, kind, attributes, options)
    plan.add("attach", _SCRATCH, _ROOT, target)


def _lock_down(plan: Plan, shape: Shape) -> None:
    plan.add("hostname", shape.hostname)
    # 1 and not 0: where core_pattern names a program, only that keeps the host from running it as root on our crash.
    plan.add("rlimit", _RLIMIT_CORE, 1, 1)
    plan.add("write", NONE, "/proc/sys/user/max_user_namespaces", "0")
    first = _FIRST_JOIN + shape.init_joins
    plan.add(
        "commands",
        _COMMANDS if shape.commands_group else NONE,
        _EVENTS if shape.oom_events else NONE,
        _PROCESS_EVENTS if shape.process_events else NONE,
        NULL_DEVICE,
        _TERMINALS,
        shape.open_files,
        shape.processes,
        list(range(first, first + shape.command_joins)),
    )
    plan.add("capabilities", CAPABILITY_MASK)
    if shape.access is not None:
        add_domain(plan, shape.access)
    plan.add("seccomp", 1, shape.seccomp)
