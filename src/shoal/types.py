"""The plain data that crosses Shoal's borders. No behaviour beyond reading a size."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct, field

from shoal.errors import InvalidRequest

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30

Verdict = Literal["ok", "policy_timeout", "policy_oom", "policy_limit", "platform_error", "platform_lost", "cancelled"]
Limit = Literal["timeout", "silence", "memory", "processes", "disk", "output"]
State = Literal["creating", "running", "gone"]

_UNITS = {"": 1, "K": KiB, "M": MiB, "G": GiB, "T": 1 << 40, "k": 1000}
_UNITS |= {f"{unit}iB": factor for unit, factor in _UNITS.items() if unit in ("K", "M", "G", "T")}
_UNITS |= {"B": 1, "kB": 1000, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}


def parse_size(value: int | str, field: str = "size") -> int:
    """Bytes from a number or "512MiB", "5G", "20 GB" (decimal units end in B, binary ones in iB or stand alone)."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise InvalidRequest(field, f"a size is a number of bytes or text like '512MiB', not {value!r}")
    if isinstance(value, int):
        size = value
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2] not in _UNITS:
            raise InvalidRequest(field, f"a size is a number of bytes or text like '512MiB', not {value!r}")
        size = int(float(match[1]) * _UNITS[match[2]])
    if size < 0:
        raise InvalidRequest(field, f"a size cannot be negative: {value!r}")
    return size


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of the machine one sandbox may use. Fields left out are those of `basic`."""

    cpu: float = 2.0
    """CPUs, as a quota."""
    memory: int = 4 * GiB
    """Bytes for processes, page cache included. Files in a memory upper come on top, up to `disk`."""
    disk: int = 20 * GiB
    """Bytes of everything writable: the root, /tmp and /dev/shm together."""
    processes: int = 128
    """Processes and threads."""
    inodes: int = 0
    """Files, directories and links of everything writable; 0 means one for each 16 KiB of `disk`, at most 1 Mi."""
    open_files: int = 4096
    """File descriptors a process."""
    gpu: int = 0
    cpu_class: Literal["best-effort", "latency"] = "best-effort"
    """On a busy machine "latency" gets ten times the share of processor time."""
    upper: Literal["auto", "memory", "disk"] = "auto"
    """Where what is written lives. "auto" is memory: `disk` bytes, or half of the machine's memory if that is less; and
    a file on disk for a `disk` above all of the machine's memory, where the node is root and has loop devices. `info()`
    tells which, and the bytes given."""
    output: int = 16 * GiB
    """Bytes that one command may write to stdout and stderr together, kept or not; then it is ended."""

    @property
    def inode_limit(self) -> int:
        return self.inodes or min(max(self.disk // (16 * KiB), 1024), 1 << 20)


PROFILES: dict[str, Profile] = {
    "small": Profile(cpu=1, memory=1 * GiB, disk=5 * GiB, processes=64),
    "basic": Profile(),
    "large": Profile(cpu=8, memory=32 * GiB, disk=500 * GiB, processes=1024),
    "gpu_light": Profile(cpu=4, memory=8 * GiB, disk=200 * GiB, gpu=1),
    "gpu_heavy": Profile(cpu=8, memory=32 * GiB, disk=500 * GiB, gpu=4),
}


class NetworkPolicy(Struct, frozen=True, forbid_unknown_fields=True):
    """What a sandbox may reach. Names are matched whole, `*.` is any subdomain, `:port` narrows (else 80 and 443)."""

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()


class AccessPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of its own files and programs a sandbox may use. Paths are absolute and plain: `*` is a star.

    A path stands for all below it. Of `read_only` and `writable` the longer path decides; `hidden` beats both."""

    read_only: Sequence[str] = ()
    """May be read but not changed."""
    hidden: Sequence[str] = ()
    """May not be opened, listed, executed or looked into."""
    writable: Sequence[str] | None = None
    """If given, everything else is read-only; an empty list makes everything so. None: all but `read_only`."""
    programs: Sequence[str] | None = None
    """If given, only these files, and those below these folders, may be executed, and nobody may change them."""
    sealed: Sequence[str] = ()
    """Paths for graders only. Comes with a later version: Unsupported if it is not empty."""


class Layer(Struct, frozen=True):
    """A read-only tree that can be part of a sandbox's root."""

    digest: str
    """Its name: "sha256:<hex>" of the content, or "host:<path>" for a directory of this machine used as it is."""
    source: str
    """Where it is on this machine: an EROFS file or a directory."""
    format: Literal["erofs", "directory", "stack"] = "directory"
    """A stack has no files of its own: it stands for the layers that it needs."""
    target: str = "/"
    """Where its root appears in the sandbox."""
    path: tuple[str, ...] = ()
    """Folders that it puts in front of PATH."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables that it sets."""
    needs: tuple[str, ...] = ()
    """Keys of layers without which it does not work (an environment's interpreter), highest first."""


