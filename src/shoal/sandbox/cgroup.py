"""Cgroups of sandboxes, on the version-1 hierarchies, the unified one, or both at once (hybrid).

Each sandbox has a group on every hierarchy. init is in the one for processor time, but not under the limits of memory
and processes: those are for everything else. On the unified hierarchy commands are below `cmd`, each in a group
`cmd/<n>` made by init itself, by which a command's whole tree is killed and its CPU time read. A version-1 memory group
takes 80 KiB of kernel memory, so there is one and not two.

Where the unified hierarchy has the controllers, only leaves may have processes, and `delegation` says what follows for
those of the host. Spawners are in `spawners` of the node's directory then, in a cgroup namespace with that directory
as its root, which every init inherits: a namespace of init's own, made in its leaf, would keep it from starting
commands in another one (mount option nsdelegate). What commands see of it is `/<random>/cmd/<n>`.

The unified group of a sandbox is never used again: what was killed by `cgroup.kill` kills all that is born in it later.
Version-1 groups, of which a sandbox sees nothing, serve the next one: to make and remove three of them takes a sixth
of a short sandbox's processor time, and a removed memory group stays in memory while a page is charged to it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from shoal.sandbox.plan import Plan
from shoal.types import MiB, Profile

CONTROLLERS: Final = ("memory", "cpu", "pids")
_PERIOD_US: Final = 100_000
_WEIGHTS: Final = {"best-effort": 100, "latency": 1000}
"""Shares of a busy processor, 100 being an ordinary process's."""
_INIT: Final = "init"
_SPAWNERS: Final = "spawners"
_LEFT_CHARGED: Final = 64
"""A used group serves again if no more than this part of its memory is still charged to it."""
_BUFFERS: Final = "memory.kmem.tcp.limit_in_bytes"


Keys = Mapping[str, int]
"""Controller, or "unified", to the kept descriptor of the node's directory there, in the spawner that is to act."""


class Hierarchies(Struct, frozen=True):
    """Where this process may make groups. A missing one is None or absent."""

    v1: dict[str, Path]
    """Controller to the directory of this process's own group on its version-1 hierarchy."""
    unified: Path | None
    v2_controllers: frozenset[str]
    """Controllers that the unified hierarchy offers to children of our group."""
    home: Path | None = None
    """The unified group that this process and what it starts is in, if that is not where groups are made."""


def find_hierarchies(mountinfo: str, membership: str) -> Hierarchies:
    """From the text of /proc/self/mountinfo and /proc/self/cgroup."""
    own = dict(_memberships(membership))
    v1: dict[str, Path] = {}
    unified: Path | None = None
    for root, point, kind, options in _mounts(mountinfo):
        if kind == "cgroup2" and "" in own and unified is None:
            unified = _below(point, root, own[""])
        for controller in CONTROLLERS if kind == "cgroup" else ():
            if controller in options.split(",") and controller in own:
                v1.setdefault(controller, _below(point, root, own[controller]))
    offered: frozenset[str] = frozenset()
    if unified is not None:
        with contextlib.suppress(OSError):
            offered = frozenset((unified / "cgroup.controllers").read_text().split())
    return Hierarchies(v1, unified, offered - frozenset(v1))


