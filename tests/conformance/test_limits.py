"""Limits: what a sandbox sees of them, what happens at each, and which one a result is said to have met."""

from __future__ import annotations

import json
import os
import re
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import shoal
from shoal.types import GiB, MiB, Profile

HOG = ["python3", "-c", "x = bytearray(1 << 30); x[::4096] = b'x' * len(x[::4096])"]
SMALL = Profile(cpu=1, memory=64 * MiB, disk=32 * MiB, processes=64)


def enforced(box: shoal.Sandbox, *limits: str) -> None:
    if missing := set(limits) & set(box.info().unenforced):
        pytest.skip(f"not enforced here: {', '.join(missing)}; see `shoal doctor`")


@pytest.fixture
def small() -> Iterator[shoal.Sandbox]:
    with shoal.Sandbox.create(profile=SMALL) as box:
        yield box


def run(box: shoal.Sandbox, code: str, timeout: float = 30) -> shoal.Result:
    return box.commands.run(["python3", "-c", textwrap.dedent(code)], timeout=timeout)


# What it sees


def test_programs_size_themselves_by_the_profile(small: shoal.Sandbox) -> None:
    """As coreutils, procps, Python, psutil, Node and OpenMP read it."""
    code = """
    import os, re
    text = open("/proc/meminfo").read()
    meminfo = {name: int(number) << 10 for name, number in re.findall(r"^(\\w+):\\s+(\\d+) kB", text, re.M)}
    stat = [line for line in open("/proc/stat") if re.match(r"cpu\\d", line)]
    cpuinfo = open("/proc/cpuinfo").read().count("processor\\t")
    online = open("/sys/devices/system/cpu/online").read().strip()
    folders = [name for name in os.listdir("/sys/devices/system/cpu") if re.match(r"cpu\\d", name)]
    print(os.cpu_count(), len(os.sched_getaffinity(0)), len(stat), cpuinfo, len(folders), online)
    print(meminfo["MemTotal"], 0 < meminfo["MemAvailable"] < meminfo["MemTotal"], meminfo["SwapTotal"])
    """
    result = run(small, code)
    assert result.stdout.splitlines() == ["1 1 1 1 1 0", f"{SMALL.memory} True 0"], result.stderr
    assert small.commands.run("nproc; nproc --all").stdout == "1\n1\n"
    total = small.commands.run("free -b | awk '/^Mem/ {print $2}'").stdout
    assert int(total) == SMALL.memory


def test_who_may_use_every_processor_sees_every_one() -> None:
    with shoal.Sandbox.create(profile=Profile(cpu=4096, disk=16 * MiB)) as box:
        machine = len(os.sched_getaffinity(0))
        assert box.commands.run("nproc").stdout == f"{machine}\n"
        assert box.commands.run("grep -c ^processor /proc/cpuinfo").stdout == f"{machine}\n"


@pytest.mark.parametrize("user", ["root", "user"])
def test_the_numbers_cannot_be_changed_or_taken_away(small: shoal.Sandbox, user: str) -> None:
    attempts = """
    echo x > /proc/meminfo; umount /proc/meminfo; mount --bind /etc/hosts /proc/meminfo; rm -f /proc/cpuinfo
    mount -t proc proc /tmp; mv /proc/stat /tmp/; echo x > /sys/kernel/limits/meminfo; rm -f /sys/kernel/limits/meminfo
    """
    if user == "user" and small.commands.run("id user").exit_code != 0:
        pytest.skip("this tier has one user only; see `shoal doctor`")
    before = small.commands.run("cat /proc/meminfo /proc/cpuinfo /proc/stat").stdout
    small.commands.run(attempts, user=user)
    assert small.commands.run("cat /proc/meminfo /proc/cpuinfo /proc/stat").stdout == before


def test_the_hosts_load_and_disks_do_not_show(small: shoal.Sandbox) -> None:
    shown = small.commands.run("cat /proc/loadavg /proc/diskstats; tail -n +2 /proc/swaps; grep -v ' 0$' /proc/vmstat")
    assert re.fullmatch(r"0\.00 0\.00 0\.00 1/1 1\nnr_free_pages \d+\n", shown.stdout), shown.stdout


def test_tools_that_read_them_work(small: shoal.Sandbox) -> None:
    for command in ("free", "uptime", "ps aux", "top -b -n 1", "vmstat", "lscpu", "df /"):
        result = small.commands.run(f"command -v {command.split()[0]} >/dev/null || exit 0; {command}", timeout=20)
        assert (result.exit_code, result.stderr) == (0, ""), command
    age = small.commands.run("ps -o etimes= -p 1").stdout
    assert 0 <= int(age) < 600