class Image(Struct, frozen=True):
    """A base that a sandbox can start from: layers, lowest last, and the environment of its commands."""

    name: str
    digest: str
    layers: tuple[Layer, ...]
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    """Where it would have its commands start, and as whom (`user`). Kept; a sandbox has those it is made with."""
    user: str | None = None


class Result(Struct, kw_only=True):
    """How a command ended and what it used."""

    exit_code: int | None = None
    """None if a signal ended it."""
    signal: int | None = None
    stdout_bytes: bytes = b""
    """What was kept: all of it, or head and tail with a line between that tells what is missing."""
    stderr_bytes: bytes = b""
    stdout_total: int = 0
    """Bytes the command wrote."""
    stderr_total: int = 0
    truncated: bool = False
    duration: float = 0.0
    """Seconds from the start of the process to its end."""
    cpu_seconds: float = 0.0
    peak_memory: int = 0
    """Bytes resident at the most in any one process."""
    oom_kills: int = 0
    limit: Limit | None = None
    """Which limit ended it."""
    changes: dict[str, int] | None = None
    """Files added, changed and removed, where asked for."""
    verdict: Verdict = "ok"

    @property
    def stdout(self) -> str:
        """Text; U+FFFD stands for what is not UTF-8."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


class CommandInfo(Struct, frozen=True):
    """A background command of a sandbox, running or ended not long ago."""

    id: int
    pid: int
    """Inside the sandbox."""
    cmd: tuple[str, ...]
    """As it was given: one text for a shell, or the program and its arguments; cut after 1,000 characters in all."""
    started: float
    """Seconds since the epoch."""
    running: bool
    written: int
    """Bytes of output so far, of both streams together."""
    available: int
    """From which of these on they can still be read."""


class Unclaimed(Struct, frozen=True):
    """What background jobs of a session wrote while none of its commands ran. Head and tail are kept of each stream."""

    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    stdout_total: int = 0
    stderr_total: int = 0


class FileInfo(Struct, frozen=True):
    """One entry of a directory in a sandbox. Names that are not UTF-8 use surrogate escapes, as in `os.fsdecode`."""

    name: str
    path: str
    kind: Literal["file", "directory", "symlink", "fifo", "socket", "device"]
    size: int
    mode: int
    """Permission bits."""
    uid: int
    gid: int
    mtime: float
    """Seconds since the epoch."""
    link: str | None = None
    """Where a symlink points, unresolved."""


class Change(Struct, frozen=True, order=True):
    """One path that differs from the sandbox's layers."""

    path: str
    kind: Literal["added", "changed", "removed"]
    size: int
    """Bytes now; 0 for what was removed and for directories."""


EventKind = Literal["created", "modified", "closed", "removed", "renamed", "attributes", "overflow"]


class FileEvent(Struct, frozen=True):
    """One thing that happened to a file that is watched."""

    kind: EventKind
    """"closed": after writing. "overflow": events were lost; look for yourself what is there now."""
    path: str
    """Below the path that was given to `watch`, and beginning with it."""
    old: str | None = None
    """Where what was renamed had been."""
    directory: bool = False


class Mark(Struct, frozen=True):
    """A moment in the life of a sandbox, for `changes` and `diff` since then. The node keeps the last four."""

    sandbox: str
    id: int


class SandboxInfo(Struct, frozen=True):
    """What is known of a sandbox without asking it."""

    id: str
    state: State
    image: str
    """Digest of the base."""
    layers: tuple[str, ...]
    """Digests, highest first."""
    profile: Profile
    tier: str
    created: float
    """Seconds since the epoch."""
    metadata: dict[str, str] = field(default_factory=dict)
    reason: str | None = None
    """Why it is gone."""
    unenforced: tuple[str, ...] = ()
    """Limits of the profile that this machine or privilege can't enforce."""
    capabilities: tuple[str, ...] = ()
    """What this sandbox can do beyond what every one can."""


class Audit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is written down of what a sandbox does. Nothing that is left out costs anything."""

    syscalls: tuple[str, ...] = ()
    """Names of system calls ("connect", "execve", "mount"). Each then takes some 20 us more. Up to 1,000 a second are
    written down, with a burst of 2,000; of the rest only the number is known."""
    files: bool = False
    """Every file that is opened or executed. For root only."""
    records: int = 10_000
    """How many are kept; the oldest go first."""


class AuditRecord(Struct, frozen=True):
    """One thing that a sandbox did or tried."""

    time: float
    """Seconds since the epoch; a later record has a later one."""
    kind: str
    """The system call; "file" for one that was opened; "denied" for a command that was not let start; or "dropped":
    records that are missing here, `detail` says how many."""
    pid: int
    """Of the thread, as the sandbox counts; 0 where it is not known."""
    program: str
    """The file that it runs, as its mount namespace names it; for "file" the name of the process."""
    detail: str
    """Path, address or arguments. A hint: what a pointer led to may have been changed before the kernel used it."""
    allowed: bool
    """False for a call that no sandbox may make. True: it went on, and may have failed for reasons of its own."""
