"""How probes are run: whatever one does, there is a finding and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.node.doctor import cgroups, erofs
from shoal.node.doctor.finding import Finding, Probe, Scene, Shortfall, Status
from shoal.node.doctor.probe import PROBES, attempt
from shoal.node.doctor.report import namespace_tier

SCENE = Scene("/tmp", "/tmp")


def probe(run: Callable[[Scene], str], missing: Status = "warn", timeout: float = 3.0, as_user: bool = False) -> Probe:
    return Probe(
        id="group.name",
        title="title",
        run=run,
        why="why",
        fix="fix",
        missing=missing,
        timeout=timeout,
        as_user=as_user,
    )


def failing(error: Exception) -> Callable[[Scene], str]:
    def run(_: Scene) -> str:
        raise error

    return run


def test_what_works_needs_no_fix() -> None:
    assert attempt(probe(lambda _: "seen"), SCENE) == Finding("group.name", "group", "title", "ok", "seen", "why", "")


@pytest.mark.parametrize(
    ("error", "status", "detail", "fix"),
    [
        (Shortfall("less"), "absent", "less", "fix"),
        (Shortfall("less", "fail", "other"), "fail", "less", "other"),
        (OSError(38, "call: Function not implemented"), "absent", "Function not implemented", "fix"),
    ],
)
def test_what_is_missing(error: Exception, status: str, detail: str, fix: str) -> None:
    finding = attempt(probe(failing(error), missing="absent"), SCENE)
    assert (finding.status, finding.fix) == (status, fix)
    assert detail in finding.detail


def test_a_fault_in_a_probe_is_a_finding() -> None:
    finding = attempt(probe(failing(ZeroDivisionError("oops"))), SCENE)
    assert finding.status == "warn"
    assert "ZeroDivisionError: oops" in finding.detail
    assert finding.fix


def test_a_probe_that_dies_is_a_finding() -> None:
    finding = attempt(probe(lambda _: os.kill(os.getpid(), signal.SIGKILL) or "", missing="fail"), SCENE)
    assert finding.status == "fail"
    assert "without an answer" in finding.detail


def test_a_probe_that_hangs_is_ended() -> None:
    start = time.monotonic()
    finding = attempt(probe(lambda _: time.sleep(60) or "", timeout=0.2), SCENE)
    assert time.monotonic() - start < 5
    assert finding.status == "warn"
    assert "within 0.2 s" in finding.detail


def test_a_probe_that_ignores_its_end_is_killed() -> None:
    def deaf(_: Scene) -> str:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
        return ""

    assert attempt(probe(deaf, timeout=0.2), SCENE).status == "warn"


def test_children_of_a_probe_end_with_it() -> None:
    def parent(_: Scene) -> str:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        return str(child)

    child = int(attempt(probe(parent), SCENE).detail)
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "zombie" in Path(f"/proc/{child}/status").read_text():
            return
        time.sleep(0.02)
    pytest.fail("a child of a probe outlived it")


@pytest.mark.root
def test_runs_as_nobody_where_asked() -> None:
    finding = attempt(probe(lambda _: f"{os.geteuid()} {os.getgroups()}", as_user=True), SCENE)
    assert finding.detail == "65534 []"


@pytest.mark.root
@pytest.mark.parametrize("end", ["its time limit", "the end of the whole run"])
def test_a_cgroup_is_removed_even_if_its_probe_hangs(end: str, tmp_path: Path) -> None:
    if cgroups.own("") is None:
        pytest.skip("no v2 tree")
    program = textwrap.dedent("""
        import signal, sys, time
        from pathlib import Path
        from shoal.node.doctor import cgroups
        from shoal.node.doctor.finding import Probe, Scene
        from shoal.node.doctor.probe import attempt

        def hang(scene):
            with cgroups.group(cgroups.own("")) as made:
                Path(scene.scratch, "made").write_text(str(made))
                time.sleep(60)

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        probe = Probe(id="a.b", title="t", run=hang, why="w", fix="f", timeout=float(sys.argv[2]))
        attempt(probe, Scene("", sys.argv[1]))
    """)
    timeout = "0.5" if end == "its time limit" else "30"
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), timeout])
    while not (tmp_path / "made").exists():
        time.sleep(0.02)
    time.sleep(0.05)
    made = Path((tmp_path / "made").read_text())
    if end != "its time limit":
        assert made.exists()
        process.terminate()
    process.wait(10)
    assert not made.exists()


def test_tier_needs_what_fails_and_names_what_nothing_enforces() -> None:
    fine = tuple(found.found("ok", "x") for found in PROBES)
    assert namespace_tier(fine).available
    assert namespace_tier(fine).unenforced == ()
    less = tuple(found.found("warn" if found.id.startswith("cgroup") else "ok", "x") for found in PROBES)
    assert namespace_tier(less).available
    assert namespace_tier(less).unenforced == ("cpu", "memory")
    none = tuple(found.found("fail" if found.id == "kernel.overlayfs" else "ok", "x") for found in PROBES)
    assert not namespace_tier(none).available


def test_own_cgroup_in_a_container() -> None:
    mounts = (
        "30 25 0:26 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
        "31 25 0:27 / /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
        "32 25 0:28 / /sys/fs/cgroup/uni\\040fied ro - cgroup2 cgroup2 rw\n"
    )
    found = cgroups._hierarchies(mounts)
    assert found["memory"] == ("/docker/abc", "/sys/fs/cgroup/memory")
    assert found["cpu"] == found["cpuacct"] == ("/", "/sys/fs/cgroup/cpu,cpuacct")
    assert found[""] == ("/", "/sys/fs/cgroup/uni fied")
    assert cgroups._memberships("4:cpu,cpuacct:/a:b\n0::/c\n") == {"cpu": "/a:b", "cpuacct": "/a:b", "": "/c"}


def test_written_image_is_one_that_tools_accept(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(erofs.image())
    try:
        done = subprocess.run(["fsck.erofs", str(tmp_path / "image")], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no erofs-utils")
    assert done.returncode == 0, done.stderr
