"""Every file below /proc and /sys that a sandbox can read, and what it tells. A new one needs a decision here."""

from __future__ import annotations

import re
from typing import Final

import pytest

import shoal

from .intruder import USERS, python

pytestmark = pytest.mark.root

OWN: Final = (
    r"self/.*|thread-self/.*|mounts|net/.*|keys|key-users|sysvipc/.*|locks",
    r"sys/(net|user)/.*|sys/fs/mqueue/.*|sys/kernel/(shm.*|msg.*|sem.*|auto_msgmni|hostname|domainname|pid_max|ns_last_pid)",
    r"fs/nfsd/.*|fs/lockd/.*",
)
"""The sandbox's own: by its namespaces. /proc/locks shows no process of others, but device and inode of their locks."""
KERNEL: Final = (
    r"version|cmdline|config\.gz|filesystems|execdomains|crypto|devices|misc|dma|cgroups|consoles|kallsyms|modules|fb",
    r"tty/(ldiscs|drivers)|driver/.*|sys/(abi|debug|dev|fs|kernel|vm|sunrpc|crypto|xen)/.*|dynamic_debug/.*|bootconfig",
)
"""Which kernel, and how it is set up: the same on all machines of a kind. Addresses in kallsyms read as zeroes."""
SHOWN: Final = (r"meminfo|cpuinfo|stat|loadavg|vmstat|diskstats|swaps|uptime",)
"""Numbers of the machine for which a sandbox may be given its own."""
MACHINE: Final = (
    r"iomem|ioports|interrupts|softirqs|irq/.*|zoneinfo|buddyinfo|pagetypeinfo|partitions|pressure/.*|schedstat|mdstat|mtrr",
    r"fs/(ext4|xfs|jbd2|btrfs|fscache|aufs|cifs)/.*|bus/.*|acpi/.*|scsi/.*|asound/.*|timer_list|latency_stats",
)
"""The machine's hardware and how busy it is. It names no tenant and no file. To cover all of it by mounts would cost a
create some 0.4 ms; the microvm tier shows none."""
SYS: Final = (r"devices/system/(cpu|node)/.*|kernel/mm/transparent_hugepage/.*|kernel/limits/.*",)
"""A tree that we filled."""


@pytest.mark.parametrize("user", USERS)
def test_every_readable_file_is_known(calm: shoal.Sandbox, user: str) -> None:
    code = """
    found = []
    for folder, folders, names in (entry for top in ("/proc", "/sys") for entry in os.walk(top)):
        if folder == "/proc": folders[:] = [name for name in folders if not name.isdigit()]
        for name in names:
            try: os.close(os.open(f"{folder}/{name}", os.O_RDONLY | os.O_NONBLOCK))
            except OSError: continue
            found.append(f"{folder}/{name}")
    answer(found)
    """
    found = python(calm, code, user)
    assert len(found) > 300
    proc = re.compile("|".join((*OWN, *KERNEL, *SHOWN, *MACHINE)))
    sys = re.compile("|".join(SYS))
    unknown = [
        path for path in found if not (sys if path.startswith("/sys/") else proc).fullmatch(path.split("/", 2)[2])
    ]
    assert unknown == []


def test_none_of_it_names_a_tenant(calm: shoal.Sandbox) -> None:
    """Neither ids of sandboxes, nor our folders and cgroups, nor the node."""
    with shoal.Sandbox.create() as other:
        other.commands.run(["/bin/sleep", "0.1"])
        code = f"""
        words = [word.encode() for word in ({other.id!r}, {calm.id!r}, "shoal-", ".shoal", "/sb-")]
        found = []
        for folder, folders, names in os.walk("/proc"):
            if folder == "/proc": folders[:] = [name for name in folders if not name.isdigit()]
            if folder.startswith(("/proc/self", "/proc/thread-self")): continue
            for name in names:
                try:
                    descriptor = os.open(f"{{folder}}/{{name}}", os.O_RDONLY | os.O_NONBLOCK)
                    text = os.read(descriptor, 1 << 20)
                    os.close(descriptor)
                except OSError: continue
                found += [f"{{folder}}/{{name}}" for word in words if word in text]
        answer(found)
        """
        assert python(calm, code) == []
