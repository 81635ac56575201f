"""Probes of namespaces, ids and processes."""

from __future__ import annotations

import os
import pwd
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.node.doctor import calls
from shoal.node.doctor.finding import Probe, Scene, Shortfall

SEVEN = {
    "user": calls.NEWUSER,
    "mount": calls.NEWNS,
    "pid": calls.NEWPID,
    "net": calls.NEWNET,
    "ipc": calls.NEWIPC,
    "uts": calls.NEWUTS,
    "cgroup": calls.NEWCGROUP,
}
ID_RANGE = "0 1000000 65536\n"


def enter(flags: int) -> None:
    """New namespaces with full capabilities over them: by right for root, in a user namespace for others."""
    if os.geteuid() == 0:
        calls.unshare(flags)
        return
    uid, gid = os.geteuid(), os.getegid()
    calls.unshare(flags | calls.NEWUSER, "unshare with a user namespace")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


@contextmanager
def child(flags: int) -> Iterator[int]:
    """The pid of a child that sits in new namespaces until the block ends."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        _sit(flags, tell)
    os.close(tell)
    try:
        if number := int(os.read(told, 16) or b"5"):
            raise OSError(number, f"unshare: {os.strerror(number)}")
        yield pid
    finally:
        os.close(told)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _sit(flags: int, tell: int) -> None:
    try:
        calls.prctl("prctl", calls.PR_SET_PDEATHSIG, signal.SIGKILL)
        calls.unshare(flags)
        os.write(tell, b"0")
        signal.pause()
    except OSError as error:
        os.write(tell, str(error.errno).encode())
    finally:
        os._exit(0)


def refused(flags: dict[str, int]) -> list[str]:
    """Those of the namespaces that cannot be made, with the reason. An ordinary user asks for user too."""
    user = 0 if os.geteuid() == 0 else calls.NEWUSER
    reasons = []
    for name, flag in flags.items():
        try:
            with child(flag | user):
                pass
        except OSError as error:
            reasons.append(f"{name} ({os.strerror(error.errno or 0)})")
    return reasons


def seven(_: Scene) -> str:
    try:
        calls.unshare(sum(SEVEN.values()), "unshare of all seven")
    except OSError as error:
        raise Shortfall(f"{error.strerror}; refused: {', '.join(refused(SEVEN)) or 'none alone'}") from None
    pid = os.fork()
    if pid == 0:
        os._exit(0 if os.getpid() == 1 else 1)
    if os.waitpid(pid, 0)[1]:
        raise Shortfall("the first process of a new pid namespace is not process 1")
    return "user, mount, pid, net, ipc, uts and cgroup made in one call"


def unprivileged(_: Scene) -> str:
    uid = os.geteuid()
    enter(calls.NEWNS)
    calls.private_mounts()
    calls.mount("tmpfs", "/tmp", "tmpfs", data="size=64k")
    return f"user {uid} gets capabilities in a user namespace of its own"


def id_range(_: Scene) -> str:
    with child(calls.NEWUSER) as pid:
        if os.geteuid() == 0:
            Path(f"/proc/{pid}/uid_map").write_text(ID_RANGE)
            Path(f"/proc/{pid}/gid_map").write_text(ID_RANGE)
            return "65,536 ids mapped to 1000000 and up"
        return _delegated_range(pid)


def _delegated_range(pid: int) -> str:
    program = shutil.which("newuidmap")
    ranges = delegated(Path("/etc/subuid"))
    if program is None or ranges is None:
        lacking = "newuidmap is not installed" if program is None else f"/etc/subuid has nothing for {os.geteuid()}"
        raise Shortfall(f"one id a sandbox: {lacking}")
    first, count = ranges
    command = [program, str(pid), "0", str(first), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2, check=False)
    if done.returncode:
        raise Shortfall(f"newuidmap refuses: {done.stderr.strip()}")
    return f"{count} ids from {first} on, by newuidmap: one range, shared by all sandboxes of this user"


def delegated(table: Path) -> tuple[int, int] | None:
    """First id and number of ids that the table gives the caller."""
    try:
        lines = [line.split(":") for line in table.read_text().splitlines()]
    except OSError:
        return None
    found = (fields for fields in lines if len(fields) == 3 and fields[0] in _own_names())
    return next(((int(first), int(count)) for _, first, count in found), None)


def _own_names() -> set[str]:
    uid = os.geteuid()
    try:
        return {str(uid), pwd.getpwuid(uid).pw_name}
    except KeyError:
        return {str(uid)}


def time_namespace(_: Scene) -> str:
    enter(calls.NEWTIME)
    # Offsets can be written until the first process enters the namespace.
    Path("/proc/self/timens_offsets").write_text("monotonic 100 0\nboottime 100 0\n")
    return "made, with offsets of its own"


def pidfd(_: Scene) -> str:
    with child(0) as pid:
        handle = os.pidfd_open(pid)
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        if not select.select([handle], [], [], 1.0)[0]:
            raise Shortfall("the descriptor of a killed process never becomes readable")
        inode = os.fstat(handle).st_ino
        os.close(handle)
    return f"open, signal and poll work; inode {inode} tells one process from the next"


USER_FIX = (
    "sudo sysctl -w user.max_user_namespaces=100000; on Debian also kernel.unprivileged_userns_clone=1, on "
    "Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container, run it with --security-opt "
    "seccomp=unconfined"
)

PROBES = (
    Probe(
        id="kernel.namespaces",
        title="all seven namespaces",
        run=seven,
        missing="fail",
        why="A sandbox is made of them; without one, processes, files, users or network of the host show through.",
        fix=f"Use a kernel with CONFIG_NAMESPACES and all its parts. {USER_FIX}",
    ),
    Probe(
        id="kernel.userns_unprivileged",
        title="user namespace as an ordinary user",
        run=unprivileged,
        as_user=True,
        why="Lets Shoal work without root. Root does not need it.",
        fix=USER_FIX,
    ),
    Probe(
        id="kernel.id_range",
        title="an id range of its own for each sandbox",
        run=id_range,
        why="The kernel charges inotify, pipes and keys to ids: sandboxes that share one can starve each other.",
        fix='sudo apt-get install uidmap && sudo usermod --add-subuids 1000000-1065535 "$USER"; or be root.',
    ),
    Probe(
        id="kernel.pidfd",
        title="process descriptors (pidfd)",
        run=pidfd,
        missing="fail",
        why="The node holds each sandbox by a descriptor, so that a reused pid is never killed by mistake.",
        fix="Use Linux 5.4 or newer.",
    ),
    Probe(
        id="kernel.time_namespace",
        title="time namespace",
        run=time_namespace,
        missing="absent",
        why="Gives forked and resumed sandboxes a clock that does not jump.",
        fix="Use a kernel with CONFIG_TIME_NS (Linux 5.6); nothing else is affected.",
    ),
)
