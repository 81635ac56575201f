"""Where the machine's memory is, by what the kernel says of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_KINDS = {
    "slab_unreclaimable": "SUnreclaim",
    "slab_reclaimable": "SReclaimable",
    "kernel_stacks": "KernelStack",
    "page_tables": "PageTables",
    "percpu": "Percpu",
    "processes": "AnonPages",
    "files_in_memory": "Shmem",
    "vmalloc": "VmallocUsed",
}


def read_meminfo(text: str | None = None) -> dict[str, int]:
    """Bytes by the names of /proc/meminfo."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", text or Path("/proc/meminfo").read_text(), re.MULTILINE)
    return {name: int(size) << 10 for name, size in found}


def free_per_cpu(text: str | None = None) -> int:
    """Bytes of free pages that processors hold for themselves, from the text of /proc/zoneinfo.

    MemFree leaves them out, and after much coming and going they are hundreds of MiB.
    """
    text = Path("/proc/zoneinfo").read_text() if text is None else text
    pages = re.findall(r"^\s+count:\s+(\d+)$", text, re.MULTILINE)
    return sum(map(int, pages)) * os.sysconf("SC_PAGE_SIZE")


def used(meminfo: dict[str, int], per_cpu: int = 0) -> int:
    """Bytes that are gone for others: everything but free pages and the page cache of files on disks.

    `per_cpu`: of `free_per_cpu`, read at the same time.

    Not by MemAvailable, which counts half of the reclaimable slab as there, although the inodes and dentries of a live
    sandbox cannot be reclaimed; and not as a sum of kinds, since pages that drivers and namespaces take directly are
    in none of them.
    """
    cache = meminfo["Buffers"] + meminfo["Cached"] - meminfo["Shmem"]
    return meminfo["MemTotal"] - meminfo["MemFree"] - per_cpu - cache


def by_kind(meminfo: dict[str, int]) -> dict[str, int]:
    """Bytes of the kinds that sandboxes take. They need not add up to `used`."""
    return {kind: meminfo.get(name, 0) for kind, name in _KINDS.items()}


def proportional(pids: Iterable[int]) -> int:
    """Bytes that these processes hold, what they share with others divided by the number of sharers."""
    return sum(_pss(pid) for pid in pids)


def _pss(pid: int) -> int:
    with suppress(OSError):
        if match := re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE):
            return int(match[1]) << 10
    return 0


def descendants(ancestor: int) -> list[int]:
    """Processes below one, at the moment; it itself is not among them."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (parent := parent_of(int(name))) is not None:
            children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    waiting = [ancestor]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def parent_of(pid: int) -> int | None:
    """None if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat[stat.rindex(")") + 2 :].split()[1])
