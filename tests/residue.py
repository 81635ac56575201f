"""What sandboxes may leave on this machine, as the host sees it: processes, mounts, cgroups, descriptors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Process(NamedTuple):
    """A line of the process table."""

    pid: int
    parent: int
    name: str
    state: str


def processes() -> Iterator[Process]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            head, _, rest = text.rpartition(")")
            state, parent, *_ = rest.split()
            yield Process(int(entry.name), int(parent), head.partition("(")[2], state)


def descendants(root: int | None = None) -> list[Process]:
    """Live processes below `root` (None: this one); zombies do not count."""
    table = list(processes())
    found, wanted = [], {root or os.getpid()}
    while wanted:
        below = [process for process in table if process.parent in wanted]
        found += [process for process in below if process.state != "Z"]
        wanted = {process.pid for process in below}
    return found


def sandbox_processes(root: int | None = None) -> list[Process]:
    return [process for process in descendants(root) if process.name.startswith("shoal-")]


def mounts() -> set[str]:
    return set(Path("/proc/self/mountinfo").read_text().splitlines())


def cgroups(pid: int | None = None) -> set[Path]:
    """Directories of nodes in this machine's cgroup hierarchies; with `pid` only those of that node's process."""
    prefix = "shoal-" if pid is None else f"shoal-{pid}-"
    return {
        Path(folder, name)
        for folder, names, _ in os.walk("/sys/fs/cgroup")
        for name in names
        if name.startswith(prefix)
    }


def maker(cgroup: Path) -> int:
    """The pid of the process whose node made it."""
    return int(cgroup.name.split("-")[1])


def descriptors(pid: int | str = "self") -> dict[int, str]:
    """What the descriptors of a process point to; none if it has just gone."""
    found: dict[int, str] = {}
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except FileNotFoundError:
        return found
    for name in names:
        with suppress(FileNotFoundError):  # that of this very scan
            found[int(name)] = str(Path(f"/proc/{pid}/fd/{name}").readlink())
    return found


def settled(look: Callable[[], T], seconds: float = 5.0) -> T:
    """What `look` finds: nothing as soon as there is nothing, else what is still there after `seconds`."""
    end = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < end:
        time.sleep(0.02)
    return found
