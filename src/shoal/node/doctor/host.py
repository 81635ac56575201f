"""Probes of the machine around the kernel: programs, devices, clock."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

from shoal.node.doctor import calls
from shoal.node.doctor.finding import Probe, Scene, Shortfall

GOOD_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "xen")
TIME_ERROR = 5
GRND_NONBLOCK = 1
CAPABILITIES = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_FOWNER": 3,
    "CAP_KILL": 5,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_NET_ADMIN": 12,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_RESOURCE": 24,
}
ZRAM = Path("/sys/class/zram-control")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=2, check=False)


def helper(_: Scene) -> str:
    path = Path(__file__).parents[2] / "_bin" / "init"
    if not path.exists():
        raise Shortfall(f"{path} is not there")
    if not os.access(path, os.X_OK):
        raise Shortfall(f"{path} is not executable", fix=f"chmod 755 {path}")
    try:
        done = run(str(path))
    except OSError as error:
        raise Shortfall(f"{path} does not start: {error.strerror}") from None
    if done.returncode < 0:
        raise Shortfall(f"{path} ends with signal {-done.returncode}")
    return f"{path} ({path.stat().st_size // 1024} KiB) runs"


def privilege(_: Scene) -> str:
    if os.geteuid() != 0:
        raise Shortfall(f"user {os.geteuid()}: id ranges, id-mapped and EROFS layers are for root only", fix=ROOT_FIX)
    lacking = [name for name, bit in CAPABILITIES.items() if not _effective() >> bit & 1]
    if lacking:
        raise Shortfall(f"root without {', '.join(lacking)}")
    return "root with all capabilities that are used"


def _effective() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff"))
    return int(line.split()[1], 16)


def compiler(_: Scene) -> str:
    found = [name for name in ("musl-gcc", "cc", "gcc") if shutil.which(name)]
    if "musl-gcc" in found:
        return "musl-gcc"
    if found:
        raise Shortfall(f"only {found[0]}: the helper takes 700 kB a sandbox in place of 50")
    raise Shortfall("none; the helper that came with the package is used as it is")


def uv(_: Scene) -> str:
    if program := shutil.which("uv") or _packaged_uv():
        return run(program, "--version").stdout.strip()
    raise Shortfall("uv is not installed")


def _packaged_uv() -> str | None:
    if importlib.util.find_spec("uv") is None:
        return None
    import uv as package

    try:
        return os.fsdecode(package.find_uv_bin())
    except FileNotFoundError:
        return None


def kvm(_: Scene) -> str:
    os.close(os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC))
    raise Shortfall("/dev/kvm is there; whether a guest starts on it was not tried", fix=KVM_FIX)


def zram(_: Scene) -> str:
    if os.geteuid() != 0:
        raise Shortfall("not tried: only root can make a device", "absent", fix=ZRAM_ROOT_FIX)
    number = (ZRAM / "hot_add").read_text().strip()
    try:
        Path(f"/sys/block/zram{number}/disksize").write_text("1M")
        algorithms = Path(f"/sys/block/zram{number}/comp_algorithm").read_text().strip()
    finally:
        Path(f"/sys/block/zram{number}/reset").write_text("1")
        (ZRAM / "hot_remove").write_text(number)
    swaps = len(Path("/proc/swaps").read_text().splitlines()) - 1
    return f"a device was made and removed ({algorithms}); swap devices in use: {swaps}"


def pressure(_: Scene) -> str:
    with open("/proc/pressure/memory", "r+b", buffering=0) as file:
        # Windows that are no multiple of 2 s need CAP_SYS_RESOURCE.
        file.write(b"some 500000 2000000\0")
        watch = select.poll()
        watch.register(file, select.POLLPRI)
        if any(events & select.POLLERR for _, events in watch.poll(0)):
            raise Shortfall("the kernel takes a pressure trigger and reports an error on it")
    return "a trigger on memory pressure was set"


def criu(_: Scene) -> str:
    if (program := shutil.which("criu")) is None:
        raise Shortfall("not installed")
    version = run(program, "--version").stdout.split()
    number = version[1] if len(version) > 1 else "of unknown version"
    if os.geteuid() != 0:
        raise Shortfall(f"criu {number} is there; not tried: it needs root", fix="Run `shoal doctor` as root.")
    done = run(program, "check")
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise Shortfall(f"criu {number}: check fails: {''.join(last)[-160:]}", "warn")
    raise Shortfall(f"criu {number} passes its own check; no process was dumped to try it")


def entropy(_: Scene) -> str:
    os.getrandom(32, GRND_NONBLOCK)
    return "random bytes are there without waiting"


def clock(_: Scene) -> str:
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text().strip()
    backwards, drift = _sampled(0.05)
    seen = f"{source}, steady; how far it is off true time cannot be known from here"
    if backwards or drift > 0.01:
        raise Shortfall(f"{source}: went back {backwards} times, strays {drift:.2%} from the raw counter")
    if source not in GOOD_CLOCKS:
        raise Shortfall(f"{source} is slow to read; tsc or kvm-clock is advised", fix=CLOCK_SOURCE_FIX)
    if calls.libc().adjtimex(ctypes.create_string_buffer(512)) == TIME_ERROR:
        raise Shortfall(f"{seen}; the kernel says that nothing keeps it in step", fix=CLOCK_SYNC_FIX)
    return f"{seen}; kept in step"


def _sampled(seconds: float) -> tuple[int, float]:
    """How often the clock went back, and how much its rate differs from the raw counter's."""
    start, raw_start = time.monotonic(), time.clock_gettime(time.CLOCK_MONOTONIC_RAW)
    before, backwards = start, 0
    while before - start < seconds:
        now = time.monotonic()
        backwards += now < before
        before = now
    raw = time.clock_gettime(time.CLOCK_MONOTONIC_RAW) - raw_start
    return backwards, abs((time.monotonic() - start) / raw - 1)


