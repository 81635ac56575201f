import os
import subprocess

from shoal.bench import memory

MEMINFO = """\
MemTotal:       1000 kB
MemFree:         400 kB
Buffers:          50 kB
Cached:          200 kB
Shmem:            30 kB
SUnreclaim:       60 kB
HugePages_Total:   0
"""


ZONEINFO = """\
Node 0, zone    DMA32
  pagesets
    cpu: 0
              count:    3
              high:     7
    cpu: 1
              count:    2
"""


def test_the_page_cache_of_disks_is_not_used_but_memory_files_are():
    assert memory.used(memory.read_meminfo(MEMINFO), 0) == (1000 - 400 - 50 - 200 + 30) << 10


def test_free_pages_of_processors_are_not_used():
    free = memory.read_free_per_cpu(ZONEINFO)
    assert free == 5 * os.sysconf("SC_PAGE_SIZE")
    assert memory.used(memory.read_meminfo(MEMINFO), free) == ((1000 - 400 - 50 - 200 + 30) << 10) - free


def test_this_machine_can_be_read():
    found = memory.read()
    assert sum(found.kinds.values()) > 0
    assert 0 < found.used < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_descendants_are_found_at_any_depth():
    script = "sleep 60 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        sleep = int(shell.stdout.readline())
        found = memory.descendants(os.getpid())
        os.kill(sleep, 9)
    assert {shell.pid, sleep} <= set(found)
    assert os.getpid() not in found