def _memberships(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _mounts(text: str) -> Iterator[tuple[str, str, str, str]]:
    for line in text.splitlines():
        before, after = line.split(" - ", 1)
        fields, (kind, _, options) = before.split(), after.split(" ", 2)
        yield _unescape(fields[3]), _unescape(fields[4]), kind, options


def _unescape(text: str) -> str:
    """Blanks and the like stand as octal numbers in mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _below(point: str, root: str, path: str) -> Path:
    inside = os.path.relpath(path, root)
    return Path(point) if inside == "." or inside.startswith("..") else Path(point) / inside


class Limits(Struct, frozen=True):
    """What a group is set to."""

    profile: Profile
    writable: int
    """Bytes that files in memory may take on top of the profile's memory."""


class Group(Struct):
    """The cgroup of one sandbox, by paths below the node's directories."""

    name: str
    """On the unified hierarchy."""
    version1: str
    """On the others."""
    limits: Limits | None = None
    """What it is set to, as far as that is known."""


class Cgroups:
    """The node's own directory on every hierarchy, and the groups in it."""

    def __init__(self, hierarchies: Hierarchies, name: str) -> None:
        """`name`: of the node's directory; unique to this process. Makes the directories that it is allowed to."""
        self._roots: dict[str, Path] = {}
        """Controller to the node's directory; "unified" for version 2."""
        self._v2: tuple[str, ...] = ()
        self._home = hierarchies.home or hierarchies.unified
        self._space: int | None = None
        for controller, parent in hierarchies.v1.items():
            self._make_root(controller, parent / name)
        if hierarchies.unified is not None and self._make_root("unified", hierarchies.unified / name):
            self._v2 = self._delegate(hierarchies.v2_controllers)
        self._swap = self._find_swap_limit()
        self._buffers = "memory" in self._roots and (self._roots["memory"] / _BUFFERS).exists()
        self._next = 0

    def _find_swap_limit(self) -> str | None:
        """The file of a group that limits swap; there is none where swap is not accounted for."""
        for controller, name in (("memory", "memory.memsw.limit_in_bytes"), ("unified", "memory.swap.max")):
            if controller in self._roots and (self._roots[controller] / name).exists():
                return name
        return None

    def _make_root(self, controller: str, path: Path) -> bool:
        try:
            path.mkdir()
            usable = os.access(path / "cgroup.procs", os.W_OK)
        except OSError:
            return False
        if usable:
            self._roots[controller] = path
        return usable

    def _delegate(self, offered: frozenset[str]) -> tuple[str, ...]:
        """Has the controllers passed on to the node's directory. It passes them on itself once the first spawner has
        been in it (`enable`): after that no process may be."""
        root = self._roots["unified"]
        wanted = tuple(c for c in CONTROLLERS if c in offered and c not in self._roots)
        for controller in wanted:
            with contextlib.suppress(OSError):
                _write(root.parent / "cgroup.subtree_control", f"+{controller}")
        given = _read(f"{root}/cgroup.controllers").decode().split() if wanted else []
        usable = tuple(c for c in wanted if c in given)
        if usable:
            (root / _SPAWNERS).mkdir()
        return usable

    @property
    def home(self) -> Path | None:
        """The group that spawners are born in, if they are to leave it for the one in the node's directory."""
        return self._home if self._v2 else None

    @property
    def space(self) -> int | None:
        """The cgroup namespace of all spawners, once one has made it."""
        return self._space

    def enable(self, space: int) -> None:
        """Now that the first spawner has been in the node's directory, and has made its namespace there."""
        self._space = space
        for controller in self._v2:
            _write(self._roots["unified"] / "cgroup.subtree_control", f"+{controller}")

    @property
    def spawners(self) -> str:
        """The group of spawners, by its path below the node's unified directory."""
        return _SPAWNERS

    @property
    def unenforced(self) -> tuple[str, ...]:
        """Limits that no hierarchy here can carry."""
        names = {"memory": "memory", "cpu": "cpu", "pids": "processes"}
        return tuple(names[c] for c in CONTROLLERS if c not in self._roots and c not in self._v2)

    @property
    def directories(self) -> tuple[str, ...]:
        """The node's directories, to be removed when it ends."""
        return tuple(map(str, self._roots.values()))

    def new(self) -> Group:
        """A name for one more group; `create` makes it."""
        self._next += 1
        return Group(self._unified_name(), f"b{self._next}")

    def renew(self, group: Group) -> Group:
        """A name for one more group, in the version-1 directories and with the limits of one that has ended."""
        self._next += 1
        return Group(self._unified_name(), group.version1, group.limits)

    def _unified_name(self) -> str:
        """Where it shows inside, it does not tell the how manieth the sandbox is."""
        return secrets.token_hex(8) if self._v2 else f"b{self._next}"

    def renewable(self, group: Group) -> bool:
        """Whether a group without processes is as good as a new one: next to nothing is charged to it any more."""
        if group.limits is None or self._v2 or self._roots.keys() <= {"unified"}:
            return False
        if "memory" not in self._roots:
            return True
        try:
            usage = int(_read(f"{self._roots['memory']}/{group.version1}/memory.usage_in_bytes"))
        except FileNotFoundError:  # a spawner that ends takes the node's empty groups with it
            return False
        return usage <= group.limits.profile.memory // _LEFT_CHARGED

    def create(self, plan: Plan, keys: Keys, group: Group, owner: int) -> None:
        """Adds the operations that make a group on every hierarchy. `owner`: the uid that is root inside, whose init
        makes a group for each command."""
        for controller in self._roots:
            if controller == "unified":
                self._create_unified(plan, keys[controller], group.name, owner)
            elif group.limits is None:
                plan.add("mkdir", keys[controller], group.version1, 0o755)

    def _create_unified(self, plan: Plan, root: int, box: str, owner: int) -> None:
        plan.add("mkdir", root, box, 0o755)
        for controller in self._v2:
            plan.add("write", root, f"{box}/cgroup.subtree_control", f"+{controller}")
        for folder in (*([_INIT] if self._v2 else []), "cmd"):
            plan.add("mkdir", root, f"{box}/{folder}", 0o755)
        plan.add("write", root, f"{box}/cmd/cgroup.max.descendants", "2048")
        for path in ("cgroup.procs", "cmd", "cmd/cgroup.procs"):
            plan.add("chown", root, f"{box}/{path}", owner)

    def limit(self, plan: Plan, keys: Keys, group: Group, limits: Limits) -> None:
        """Adds the operations that set a group's limits, where it has not got them. Who runs them notes it there."""
        if group.limits == limits:
            return
        profile = limits.profile
        memory = str(profile.memory + limits.writable)
        quota = str(max(int(profile.cpu * _PERIOD_US), 1000))
        weight = _WEIGHTS[profile.cpu_class]
        files = [
            ("cpu", "cpu.cfs_quota_us", quota),
            ("cpu", "cpu.shares", str(1024 * weight // 100)),
            ("pids", "pids.max", str(profile.processes)),
        ]
        files += self._version1_memory(profile, memory, fresh=group.limits is None)
        if "memory" in self._v2:
            files.append(("unified", "cmd/memory.max", memory))
            if self._swap == "memory.swap.max":
                files.append(("unified", f"cmd/{self._swap}", "0"))
        if "cpu" in self._v2:
            files.append(("unified", "cpu.max", f"{quota} {_PERIOD_US}"))
            files.append(("unified", "cpu.weight", str(weight)))
        if "pids" in self._v2:
            files.append(("unified", "cmd/pids.max", str(profile.processes)))
        for controller, path, value in files:
            if controller in self._roots:
                name = group.name if controller == "unified" else group.version1
                plan.add("write", keys[controller], f"{name}/{path}", value)

    def _version1_memory(self, profile: Profile, memory: str, *, fresh: bool) -> list[tuple[str, str, str]]:
        """In the order of writing: the limit with swap must never be below the one without."""
        limits = [("memory", "memory.limit_in_bytes", memory)]
        if self._swap == "memory.memsw.limit_in_bytes":
            before = [] if fresh else [("memory", self._swap, "-1")]
            limits = [*before, *limits, ("memory", self._swap, memory)]
        if self._buffers:
            # Socket buffers are charged to a group only where this is set.
            limits.append(("memory", _BUFFERS, str(max(16 * MiB, profile.memory // 8))))
        return limits

    def retire(self, plan: Plan, keys: Keys, group: Group) -> None:
        """Adds the operations that remove what serves one sandbox only. They fail while a process of it is there."""
        if "unified" in self._roots:
            plan.add("remove_tree", keys["unified"], group.name)

    def remove(self, plan: Plan, keys: Keys, group: Group) -> None:
        """Adds the operations that remove all of a group; they fail while a process is in it, and can be done again."""
        self.retire(plan, keys, group)
        for controller in self._roots:
            if controller != "unified":
                plan.add("remove_tree", keys[controller], group.version1)

    def roots(self) -> dict[str, Path]:
        """Controller to the node's directory."""
        return dict(self._roots)

    def init_joins(self, group: Group) -> Sequence[tuple[str, str]]:
        """(controller, path below its root) of the version-1 files into which init writes itself: its processor time is
        the sandbox's, but neither memory nor processes are, so that it survives every OOM and can start one more."""
        return [("cpu", f"{group.version1}/tasks")] if "cpu" in self._roots else []

    def command_joins(self, group: Group) -> Sequence[tuple[str, str]]:
        """The same for each command, which is in init's group for processor time by birth."""
        return [(c, f"{group.version1}/tasks") for c in ("memory", "pids") if c in self._roots]

    @property
    def own_namespaces(self) -> bool:
        """Whether each init makes a cgroup namespace; else it has the spawners'."""
        return not self._v2

    def leaves(self) -> Sequence[tuple[str, str]]:
        """Where init goes after a visit to the groups of `command_joins`, in which its cgroup namespace is made."""
        return [(c, "tasks") for c in ("memory", "pids") if c in self._roots]

    def init_group(self, group: Group) -> tuple[str, str] | None:
        """The unified directory that init is born in, or None. Where it has controllers it must be a leaf."""
        if "unified" not in self._roots:
            return None
        return ("unified", f"{group.name}/{_INIT}" if self._v2 else group.name)

    def commands_group(self, group: Group) -> tuple[str, str] | None:
        """The unified directory in which init makes one for each command."""
        return ("unified", f"{group.name}/cmd") if "unified" in self._roots else None

    def oom_events(self, group: Group) -> tuple[str, str] | None:
        """The file that counts OOM kills."""
        if "memory" in self._roots:
            return ("memory", f"{group.version1}/memory.oom_control")
        return ("unified", f"{group.name}/cmd/memory.events") if "memory" in self._v2 else None

    def process_events(self, group: Group) -> tuple[str, str] | None:
        """The file that counts processes which the limit refused."""
        if "pids" in self._roots:
            return ("pids", f"{group.version1}/pids.events")
        return ("unified", f"{group.name}/cmd/pids.events") if "pids" in self._v2 else None

    def close(self) -> None:
        """Removes the node's directories. Their groups must be gone."""
        self.forsake()
        for root in self._roots.values():
            with contextlib.suppress(OSError):
                (root / _SPAWNERS).rmdir()
            with contextlib.suppress(OSError):
                root.rmdir()

    def forsake(self) -> None:
        """See `NamespaceTier.forsake`."""
        if self._space is not None:
            os.close(self._space)
            self._space = None


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def _write(path: str | Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
