"""Probes of control groups, v1 and v2: each makes a group below the caller's own, uses it and removes it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from shoal.node.doctor import calls, namespaces
from shoal.node.doctor.finding import Probe, Scene, Shortfall
from shoal.node.facts import unescape
from shoal.sandbox.cgroup import find_hierarchies
from shoal.sandbox.delegation import take_place

UNIFIED = ""
"""The v2 tree's name among v1 controllers, as in /proc/self/cgroup."""

V1_LIMITS = {
    "memory": ("memory.limit_in_bytes", "67108864"),
    "cpu": ("cpu.cfs_quota_us", "50000"),
    "pids": ("pids.max", "64"),
}
V2_LIMITS = {
    "memory": ("memory.max", "67108864"),
    "cpu": ("cpu.max", "50000 100000"),
    "pids": ("pids.max", "64"),
}


def own(controller: str) -> Path | None:
    """The caller's group in the hierarchy of a v1 controller, or in the v2 tree; None where there is none."""
    inside = _memberships(Path("/proc/self/cgroup").read_text()).get(controller)
    mounted = _hierarchies(Path("/proc/self/mountinfo").read_text()).get(controller)
    if inside is None or mounted is None:
        return None
    root, target = mounted
    below = os.path.relpath(inside, root)
    # In a container the mount may show another part of the tree than the one the caller is in.
    return Path(target) if below.startswith("..") else Path(target, below)


def _memberships(text: str) -> dict[str, str]:
    lines = (line.split(":", 2) for line in text.splitlines())
    return {name: path for _, names, path in lines for name in names.split(",")}


def _hierarchies(mountinfo: str) -> dict[str, tuple[str, str]]:
    """Controller to (root of the mount, place of the mount)."""
    found = {}
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        root, target = (unescape(field) for field in fields.split(" ")[3:5])
        kind, _, options = rest.split(" ", 2)
        if kind == "cgroup2":
            found[UNIFIED] = (root, target)
        elif kind == "cgroup":
            found |= dict.fromkeys(re.split(r"[ ,]", options), (root, target))
    return found


@contextmanager
def group(parent: Path) -> Iterator[Path]:
    """A new group below `parent`, removed when the block ends."""
    made = parent / f"shoal-doctor-{os.getpid()}"
    made.mkdir()
    try:
        yield made
    finally:
        _remove(made)


def _remove(path: Path) -> None:
    # A group whose last process has just been killed stays busy for a moment.
    for _ in range(50):
        try:
            return path.rmdir()
        except OSError:
            time.sleep(0.01)
    return path.rmdir()


def limit(controller: str) -> str:
    """Sets a limit in a new group in the tree that has the controller, at the first place that lets it."""
    problems = []
    for parent, unified in _places(controller):
        try:
            return _limited(parent, controller, unified=unified)
        except Shortfall as shortfall:
            problems.append(shortfall.detail)
        except OSError as error:
            problems.append(f"{parent}: {error.strerror}")
    raise Shortfall("; ".join(problems) or f"no tree has the {controller} controller in a place that is ours")


def _places(controller: str) -> list[tuple[Path, bool]]:
    """Where a group may be made, and whether it is in the v2 tree: there where a node would make its own, whose
    processes are moved out of the way as a node does it; in v1 trees in the caller's own group, else at the top."""
    mounts = Path("/proc/self/mountinfo").read_text()
    found = take_place(find_hierarchies(mounts, Path("/proc/self/cgroup").read_text()))
    places = []
    if found.unified is not None and controller in found.v2_controllers:
        places.append((found.unified, True))
    if (mine := own(controller)) is not None:
        places += [(place, False) for place in dict.fromkeys((mine, Path(_hierarchies(mounts)[controller][1])))]
    return places


def _limited(parent: Path, controller: str, *, unified: bool) -> str:
    file, value = (V2_LIMITS if unified else V1_LIMITS)[controller]
    with _enabled(parent, controller) if unified else nullcontext(), group(parent) as made:
        (made / file).write_text(value)
        if (read := (made / file).read_text().strip()) != value:
            raise Shortfall(f"{file} was set to {value} and reads {read}")
    return f"v{1 + unified}: {file} was set in a group below {parent}"