def test_processors_stay_those_of_the_sandbox_for_whatever_it_starts(small: shoal.Sandbox) -> None:
    assert small.commands.run("setsid sh -c 'nproc' & wait; sh -c 'sh -c nproc'").stdout == "1\n1\n"


# Which limit it was


def test_a_success_and_an_ordinary_failure_met_none(small: shoal.Sandbox) -> None:
    for command, code in (("true", 0), ("exit 7", 7), ("kill -9 $$", None), ("exit 137", 137)):
        result = small.commands.run(command)
        assert (result.exit_code, result.limit, result.verdict) == (code, None, "ok")


def test_time_and_silence(small: shoal.Sandbox) -> None:
    late = small.commands.run("sleep 20", timeout=0.5)
    assert (late.limit, late.verdict, late.exit_code, late.signal) == ("timeout", "policy_timeout", None, 9)
    mute = small.commands.run("echo x; sleep 20", silence=0.5)
    assert (mute.limit, mute.verdict, mute.exit_code, mute.signal) == ("silence", "policy_timeout", None, 9)


def test_t13_memory(small: shoal.Sandbox) -> None:
    enforced(small, "memory")
    hungry = small.commands.run(HOG, timeout=60)
    assert (hungry.exit_code, hungry.signal, hungry.limit, hungry.verdict) == (None, 9, "memory", "policy_oom")
    assert hungry.oom_kills >= 1
    itself = small.commands.run("kill -9 $$")
    assert (itself.signal, itself.oom_kills, itself.limit, itself.verdict) == (9, 0, None, "ok")
    parent = small.commands.run(f"python3 -c {HOG[2]!r}; exit 0", timeout=60)
    assert (parent.exit_code, parent.signal, parent.limit, parent.verdict) == (0, None, None, "ok")
    assert parent.oom_kills >= 1
    code = small.commands.run("exit 137")
    assert (code.exit_code, code.signal, code.oom_kills, code.limit) == (137, None, 0, None)


@pytest.mark.parametrize("victim", ["itself", "its child"])
def test_t13_memory_of_two_at_once(small: shoal.Sandbox, victim: str) -> None:
    """The kernel counts for the sandbox; who was killed, or says by 137 that its child was, takes the blame alone."""
    enforced(small, "memory")
    bystander = small.commands.run("sleep 4; exit 1", background=True)
    hungry = small.commands.run(HOG if victim == "itself" else f"python3 -c {HOG[2]!r}", timeout=60)
    assert (hungry.limit, hungry.verdict) == ("memory", "policy_oom")
    beside = bystander.wait()
    assert (beside.exit_code, beside.oom_kills, beside.limit, beside.verdict) == (1, 0, None, "ok")


def test_init_survives_every_oom(small: shoal.Sandbox) -> None:
    enforced(small, "memory")
    for _ in range(5):
        assert small.commands.run(HOG, timeout=60).limit == "memory"
    everything = "for i in 1 2 3 4 5 6; do python3 -c 'x = b\"x\" * (1 << 30)' & done; wait; exit 3"
    assert small.commands.run(everything, timeout=60).limit == "memory"
    assert small.commands.run("echo alive").stdout == "alive\n"


def test_files_in_memory_end_by_enospc_and_not_by_oom() -> None:
    """More than the profile's memory, in bytes and in inodes: what is writable comes on top of it."""
    with shoal.Sandbox.create(profile=Profile(memory=48 * MiB, disk=160 * MiB, inodes=30_000)) as box:
        full = box.commands.run("head -c 300M /dev/zero > /workspace/big", timeout=60)
        assert (full.exit_code, full.limit, full.oom_kills) == (1, "disk", 0)
        box.commands.run("rm /workspace/big", check=True)
        many = run(box, "import os\nfor i in range(50000): os.mknod(f'/workspace/{i}')", timeout=60)
        assert (many.exit_code, many.limit, many.oom_kills) == (1, "disk", 0)


FORKS = """
import os, time
for _ in range(200):
    if os.fork() == 0: time.sleep(1); os._exit(0)
"""


def test_processes(small: shoal.Sandbox) -> None:
    result = run(small, FORKS)
    assert result.exit_code == 1
    assert "BlockingIOError" in result.stderr
    time.sleep(1.5)
    assert small.commands.run("echo alive").stdout == "alive\n"