CLOCK_SYNC_FIX = "sudo apt-get install chrony (it starts by itself); in a VM the host's clock may be enough."
CLOCK_SOURCE_FIX = "echo tsc | sudo tee /sys/devices/system/clocksource/clocksource0/current_clocksource"
ZRAM_ROOT_FIX = "Run `shoal doctor` as root to try it; the namespace tier does not need it."
ROOT_FIX = "Run as root (sudo shoal ...); without, what is not ok here is done another way or not at all."
LATER = "Nothing needs doing for the namespace tier."
KVM_FIX = f"{LATER} The device can be there and no guest start: the microvm tier has to start one to know."

PROBES = (
    Probe(
        id="host.helper",
        title="the helper, shoal-init",
        run=helper,
        missing="fail",
        why="It makes sandboxes and is the first process in each.",
        fix="make setup (or: python build_init.py), with Debian's musl-tools; or install a wheel, which carries it.",
    ),
    Probe(
        id="host.privilege",
        title="privilege",
        run=privilege,
        why="Root gives each sandbox ids, cgroups and layers of its own; CAP_SYS_RESOURCE raises limits, oom scores.",
        fix="In a container: run it with --cap-add=ALL (or --privileged); in a VM nothing needs doing for "
        "CAP_SYS_RESOURCE alone, if the limits below are high enough.",
    ),
    Probe(
        id="host.compiler",
        title="C compiler for the helper",
        run=compiler,
        missing="absent",
        why="Builds shoal-init from source; a wheel carries it ready.",
        fix="sudo apt-get install musl-tools",
    ),
    Probe(
        id="host.uv",
        title="uv",
        run=uv,
        why="Resolves and installs the packages of environments.",
        fix="pip install uv",
    ),
    Probe(
        id="host.clock",
        title="clock",
        run=clock,
        why="Time limits count on the monotonic clock; logs of several nodes are ordered by the other one.",
        fix="Choose a stable source: echo tsc | sudo tee "
        "/sys/devices/system/clocksource/clocksource0/current_clocksource",
    ),
    Probe(
        id="host.entropy",
        title="entropy",
        run=entropy,
        why="Ids, keys and seeds wait until it is there.",
        fix="sudo apt-get install haveged; in a VM: add a virtio-rng device.",
    ),
    Probe(
        id="host.pressure",
        title="pressure (PSI)",
        run=pressure,
        missing="absent",
        why="Lets the node pause and reclaim before the kernel kills.",
        fix=f"{LATER} Put psi=1 on the kernel command line.",
    ),
    Probe(
        id="host.zram",
        title="zram",
        run=zram,
        missing="absent",
        why="Memory of paused sandboxes can be compressed.",
        fix=f"{LATER} sudo modprobe zram",
    ),
    Probe(
        id="host.criu",
        title="CRIU",
        run=criu,
        missing="absent",
        why="Snapshots of processes and their memory.",
        fix=f"{LATER} Version 4.1 or newer: sudo apt-get install criu (Debian 13).",
        timeout=5.0,
    ),
    Probe(
        id="host.kvm",
        title="/dev/kvm",
        run=kvm,
        missing="absent",
        why="Micro virtual machines run at full speed on it.",
        fix=f"{LATER} sudo modprobe kvm_intel (or kvm_amd); in a VM, ask its host for nested virtualisation.",
    ),
)
