"""Facts about this machine that cost next to nothing to read: for benchmarks, `doctor` and bug reports."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from shoal import config

Fact = str | int


def machine(data: Path | None = None) -> dict[str, Fact]:
    """Memory is in bytes; `filesystem` is the type under `data` (the data folder, if None)."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "distribution": distribution(),
        "python": platform.python_version(),
        "filesystem": filesystem(data or config.data_dir()),
        "cgroup": cgroup_mode(),
        "user": os.geteuid(),
    }


def cpu_model() -> str:
    """As the kernel names it; the architecture where it gives no name (ARM)."""
    match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1] if match else platform.machine()


def distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    except OSError:
        return "unknown"


def existing(path: Path) -> Path:
    """The path itself or its nearest ancestor that is there."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if os.path.exists(place))


def filesystem(path: Path, mountinfo: str | None = None) -> str:
    """The type of the file system that `path` is on, or will be on once it is made."""
    text = Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo
    place = existing(path).resolve()
    # Of mounts at one place the last covers the others, hence `>=`.
    best, kind = -1, "unknown"
    for line in text.splitlines():
        fields, _, rest = line.partition(" - ")
        target = Path(unescape(fields.split(" ")[4]))
        if (place == target or target in place.parents) and len(target.parts) >= best:
            best, kind = len(target.parts), rest.split(" ")[0]
    return kind


def unescape(field: str) -> str:
    r"""The kernel writes blank, tab, newline and backslash in mount tables as \040 and the like."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def cgroup_mode(mountinfo: str | None = None) -> str:
    """ "v2", "v1", "hybrid" (v1 controllers beside a v2 tree) or "none"."""
    text = Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo
    kinds = {line.partition(" - ")[2].split(" ")[0] for line in text.splitlines()}
    found = kinds & {"cgroup", "cgroup2"}
    if len(found) == 2:
        return "hybrid"
    return {"cgroup": "v1", "cgroup2": "v2"}[found.pop()] if found else "none"
