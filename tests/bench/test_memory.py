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


def test_the_page_cache_of_disks_is_not_used_but_memory_files_are():
    assert memory.used(memory.read_meminfo(MEMINFO)) == (1000 - 400 - 50 - 200 + 30) << 10


def test_kinds_that_this_kernel_does_not_tell_are_zero():
    kinds = memory.by_kind(memory.read_meminfo(MEMINFO))
    assert kinds["slab_unreclaimable"] == 60 << 10
    assert kinds["percpu"] == 0


def test_this_machine_can_be_read():
    found = memory.read_meminfo()
    assert 0 < memory.used(found) < found["MemTotal"]
    assert memory.proportional([os.getpid()]) > 1 << 20
    assert memory.proportional([2**22 + 1]) == 0


def test_descendants_are_found_at_any_depth():
    script = "sleep 60 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        sleep = int(shell.stdout.readline())
        found = memory.descendants(os.getpid())
        os.kill(sleep, 9)
    assert {shell.pid, sleep} <= set(found)
    assert os.getpid() not in found
