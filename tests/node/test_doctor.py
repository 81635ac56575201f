"""The doctor on this very machine, as root and as an ordinary user."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.node.doctor import cgroups
from shoal.node.doctor.probe import PROBES

MAIN = "import typer; from shoal.cli.doctor import doctor; typer.run(doctor)"
STATUSES = {"ok", "warn", "fail", "absent"}
TEST_PATH = os.pathsep.join([str(Path(shoal.__file__).parents[1]), *filter(None, sys.path)])


def run(
    *arguments: str, python: str = sys.executable, prefix: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = [*prefix, python, "-c", MAIN, *arguments]
    environ = {**os.environ, "PYTHONPATH": TEST_PATH, "COLUMNS": "150"}
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60, check=False)


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(done.stdout)
    parsed["by_id"] = {finding["id"]: finding for finding in parsed["findings"]}
    return parsed


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return document(run("--json", "--data", str(tmp_path_factory.mktemp("data") / "not-yet")))


def check(parsed: dict[str, Any]) -> None:
    assert [finding["id"] for finding in parsed["findings"]] == [probe.id for probe in PROBES]
    for finding in parsed["findings"]:
        assert finding["status"] in STATUSES
        assert finding["detail"]
        assert finding["why"]
        assert bool(finding["fix"]) == (finding["status"] != "ok"), finding
        assert "probe itself failed" not in finding["detail"], finding
        assert "without an answer" not in finding["detail"], finding


def test_document(here: dict[str, Any]) -> None:
    check(here)
    assert set(here) == {"machine", "findings", "tier", "by_id"}
    assert here["machine"]["kernel"] == platform.release()
    assert set(here["tier"]["namespace"]) == {"available", "unenforced"}


def test_ids_are_unique() -> None:
    assert len({probe.id for probe in PROBES}) == len(PROBES)


def test_exit_code_follows_the_tier(here: dict[str, Any], tmp_path: Path) -> None:
    done = run("--json", "--data", str(tmp_path))
    assert done.returncode == (0 if here["tier"]["namespace"]["available"] else 4)
    assert done.stderr == ""


def test_nowhere_to_write_is_a_failure() -> None:
    done = run("--json", "--data", "/proc/shoal")
    parsed = document(done)
    check(parsed)
    assert done.returncode == 4
    assert parsed["tier"]["namespace"]["available"] is False
    assert parsed["by_id"]["storage.data"]["status"] == "fail"
    assert "/proc" in parsed["by_id"]["storage.data"]["detail"]


def test_table_names_every_problem_and_its_way_out(tmp_path: Path, here: dict[str, Any]) -> None:
    done = run("--data", str(tmp_path / "not-yet"))
    assert "namespace tier" in done.stdout
    for finding in here["findings"]:
        if finding["status"] in ("warn", "fail") and finding["group"] == "limits":
            assert finding["title"].split(" ")[0] in done.stdout
            assert finding["fix"] in done.stdout


def test_takes_seconds(tmp_path: Path) -> None:
    start = time.monotonic()
    run("--json", "--data", str(tmp_path))
    assert time.monotonic() - start < 15


# -- nothing is left


def leftovers(data: Path) -> list[str]:
    """What a run over `data` left on this machine."""
    found = [str(path) for path in data.rglob("*")] + [str(path) for path in data.parent.glob(".shoal-doctor-*")]
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = process.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if "doctor.probe" in text and str(data) in text:
            found.append(text)
    return found


def state() -> tuple[str, list[str], list[str]]:
    mounts = Path("/proc/self/mountinfo").read_text()
    groups = [str(path) for path in Path("/sys/fs/cgroup").rglob("shoal-doctor-*")]
    devices = sorted(path.name for path in Path("/sys/block").glob("zram*"))
    return mounts, groups, devices


def test_nothing_is_left(tmp_path: Path) -> None:
    before = state()
    run("--json", "--data", str(tmp_path / "data"))
    assert state() == before
    assert leftovers(tmp_path / "data") == []
    assert list(tmp_path.iterdir()) == []


# -- it tells the truth


def status(parsed: dict[str, Any], name: str) -> str:
    return str(parsed["by_id"][name]["status"])


def test_apparmor_and_selinux(here: dict[str, Any]) -> None:
    apparmor = Path("/sys/module/apparmor").exists()
    assert (status(here, "security.apparmor") == "ok") <= apparmor
    assert (status(here, "security.selinux") == "ok") <= Path("/sys/fs/selinux").exists()


def test_limits_are_what_the_kernel_says(here: dict[str, Any]) -> None:
    for finding in here["findings"]:
        name = finding["id"].removeprefix("limits.")
        path = Path("/proc/sys", name.replace(".", "/"))
        if finding["group"] == "limits" and path.exists() and "port_range" not in name:
            assert finding["detail"].startswith(f"{int(path.read_text()):,}"), finding
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert f"{hard:,}" in here["by_id"]["limits.open_files"]["detail"] or hard == resource.RLIM_INFINITY


def test_inotify_limit_follows_the_threshold(here: dict[str, Any]) -> None:
    value = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
    finding = here["by_id"]["limits.fs.inotify.max_user_instances"]
    assert (finding["status"] == "ok") == (value >= 100_000)
    assert finding["status"] == "ok" or "sysctl -w fs.inotify.max_user_instances=100000" in finding["fix"]


def test_programs(here: dict[str, Any]) -> None:
    assert (status(here, "layers.erofs_utils") == "ok") == bool(shutil.which("mkfs.erofs"))
    assert (status(here, "host.compiler") == "ok") == bool(shutil.which("musl-gcc"))
    helper = Path(shoal.__file__).parent / "_bin" / "init"
    assert (status(here, "host.helper") == "ok") <= helper.exists()


@pytest.mark.root
def test_erofs_from_a_file_depends_on_the_file_system(here: dict[str, Any]) -> None:
    on_tmpfs = document(run("--json", "--data", "/dev/shm/shoal-doctor-test"))
    assert status(on_tmpfs, "layers.erofs") == "warn"
    assert "ENOTBLK" in on_tmpfs["by_id"]["layers.erofs"]["detail"]
    assert status(on_tmpfs, "storage.reflink") == "warn"
    assert on_tmpfs["machine"]["filesystem"] == "tmpfs"
    if here["machine"]["filesystem"] in ("ext4", "xfs", "btrfs"):
        assert status(here, "layers.erofs") == "ok"
    if here["machine"]["filesystem"] == "ext4":
        assert status(here, "storage.reflink") == "warn"


@pytest.mark.root
def test_root_is_told_from_where_files_go_to_disk(here: dict[str, Any]) -> None:
    finding = here["by_id"]["storage.uppers"]
    if not os.access("/dev/loop-control", os.W_OK):
        assert (finding["status"], "loop devices" in finding["detail"]) == ("absent", True)
    else:
        assert finding["status"] == "ok"
        assert "for a disk above" in finding["detail"]


@pytest.mark.root
def test_root_enforces_limits_where_controllers_are(here: dict[str, Any]) -> None:
    names = set(here["tier"]["namespace"]["unenforced"])
    for controller, field in (("memory", "memory"), ("cpu", "cpu")):
        assert (status(here, f"cgroup.{controller}") == "ok") == (field not in names)
        if cgroups.own(controller) is not None:
            assert status(here, f"cgroup.{controller}") == "ok"


# -- as an ordinary user


def interpreter_for_all() -> str | None:
    """One that nobody may start and that has what Shoal imports."""
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        command = [*AS_NOBODY, python, "-c", "import msgspec, rich, typer"]
        environ = {**os.environ, "PYTHONPATH": TEST_PATH, "HOME": "/tmp"}
        try:
            done = subprocess.run(command, env=environ, capture_output=True, check=False)
        except FileNotFoundError:
            return None
        if done.returncode == 0:
            return python
    return None


AS_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "env")


@pytest.mark.root
def test_as_an_ordinary_user(tmp_path: Path) -> None:
    python = interpreter_for_all()
    if python is None:
        pytest.skip("no interpreter that nobody may start")
    data = Path("/tmp", f"shoal-doctor-nobody-{os.getpid()}")
    before = state()
    done = run("--json", "--data", str(data), python=python, prefix=AS_NOBODY)
    parsed = document(done)
    check(parsed)
    assert state() == before
    assert parsed["machine"]["user"] == 65534
    assert status(parsed, "host.privilege") == "warn"
    names = parsed["tier"]["namespace"]["unenforced"]
    assert "root" in parsed["by_id"]["layers.idmap_data"]["fix"]
    assert "processes" not in names  # counted by their user where no controller counts them
    for controller, field in (("memory", "memory"), ("cpu", "cpu")):
        assert (status(parsed, f"cgroup.{controller}") != "ok") == (field in names)
    assert status(parsed, "layers.erofs") == "warn"
    assert done.returncode == (0 if parsed["tier"]["namespace"]["available"] else 4)


def test_an_interpreter_that_cannot_start_again_is_no_crash(tmp_path: Path) -> None:
    program = f"import sys; sys.executable = '/no/python'\n{MAIN}"
    command = [sys.executable, "-c", program, "--json", "--data", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": TEST_PATH}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 4
    assert all("/no/python cannot be started" in finding["detail"] for finding in document(done)["findings"])


# -- misuse


def test_paths_without_inside_are_refused() -> None:
    done = run("/bin/sh")
    assert done.returncode == 2
    assert "--inside" in done.stderr


def test_inside_prints_one_document() -> None:
    done = run("--inside", "--json", "/bin/sh")
    assert [finding["id"] for finding in json.loads(done.stdout)["findings"]] == [
        "inside.libraries",
        "inside.pythonpath",
    ]
