"""The same job by others: bubblewrap, crun and runc start `true` on the same root and destroy what they made.

Each gets what it can do of what a sandbox of Shoal has: all namespaces, an id range of its own, the host's system
directories read-only over the skeleton of the image `host`, fresh /proc, /dev, /dev/shm, /dev/mqueue and /workspace,
no_new_privs, the same capabilities; crun and runc the limits of the profile `basic` in a cgroup, bubblewrap (which has
none) the system-call filter. None of them makes the root writable, which Shoal does. They are started by posix_spawn,
which is the cheapest way from Python.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from shoal.bench.job import Job, Place, milliseconds
from shoal.config import data_dir
from shoal.errors import PlatformError, Unsupported
from shoal.image.host import host
from shoal.image.store import Store
from shoal.sandbox.seccomp import compile_filter
from shoal.types import PROFILES, Layer, Profile

PACKAGES: Final = {"bwrap": "bubblewrap", "crun": "crun", "runc": "runc"}
"""Program to Debian's package."""
_CAPABILITIES: Final = (
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID", "CAP_SETPCAP",
    "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_SETFCAP",
)  # fmt: skip
_NAMESPACES: Final = ("pid", "network", "ipc", "uts", "mount", "user", "cgroup")
_IDS: Final = {"containerID": 0, "hostID": 0x6000_0000, "size": 65_536}
_UNIFIED: Final = Path("/sys/fs/cgroup/unified")
_PERIOD_US: Final = 100_000


def find_program(name: str) -> str:
    """Its path. Unsupported says which package has it."""
    if (found := shutil.which(name)) is None:
        raise Unsupported(f"{name} is not installed (Debian: apt install {PACKAGES[name]})")
    return found


# The root


class Root:
    """A copy of the skeleton of the image `host`, and what of the host is bound into it."""

    def __init__(self, folder: Path) -> None:
        layers = host(Store(data_dir() / "store")).layers
        self.path = folder / "root"
        self.bound = tuple(layer for layer in layers if layer.digest.startswith("host:"))
        _copy(next(layer for layer in layers if layer not in self.bound), self.path)


def _copy(layer: Layer, target: Path) -> None:
    """The store's own folder is closed to others, and a container's root must be reachable by its mapped ids."""
    subprocess.run(["cp", "-a", layer.source, str(target)], check=True)
    target.chmod(0o755)


# bubblewrap


@contextmanager
def bwrap(place: Place) -> Iterator[Job]:
    program = find_program("bwrap")
    root = Root(place.folder)
    filter_file = place.folder / "filter.bpf"
    filter_file.write_bytes(compile_filter())
    with filter_file.open("rb") as filter_:
        argv = [program, *bwrap_arguments(root.path, root.bound, filter_.fileno())]

        def once() -> None:
            os.lseek(filter_.fileno(), 0, os.SEEK_SET)
            os.set_inheritable(filter_.fileno(), True)
            spawn(argv)

        yield Job(f"{shlex.join(argv)} {filter_.fileno()}<filter.bpf", lambda: milliseconds(once))


def bwrap_arguments(root: Path, bound: Sequence[Layer], filter_: int) -> list[str]:
    """`filter_`: descriptor of a compiled system-call filter."""
    binds = [part for layer in bound for part in ("--ro-bind", layer.source, layer.target)]
    kept = [part for capability in _CAPABILITIES for part in ("--cap-add", capability)]
    return [
        "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup",
        "--uid", "0", "--gid", "0", "--hostname", "sandbox", "--die-with-parent",
        "--ro-bind", str(root), "/", *binds, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/dev/shm",
        "--mqueue", "/dev/mqueue", "--tmpfs", "/tmp", "--tmpfs", "/workspace", "--chdir", "/workspace",
        "--cap-drop", "ALL", *kept, "--seccomp", str(filter_), "true",
    ]  # fmt: skip


# OCI runtimes


@contextmanager
def crun(place: Place) -> Iterator[Job]:
    with _oci("crun", place) as job:
        yield job


@contextmanager
def runc(place: Place) -> Iterator[Job]:
    with _oci("runc", place) as job:
        yield job


