"""The machine as a sandbox sees it: a small /sys, and files of /proc that show its limits and nothing of the host.

Programs size themselves by these (libc, OpenMP, the JVM, allocators, test runners). Each tree is made once for all
sandboxes with the same numbers, so what it says is what a sandbox has at its start.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from shoal.sandbox.trees import make_folders, write_file
from shoal.types import KiB, Profile

PROC_FOLDER: Final = "kernel/limits"
"""Where in /sys the files for /proc lie: they are bound from there, which is by far the cheapest way."""
PROC_FILES: Final = ("meminfo", "cpuinfo", "stat", "loadavg", "vmstat", "diskstats", "swaps")
"""What covers those of a new /proc. /proc/uptime stays: `ps` reckons the age of processes by it."""
_USED: Final = 32
"""This part of the memory shows as taken, as in a machine that has just started."""

_SYS_FOLDERS: Final = (
    "block", "bus", "class/net", "dev", "devices/system", "firmware", "fs/cgroup", "kernel", "module", "power",
)  # fmt: skip
_COPIED: Final = (
    "devices/system/cpu/kernel_max",
    "kernel/mm/transparent_hugepage/enabled",
    "kernel/mm/transparent_hugepage/hpage_pmd_size",
)
_CACHE_FACTS: Final = ("level", "type", "size", "coherency_line_size", "number_of_sets", "ways_of_associativity")
_OWN: Final = ("thread_siblings", "core_cpus")
_SHARED: Final = ("core_siblings", "package_cpus", "die_cpus")
_SHARED_CACHE: Final = 3
"""The level from which a cache is all processors'."""


def processors(profile: Profile, available: int) -> int:
    """How many a sandbox sees and runs on: its quota rounded up, and no more than there are."""
    return max(1, min(math.ceil(profile.cpu), available))


# /sys


def fill(root: int, count: int, memory: int) -> None:
    """Writes all that a sandbox with so many processors and bytes sees into an empty directory, given by descriptor."""
    fill_sys(root, count)
    fill_proc(root, count, memory)


def _write(root: int, files: Iterable[tuple[str, bytes]]) -> None:
    """What is the same is written once and linked: most files of most processors are, and each takes a page."""
    written: dict[bytes, str] = {}
    for path, data in files:
        if (first := written.setdefault(data, path)) == path:
            write_file(root, path, data)
        else:
            make_folders(root, path.rpartition("/")[0])
            os.link(first, path, src_dir_fd=root, dst_dir_fd=root)


def fill_sys(root: int, count: int, source: Path = Path("/sys")) -> None:
    """The harmless part of a /sys with `count` processors."""
    for folder in _SYS_FOLDERS:
        make_folders(root, folder)
    copied = [(path, (source / path).read_bytes()) for path in _COPIED if (source / path).is_file()]
    numbers = _processors(count, source / "devices/system/cpu/cpu0/cache")
    _write(root, [*copied, *((f"devices/system/{path}", f"{text}\n".encode()) for path, text in numbers)])


def _processors(count: int, caches: Path) -> Iterator[tuple[str, str]]:
    everything = range(count)
    for name in ("online", "possible", "present"):
        yield f"cpu/{name}", _listed(everything)
    for name in ("online", "possible"):
        yield f"node/{name}", "0"
    yield "node/node0/cpulist", _listed(everything)
    yield "node/node0/cpumap", _mask(everything)
    for number in everything:
        yield from _topology(number, everything)
        yield from _caches(number, everything, caches)


def _topology(number: int, everything: range) -> Iterator[tuple[str, str]]:
    """Cores with one thread each, in one package."""
    folder, own = f"cpu/cpu{number}/topology", range(number, number + 1)
    for name, text in (("physical_package_id", "0"), ("die_id", "0"), ("core_id", str(number))):
        yield f"{folder}/{name}", text
    for names, members in ((_OWN, own), (_SHARED, everything)):
        for name in names:
            yield f"{folder}/{name}", _mask(members)
            yield f"{folder}/{name}_list", _listed(members)