@pytest.mark.root
def test_processes_are_named_as_the_limit(small: shoal.Sandbox) -> None:
    """An ordinary user's are counted by their uid, where the kernel tells of no single refusal."""
    enforced(small, "processes")
    result = run(small, FORKS)
    assert (result.limit, result.verdict) == ("processes", "policy_limit")
    time.sleep(1.5)
    survivor = run(small, FORKS.replace("os.fork() == 0", "forked() == 0").replace("for _", FORKED + "for _"))
    assert (survivor.exit_code, survivor.limit) == (0, None)
    time.sleep(1.5)
    after = small.commands.run("exit 5")
    assert (after.exit_code, after.limit) == (5, None)


FORKED = """
def forked():
    try: return os.fork()
    except BlockingIOError: return -1
"""


@pytest.mark.parametrize("upper", ["memory", "disk"])
def test_disk(upper: str) -> None:
    """Bytes or inodes are gone when a command fails: a judgement, as no kernel says whose write was refused."""
    profile = Profile(memory=128 * MiB, disk=32 * MiB, inodes=2048, upper=upper)  # type: ignore[arg-type]
    try:
        box = shoal.Sandbox.create(profile=profile)
    except shoal.errors.Unsupported as missing:
        pytest.skip(f"{missing}; see `shoal doctor`")
    with box:
        full = box.commands.run("head -c 100000000 /dev/zero > /workspace/big")
        assert (full.exit_code, full.limit, full.verdict) == (1, "disk", "policy_limit")
        assert box.commands.run("rm /workspace/big; exit 1").limit is None
        many = run(box, "import os\nfor i in range(5000): os.mknod(f'/workspace/{i}')")
        assert (many.exit_code, many.limit, many.verdict) == (1, "disk", "policy_limit")
        assert box.commands.run("true").limit is None


def test_output() -> None:
    with shoal.Sandbox.create(profile=Profile(output=5 * MiB, disk=16 * MiB)) as box:
        endless = box.commands.run("yes", timeout=60)
        assert (endless.exit_code, endless.signal, endless.limit, endless.verdict) == (
            None,
            9,
            "output",
            "policy_limit",
        )
        assert 5 * MiB < endless.stdout_total < 16 * MiB
        both = box.commands.run("yes | head -c 3M; yes | head -c 3M >&2; sleep 20", timeout=60)
        assert (both.limit, both.verdict) == ("output", "policy_limit")
        enough = box.commands.run("head -c 5M /dev/zero", output_limit="4KiB")
        assert (enough.exit_code, enough.limit, enough.truncated, enough.stdout_total) == (0, None, True, 5 * MiB)
        handle = box.commands.run("yes", background=True, timeout=60)
        taken = sum(len(piece.data) for piece in handle)
        assert taken > 5 * MiB
        assert handle.wait().limit == "output"
    with pytest.raises(shoal.InvalidRequest, match="output"):
        shoal.Sandbox.create(profile=Profile(output=0))


# Disk on every mount

FILL = """
import errno, json, os
found, total = {}, 0
for line in open("/proc/mounts"):
    place, options = line.split()[1], line.split()[3].split(",")
    if "rw" not in options: continue
    for folder in (place, os.path.join(place, "tmp"), os.path.join(place, "workspace")):
        try:
            with open(os.path.join(folder, "fill"), "wb", buffering=0) as file:
                for _ in range(1000): total += file.write(bytes(1000000))
            found[folder] = "ok"
        except OSError as error: found[folder] = errno.errorcode[error.errno]
print(json.dumps([found, total]))
"""


def test_t15_disk_on_every_mount() -> None:
    """256 MB: 1 GB into each writable mount; then rm, and there is room again."""
    profile = Profile(memory=256 * MiB, disk=256_000_000, processes=32)
    with shoal.Sandbox.create(profile=profile) as box:
        result = run(box, FILL, timeout=120)
        assert result.exit_code == 0, result.stderr
        found, total = json.loads(result.stdout)
        assert {"/", "/dev/shm", "/dev/mqueue", "/dev/pts", "/proc"} <= found.keys()
        assert "ok" not in found.values()
        assert "ENOSPC" in found.values()
        assert total <= 270_000_000
        assert box.commands.run("find / -xdev -name fill -delete; rm -f /dev/shm/fill; rm -f /usr/fill").exit_code == 0
        assert box.commands.run("head -c 1000000 /dev/zero > /workspace/more && rm /workspace/more").exit_code == 0
        assert box.info().profile.disk == 256_000_000