@contextmanager
def _oci(name: str, place: Place) -> Iterator[Job]:
    program = find_program(name)
    if os.geteuid() != 0:
        raise Unsupported(f"{name} gets its cgroups and id ranges as root only")
    hidden = _hide_unified()
    root = Root(place.folder)
    bundle, cgroup = place.folder / "bundle", f"shoal-bench-{os.getpid()}"
    bundle.mkdir()
    config = oci_config(root.path, root.bound, PROFILES["basic"], cgroup)
    (bundle / "config.json").write_bytes(msgspec.json.encode(config))
    argv = [program, "--root", str(place.folder / "state"), "run", "--bundle", str(bundle), cgroup]
    try:
        yield Job(hidden + shlex.join(argv), lambda: milliseconds(lambda: spawn(argv)))
    finally:
        _remove(argv, cgroup)


def _hide_unified() -> str:
    """On a hybrid host neither starts while it sees the version-2 tree. This worker has mounts of its own."""
    if not _UNIFIED.is_dir() or not os.path.ismount(_UNIFIED):
        return ""
    subprocess.run(["umount", "--lazy", str(_UNIFIED)], check=True)
    return f"(umount {_UNIFIED}) "


def oci_config(root: Path, bound: Sequence[Layer], profile: Profile, cgroup: str) -> dict[str, Any]:
    """A bundle's config.json."""
    return {
        "ociVersion": "1.0.2",
        "hostname": "sandbox",
        "root": {"path": str(root), "readonly": True},
        "process": _process(profile),
        "mounts": [*(_bind(layer) for layer in bound), *_fresh_mounts()],
        "linux": {
            "namespaces": [{"type": name} for name in _NAMESPACES],
            "uidMappings": [_IDS],
            "gidMappings": [_IDS],
            "cgroupsPath": f"/{cgroup}",
            "resources": {
                "memory": {"limit": profile.memory},
                "cpu": {"quota": int(profile.cpu * _PERIOD_US), "period": _PERIOD_US},
                "pids": {"limit": profile.processes},
            },
        },
    }


def _process(profile: Profile) -> dict[str, Any]:
    files = {"type": "RLIMIT_NOFILE", "hard": profile.open_files, "soft": profile.open_files}
    return {
        "user": {"uid": 0, "gid": 0},
        "args": ["true"],
        "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
        "cwd": "/workspace",
        "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), _CAPABILITIES),
        "rlimits": [files],
        "noNewPrivileges": True,
    }


def _bind(layer: Layer) -> dict[str, Any]:
    return _mount(layer.target, "bind", "rbind", "ro", source=layer.source)


def _fresh_mounts() -> list[Mapping[str, Any]]:
    return [
        _mount("/proc", "proc", "nosuid", "nodev", "noexec"),
        _mount("/sys", "sysfs", "nosuid", "nodev", "noexec", "ro"),
        _mount("/dev", "tmpfs", "nosuid", "mode=755", "size=64k"),
        _mount("/dev/pts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"),
        _mount("/dev/shm", "tmpfs", "nosuid", "nodev", "mode=1777"),
        _mount("/dev/mqueue", "mqueue", "nosuid", "nodev", "noexec"),
        _mount("/tmp", "tmpfs", "nosuid", "nodev", "mode=1777"),
        _mount("/workspace", "tmpfs", "nosuid", "nodev", "mode=777"),
    ]


def _mount(target: str, kind: str, *options: str, source: str = "") -> dict[str, Any]:
    return {"destination": target, "type": kind, "source": source or kind, "options": list(options)}


def _remove(argv: Sequence[str], cgroup: str) -> None:
    """What an interrupted run may have left: the container and its groups."""
    program, root = argv[0], argv[2]
    subprocess.run([program, "--root", root, "delete", "--force", cgroup], check=False, capture_output=True)
    for left in Path("/sys/fs/cgroup").glob(f"*/{cgroup}"):
        with suppress(OSError):
            left.rmdir()


def spawn(argv: list[str]) -> None:
    """Runs it and waits. PlatformError if it fails."""
    pid = os.posix_spawn(
        argv[0], argv, os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)]
    )
    if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        raise PlatformError(f"{argv[0]} ended with {code}")