def _caches(number: int, everything: range, source: Path) -> Iterator[tuple[str, str]]:
    """Sizes as the host has them."""
    for index in sorted(source.glob("index*")):
        facts = {name: (index / name).read_text().strip() for name in _CACHE_FACTS if (index / name).exists()}
        shared = int(facts.get("level", "1")) >= _SHARED_CACHE
        members = everything if shared else range(number, number + 1)
        facts |= {"shared_cpu_list": _listed(members), "shared_cpu_map": _mask(members)}
        for name, text in facts.items():
            yield f"cpu/cpu{number}/cache/{index.name}/{name}", text


def _listed(members: range) -> str:
    return str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}"


def _mask(members: range) -> str:
    """Hexadecimal, with a comma after each 32 bits, as the kernel writes it."""
    text = f"{sum(1 << member for member in members):x}"
    text = text.zfill(-(-len(text) // 8) * 8) if len(text) > 8 else text
    return ",".join(text[at : at + 8] for at in range(0, len(text), 8)) if len(text) > 8 else text


# /proc


def fill_proc(root: int, count: int, memory: int, source: Path = Path("/proc")) -> None:
    """`PROC_FILES` of a machine with `count` processors and `memory` bytes."""
    _write(root, ((f"{PROC_FOLDER}/{name}", _WRITERS[name](source, count, memory).encode()) for name in PROC_FILES))


def _meminfo(source: Path, _count: int, memory: int) -> str:
    total = memory // KiB
    free = total - total // _USED
    known = {"MemTotal": total, "MemFree": free, "MemAvailable": free, "CommitLimit": total}
    lines = []
    for line in (source / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        unit = " kB" if value.endswith("kB") else ""
        number = value.removesuffix("kB").strip() if name == "Hugepagesize" else str(known.get(name, 0))
        lines.append(f"{name + ':':<16}{number:>8}{unit}\n")
    return "".join(lines)


def _cpuinfo(source: Path, count: int, _memory: int) -> str:
    """The host's kinds of processors, numbered anew; no line that tells one machine from another of its kind."""
    blocks = [block for block in (source / "cpuinfo").read_text().split("\n\n") if block.startswith("processor")]
    return "".join(f"{_renumbered(blocks[number % len(blocks)], number, count)}\n\n" for number in range(count))


def _renumbered(block: str, number: int, count: int) -> str:
    values = {"physical id": 0, "siblings": count, "cpu cores": count}
    values |= dict.fromkeys(("processor", "core id", "apicid", "initial apicid"), number)
    for name, value in values.items():
        block = re.sub(rf"^({name}\s*: ).*$", rf"\g<1>{value}", block, flags=re.MULTILINE)
    return block.rstrip("\n")


def _stat(source: Path, count: int, _memory: int) -> str:
    """No time used yet. The moment of booting is the machine's, by which `ps` dates processes."""
    booted = re.search(r"^btime \d+$", (source / "stat").read_text(), re.MULTILINE)
    names = ["cpu ", *(f"cpu{number}" for number in range(count))]
    times = [name + " 0" * 10 for name in names]
    rest = ["intr 0", "ctxt 0", booted[0] if booted else "btime 0", "processes 1", "procs_running 1", "procs_blocked 0"]
    return "\n".join([*times, *rest, "softirq" + " 0" * 11, ""])


def _vmstat(source: Path, _count: int, memory: int) -> str:
    names = [line.partition(" ")[0] for line in (source / "vmstat").read_text().splitlines()]
    free = (memory - memory // _USED) // (4 * KiB)
    return "".join(f"{name} {free if name == 'nr_free_pages' else 0}\n" for name in names)


def _loadavg(_source: Path, _count: int, _memory: int) -> str:
    return "0.00 0.00 0.00 1/1 1\n"


def _diskstats(_source: Path, _count: int, _memory: int) -> str:
    return ""


def _swaps(_source: Path, _count: int, _memory: int) -> str:
    return "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"


_WRITERS: Final[dict[str, Callable[[Path, int, int], str]]] = {
    "meminfo": _meminfo,
    "cpuinfo": _cpuinfo,
    "stat": _stat,
    "loadavg": _loadavg,
    "vmstat": _vmstat,
    "diskstats": _diskstats,
    "swaps": _swaps,
}