def test_info_tells_what_was_given() -> None:
    with shoal.Sandbox.create(profile=Profile(disk=32 * MiB)) as box:
        assert (box.info().profile.upper, box.info().profile.disk) == ("memory", 32 * MiB)
        blocks = box.commands.run("df -B1 --output=size /workspace | tail -1").stdout
        assert int(blocks) == 32 * MiB


@pytest.mark.root
def test_what_memory_cannot_hold_goes_to_disk_and_two_are_apart() -> None:
    with shoal.Sandbox.create(profile=Profile(disk=1 << 44)) as one, shoal.Sandbox.create(profile="large") as other:
        for box in (one, other):
            profile = box.info().profile
            if profile.upper != "disk":
                pytest.skip("no writable layers on disk here; see storage.uppers in `shoal doctor`")
            size = int(box.commands.run("df -B1 --output=size /workspace | tail -1").stdout)
            assert 0.9 * profile.disk < size <= profile.disk
        one.commands.run("head -c 20M /dev/zero > /workspace/mine", check=True)
        assert not other.files.exists("/workspace/mine")
        assert one.info().profile.disk > 1 * GiB


# Neighbours


@contextmanager
def watched() -> Iterator[list[float]]:
    """How long `true` takes in a neighbour, every 0.2 s."""
    waits: list[float] = []
    stop = threading.Event()
    with shoal.Sandbox.create(profile=SMALL) as neighbour:

        def look() -> None:
            while not stop.wait(0.2):
                begun = time.monotonic()
                assert neighbour.commands.run(["true"]).exit_code == 0
                waits.append(time.monotonic() - begun)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield waits
        finally:
            stop.set()
            thread.join()


@pytest.mark.parametrize(
    ("nuisance", "seconds"),
    [
        (":(){ :|:& };:; sleep 60", 5),
        ("while :; do python3 -c 'x = bytearray(1 << 30); x[::4096] = b\"x\" * len(x[::4096])'; done", 3),
        ("yes", 3),
        ("while :; do head -c 100M /dev/zero > /tmp/x; rm /tmp/x; done", 3),
    ],
    ids=["fork bomb", "memory hog", "yes", "disk"],
)
def test_t14_a_neighbour_is_served(nuisance: str, seconds: int) -> None:
    profile = Profile(cpu=2, memory=64 * MiB, disk=32 * MiB, processes=128)
    with shoal.Sandbox.create(profile=profile) as box:
        with watched() as waits:
            start = time.monotonic()
            result = box.commands.run(nuisance, timeout=seconds)
            assert time.monotonic() - start < seconds + 2
        assert result.limit == "timeout"
        assert len(waits) >= 5
        assert sorted(waits)[int(len(waits) * 0.99)] < 1
        begun = time.monotonic()
        box.kill()
        assert time.monotonic() - begun < 4


def test_cpu_quota_and_weight() -> None:
    """On a busy machine "latency" has ten times the weight; the margins are wide, others run here too."""
    loops = "for i in 1 2 3 4; do (while :; do :; done) & done; sleep 3; kill $(jobs -p); wait; exit 0"
    used: dict[str, float] = {}

    def burn(box: shoal.Sandbox, kind: str) -> None:
        used[kind] = box.commands.run(loops, timeout=15).cpu_seconds

    plain, quick = (Profile(cpu=64, cpu_class=kind, disk=16 * MiB) for kind in ("best-effort", "latency"))
    with shoal.Sandbox.create(profile=plain) as low, shoal.Sandbox.create(profile=quick) as high:
        enforced(low, "cpu")
        threads = [
            threading.Thread(target=burn, args=(box, kind)) for box, kind in ((low, "best-effort"), (high, "latency"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert used["latency"] > 2 * used["best-effort"], used
    with shoal.Sandbox.create(profile=Profile(cpu=0.25, disk=16 * MiB)) as box:
        result = box.commands.run("while :; do :; done", timeout=2)
        assert result.cpu_seconds < 0.25 * 2 + 0.5


def test_open_files() -> None:
    with shoal.Sandbox.create(profile=Profile(open_files=100, disk=16 * MiB)) as box:
        result = run(box, "import os\nheld = []\nwhile True: held.append(os.open('/dev/null', 0))")
        assert result.exit_code == 1
        assert "Too many open files" in result.stderr
        assert box.commands.run("ulimit -n; ulimit -Hn; ulimit -n 200").stdout == "100\n100\n"
