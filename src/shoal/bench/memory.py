"""Where the machine's memory is, by what the kernel says of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

_KINDS: Final = {
    "slab_unreclaimable": "SUnreclaim",
    "slab_reclaimable": "SReclaimable",
    "kernel_stacks": "KernelStack",
    "page_tables": "PageTables",
    "percpu": "Percpu",
    "processes": "AnonPages",
    "files_in_memory": "Shmem",
}
"""Kinds that sandboxes take, by their names in /proc/meminfo. No page is in two of them."""


class Memory(Struct, frozen=True):
    """The machine at one moment, in bytes."""

    used: int
    kinds: dict[str, int]
    """They need not add up to `used`: pages that drivers and namespaces take directly are in none of them."""


def read() -> Memory:
    meminfo = read_meminfo(Path("/proc/meminfo").read_text())
    free_per_cpu = read_free_per_cpu(Path("/proc/zoneinfo").read_text())
    return Memory(used(meminfo, free_per_cpu), {kind: meminfo.get(name, 0) for kind, name in _KINDS.items()})


def read_meminfo(text: str) -> dict[str, int]:
    """Bytes by the names of /proc/meminfo."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(size) << 10 for name, size in found}


def read_free_per_cpu(zoneinfo: str) -> int:
    """Bytes of free pages that processors hold for themselves. After much coming and going they are hundreds of MiB."""
    pages = re.findall(r"^\s+count:\s+(\d+)$", zoneinfo, re.MULTILINE)
    return sum(map(int, pages)) * os.sysconf("SC_PAGE_SIZE")


def used(meminfo: Mapping[str, int], free_per_cpu: int) -> int:
    """Bytes that are gone for others: everything but free pages and the page cache of files on disks.

    Not by MemAvailable, which counts half of the reclaimable slab as there, although the inodes and dentries of a live
    sandbox cannot be reclaimed. MemFree leaves out what processors hold for themselves, hence `free_per_cpu`.
    """
    cache = meminfo["Buffers"] + meminfo["Cached"] - meminfo["Shmem"]
    return meminfo["MemTotal"] - meminfo["MemFree"] - free_per_cpu - cache


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
