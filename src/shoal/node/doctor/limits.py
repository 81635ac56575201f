"""Limits of the kernel and of this process that thousands of sandboxes run into."""

from __future__ import annotations

import resource
from pathlib import Path

from shoal.node.doctor.finding import Probe, Scene, Shortfall, Status

PLENTY = 10_000
"""Sandboxes on one big node, each with one of what is counted."""

SYSCTLS: tuple[tuple[str, int, str], ...] = (
    ("fs.inotify.max_user_instances", 100_000, "Counted by user: file watchers of all sandboxes end here."),
    ("fs.mqueue.msg_max", 8_192, "POSIX message queues inside are refused above it."),
    ("kernel.pid_max", 1_048_576, "All processes of all sandboxes and of the host share these numbers."),
    ("kernel.threads-max", 100_000, "All threads of all sandboxes and of the host together."),
    ("fs.file-max", 1_000_000, "All open files of the machine."),
    ("fs.nr_open", 1_048_576, "The most files that one process may be allowed."),
    ("fs.mount-max", 100_000, "Mounts in one mount namespace; deep stacks of layers need room."),
    ("kernel.keys.maxkeys", 20_000, "Kernel keys by user; as an ordinary user all sandboxes share one."),
    ("kernel.keys.maxbytes", 500_000, "Bytes of kernel keys by user."),
    ("user.max_user_namespaces", PLENTY, "One for each sandbox."),
    ("user.max_net_namespaces", PLENTY, "One for each sandbox."),
    ("user.max_mnt_namespaces", PLENTY, "One for each sandbox."),
    ("user.max_pid_namespaces", PLENTY, "One for each sandbox."),
    ("user.max_ipc_namespaces", PLENTY, "One for each sandbox."),
    ("user.max_uts_namespaces", PLENTY, "One for each sandbox."),
    ("user.max_cgroup_namespaces", PLENTY, "One for each sandbox."),
    (
        "vm.max_map_count",
        262_144,
        "Databases, JVMs and large models in a sandbox map more files than the default.",
    ),
    ("net.core.somaxconn", 4_096, "Connections that may wait at the node's server and the egress."),
    ("net.netfilter.nf_conntrack_max", 65_536, "Connections tracked in one network namespace."),
)
NAMESPACES = "user.max_"


def sysctl(name: str) -> Path:
    return Path("/proc/sys", name.replace(".", "/"))


def setting(name: str, least: int) -> str:
    path = sysctl(name)
    if not path.exists():
        raise Shortfall("not in this kernel, or its module is not loaded yet", "absent", fix=NOT_THERE)
    value = int(path.read_text())
    if value >= least:
        return f"{value:,} ({least:,} or more)"
    # Without any namespace left, no sandbox can be made at all.
    status: Status = "fail" if value == 0 and name.startswith(NAMESPACES) else "warn"
    raise Shortfall(f"{value:,}; {least:,} or more is advised", status)


def _sysctl_probe(name: str, least: int, why: str) -> Probe:
    persist = f"echo '{name} = {least}' | sudo tee -a /etc/sysctl.d/90-shoal.conf"
    return Probe(
        id=f"limits.{name}",
        title=name,
        run=lambda _: setting(name, least),
        why=why,
        fix=f"sudo sysctl -w {name}={least} && {persist}",
    )


def open_files(_: Scene) -> str:
    return _hard_limit(resource.RLIMIT_NOFILE, 65_536)


def processes(_: Scene) -> str:
    return _hard_limit(resource.RLIMIT_NPROC, 65_536)


def _hard_limit(which: int, least: int) -> str:
    hard = resource.getrlimit(which)[1]
    if hard == resource.RLIM_INFINITY:
        return "unlimited"
    if hard < least:
        raise Shortfall(f"{hard:,}; {least:,} or more is advised")
    return f"{hard:,} ({least:,} or more)"


def local_ports(_: Scene) -> str:
    first, last = map(int, sysctl("net.ipv4.ip_local_port_range").read_text().split())
    if last - first < 20_000:
        raise Shortfall(f"{first} to {last}; 20,000 or more are advised")
    return f"{first} to {last}"


NOT_THERE = "Nothing needs doing: look again once sandboxes run."

PROBES = (
    *(_sysctl_probe(*limit) for limit in SYSCTLS),
    Probe(
        id="limits.open_files",
        title="open files of the node (RLIMIT_NOFILE, hard)",
        run=open_files,
        why="The node holds up to three descriptors a sandbox: this bounds how many it can keep.",
        fix="LimitNOFILE=1048576 in the node's systemd unit; else 'root hard nofile 1048576' and '* hard "
        "nofile "
        "1048576' in /etc/security/limits.d/90-shoal.conf, and log in again.",
    ),
    Probe(
        id="limits.processes",
        title="processes of this user (RLIMIT_NPROC, hard)",
        run=processes,
        why="As an ordinary user every process of every sandbox counts against it.",
        fix="LimitNPROC=infinity in the node's systemd unit; else '* hard nproc unlimited' in "
        "/etc/security/limits.d/90-shoal.conf, and log in again.",
    ),
    Probe(
        id="limits.net.ipv4.ip_local_port_range",
        title="net.ipv4.ip_local_port_range",
        run=local_ports,
        why="The egress opens every sandbox's connections from the host: each takes a port for a destination.",
        fix="sudo sysctl -w net.ipv4.ip_local_port_range='15000 60999'",
    ),
)