@contextmanager
def _enabled(parent: Path, controller: str) -> Iterator[None]:
    """v2 gives a group a controller only if its parent passes it on; put back afterwards."""
    switch = parent / "cgroup.subtree_control"
    if controller in switch.read_text().split():
        yield
        return
    _pass_on(switch, controller)
    try:
        yield
    finally:
        switch.write_text(f"-{controller}")


def _pass_on(switch: Path, controller: str) -> None:
    try:
        switch.write_text(f"+{controller}")
    except OSError as error:
        busy = "; it holds processes, and then it may not" if error.errno == 16 else ""
        raise Shortfall(f"{switch.parent} does not pass {controller} on: {error.strerror}{busy}") from None


def memory(_: Scene) -> str:
    return limit("memory")


def cpu(_: Scene) -> str:
    return limit("cpu")


def pids(_: Scene) -> str:
    return limit("pids")


def _unified() -> Path:
    if (place := own(UNIFIED)) is None:
        raise Shortfall("no v2 tree is mounted")
    return place


def kill(_: Scene) -> str:
    with group(_unified()) as made, namespaces.child(0) as pid:
        (made / "cgroup.procs").write_text(str(pid))
        (made / "cgroup.kill").write_text("1")
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT) is None:
            raise Shortfall("cgroup.kill was written and the process lives")
    return "v2: cgroup.kill ended a process"


def freeze(_: Scene) -> str:
    if own(UNIFIED) is not None:
        with group(_unified()) as made:
            (made / "cgroup.freeze").write_text("1")
            return "v2: cgroup.freeze"
    if (place := own("freezer")) is None:
        raise Shortfall("neither cgroup.freeze nor the v1 freezer is here")
    with group(place) as made:
        (made / "freezer.state").write_text("FROZEN")
        (made / "freezer.state").write_text("THAWED")
    return "v1: freezer.state; a process frozen so ignores SIGKILL until it is thawed"


def born_inside(_: Scene) -> str:
    with group(_unified()) as made:
        pid = calls.clone_into(os.open(made, os.O_RDONLY | os.O_DIRECTORY))
        if pid == 0:
            os._exit(0 if Path("/proc/self/cgroup").read_text().rstrip().endswith(made.name) else 1)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise Shortfall("the child was born elsewhere")
    return "a child was born in a group of its own"


CGROUP_FIX = (
    "As root on a systemd machine: run the node as a service with Delegate=yes. As an ordinary user: "
    "systemd-run --user --scope -p Delegate=yes shoal ... . In a container: run it with --cgroupns=private "
    "and a "
    "writable /sys/fs/cgroup."
)
NOT_ENFORCED = "Without it nothing but goodwill limits"


def _probe(controller: str, run: Callable[[Scene], str], field: str, what: str) -> Probe:
    return Probe(
        id=f"cgroup.{controller}",
        title=f"{controller} limit",
        run=run,
        limits=(field,),
        why=f"{NOT_ENFORCED} {what}.",
        fix=CGROUP_FIX,
    )


PROBES = (
    _probe("memory", memory, "memory", "how much memory a sandbox takes from its neighbours and the host"),
    _probe("cpu", cpu, "cpu", "how much CPU time a sandbox takes"),
    Probe(
        id="cgroup.pids",
        title="pids limit",
        run=pids,
        why="Without it the kernel counts a sandbox's processes by its user (RLIMIT_NPROC): the limit holds, but no "
        "result says that it was hit.",
        fix=CGROUP_FIX,
    ),
    Probe(
        id="cgroup.kill",
        title="cgroup.kill",
        run=kill,
        why="Ends every process of a command at once, also those that left its session.",
        fix="Use Linux 5.14 or newer with the v2 tree: sudo mount -t cgroup2 none /sys/fs/cgroup/unified. "
        f"{CGROUP_FIX}",
    ),
    Probe(
        id="cgroup.freeze",
        title="freezing",
        run=freeze,
        missing="absent",
        why="Pausing a sandbox needs it.",
        fix=CGROUP_FIX,
    ),
    Probe(
        id="cgroup.clone_into",
        title="clone3 into a cgroup",
        run=born_inside,
        why="Moving a running process into a cgroup takes 7 to 11 ms; being born there takes 0.2 ms.",
        fix=f"Use Linux 5.7 or newer with the v2 tree. {CGROUP_FIX}",
    ),
)
