"""The fake tier: what it does like a sandbox is in tests/conformance; here is what is its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import residue
import shoal
from shoal.node.interface import CommandRequest


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[shoal.Sandbox]:
    """Its folder is below `tmp_path`."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with shoal.Sandbox.create(tier="fake", env={"A": "1"}) as box:
        yield box


@pytest.mark.parametrize(
    "wanted",
    [{"image": "debian:12"}, {"layers": ["python:3.11"]}, {"workspace": "x"}, {"network": "pypi"}],
    ids=lambda wanted: next(iter(wanted)),
)
def test_what_it_has_not_is_refused_at_once(wanted: dict[str, Any]) -> None:
    with pytest.raises(shoal.Unsupported, match=f"{next(iter(wanted))}: .*tier='namespace'"):
        shoal.Sandbox.create(tier="fake", **wanted)


def test_users_and_terminals_are_refused(fake: shoal.Sandbox) -> None:
    with pytest.raises(shoal.Unsupported, match="user"):
        fake.commands.run("id", user=1000)
    with pytest.raises(shoal.Unsupported, match="user"):
        fake.files.write("f", "x", user=1000)
    with pytest.raises(shoal.Unsupported, match="watch"):
        fake.files.watch("/workspace")
    with pytest.raises(shoal.Unsupported, match="terminal"):
        fake.commands.start(CommandRequest(cmd="sh", terminal=(80, 24)))


def test_it_runs_where_the_namespace_tier_does_not(tmp_path: Path) -> None:
    script = """
import shoal, shoal.sandbox.spawner
def missing():
    raise shoal.PlatformError("no helper")
shoal.sandbox.spawner.binary = missing
for _ in range(2):
    try:
        shoal.Sandbox.create()
    except shoal.PlatformError as error:
        print(error)
with shoal.Sandbox.create(tier="fake") as box:
    print(box.commands.run("echo alive").stdout.strip())
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "SHOAL_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], env=environ, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["no helper", "no helper", "alive"]


def test_it_needs_nothing_that_only_linux_has(tmp_path: Path) -> None:
    """As far as names go: what macOS lacks of these modules is taken away."""
    script = """
import os, resource, signal, socket
for module, names in (
    (os, "O_PATH O_TMPFILE memfd_create pidfd_open eventfd setns unshare getxattr sched_getaffinity waitid splice"),
    (socket, "AF_NETLINK AF_VSOCK MSG_CMSG_CLOEXEC SOCK_CLOEXEC SOCK_NONBLOCK"),
    (signal, "pidfd_send_signal"),
    (resource, "prlimit"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
import shoal
with shoal.Sandbox.create(tier="fake") as box:
    box.files.write("d/f", "x")
    print(box.commands.run("cat d/f", changes=True).stdout, [change.path for change in box.changes()])
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "SHOAL_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True)
    assert done.stdout == "x ['/workspace/d', '/workspace/d/f']\n", done.stderr


def test_it_ends_with_its_process(tmp_path: Path) -> None:
    script = """
import shoal
box = shoal.Sandbox.create(tier="fake")
box.commands.run("sleep 600 & echo")
print(box.commands.run("sleep 600 & sleep 600", background=True).pid)
"""
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "SHOAL_HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], env=environ, capture_output=True, text=True)
    assert done.stderr == ""
    assert os.listdir(tmp_path) == ["home"]
    assert not residue.settled(lambda: [each for each in residue.descendants() if each.name == "sleep"])


# Files


def test_no_path_of_a_file_operation_leaves_the_folder(fake: shoal.Sandbox, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("canary")
    fake.commands.run(f"ln -s {canary} out; ln -s {tmp_path} folder; ln -s ../../../../../..{canary} up; ln -s a a")
    for path in ("out", "folder/canary", "up", "../../../../../../../etc/passwd", str(canary), "/etc/passwd"):
        with pytest.raises(shoal.NotFound):
            fake.files.read(path)
    for path in ("out", "folder/canary", "up"):
        fake.files.write(path, "inside")
        assert fake.files.read(path) == "inside"
    assert fake.files.read(str(canary)) == "inside"
    with pytest.raises(shoal.InvalidRequest, match="symbolic links"):
        fake.files.read("a")
    fake.files.remove("folder")
    assert canary.read_text() == "canary"


def test_file_operations(fake: shoal.Sandbox) -> None:
    fake.files.write("d/e/f", "one", mode=0o600)
    fake.files.append("d/e/f", " two")
    fake.files.make_dir("/d/m", mode=0o700)
    fake.commands.run("ln -s e d/link", check=True)
    kinds = {info.path: (info.kind, info.mode) for info in fake.files.list("/workspace", depth=3)}
    assert kinds["/workspace/d/e/f"] == ("file", 0o600)
    assert kinds["/workspace/d/link"][0] == "symlink"
    assert "/workspace/d/link/f" not in kinds
    assert fake.files.stat("/d/m").mode == 0o700
    fake.files.write("d/link/f", "three")
    assert (fake.files.read("d/e/f"), fake.files.stat("d/e/f").mode) == ("three", 0o600)
    fake.files.rename("d/e", "d/g")
    assert not fake.files.exists("d/link/f")
    fake.files.remove("d")
    assert fake.files.list() == []


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("none", shoal.NotFound),
        ("file/below", shoal.NotFound),
        ("folder", shoal.FileExists),
        ("fifo", shoal.InvalidRequest),
    ],
)
def test_errors_of_files_are_those_of_a_sandbox(fake: shoal.Sandbox, path: str, error: type[Exception]) -> None:
    fake.commands.run("touch file; mkdir folder; mkfifo fifo", check=True)
    with pytest.raises(error, match=path):
        fake.files.read(path)
    if path != "none":
        with pytest.raises((error, shoal.FileExists), match=path):
            fake.files.write(path, "x")
    assert not [info.name for info in fake.files.list() if info.name.startswith(".shoal")]


def test_changes_are_what_is_not_as_it_was(fake: shoal.Sandbox) -> None:
    assert fake.changes() == []
    result = fake.commands.run("echo x > new; mkdir folder", changes=True)
    assert result.changes == {"added": 2, "changed": 0, "removed": 0}
    fake.files.write("/root/.profile", "y")
    assert [change.path for change in fake.changes()] == ["/root/.profile", "/workspace/folder", "/workspace/new"]
    assert fake.commands.run("rm new; echo y > folder/f", changes=True).changes == {
        "added": 1,
        "changed": 0,
        "removed": 1,
    }


# Commands


def test_nothing_of_the_callers_environment_is_handed_on(fake: shoal.Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "zzz")
    env = dict(line.split("=", 1) for line in fake.commands.run("env").stdout.splitlines())
    assert env["A"] == "1"
    assert "SECRET" not in env
    assert env["HOME"] != os.environ.get("HOME")
    fake.commands.run('echo x > "$HOME/f"; mktemp', check=True)
    assert fake.files.read("/root/f") == "x\n"
    assert len(fake.files.list("/tmp")) == 1


def test_a_command_waits_while_nobody_takes_its_output(fake: shoal.Sandbox) -> None:
    command = fake.commands.run("head -c 5000000 /dev/zero; touch done", background=True)
    time.sleep(0.5)
    assert not fake.files.exists("done")
    assert sum(len(piece.data) for piece in command) == 5_000_000
    assert command.wait().exit_code == 0
    assert fake.files.exists("done")


def test_commands_that_cannot_be_started(fake: shoal.Sandbox) -> None:
    fake.files.write("text", "no program")
    for cmd, cwd, error in (
        (["no-such-program"], None, shoal.NotFound),
        (["./text"], None, shoal.PermissionDenied),
        (["true"], "/none", shoal.NotFound),
        (["true"], "text", shoal.NotFound),
    ):
        with pytest.raises(error):
            fake.commands.run(cmd, cwd=cwd)
    assert fake.commands.run(["true"]).ok


def test_signals_reach_the_group(fake: shoal.Sandbox) -> None:
    command = fake.commands.run(
        "trap 'echo caught; exit 7' TERM; echo ready; while :; do sleep 0.02; done", background=True
    )
    assert next(iter(command)).data == b"ready\n"
    command.kill(15)
    result = command.wait()
    assert (result.exit_code, result.stdout) == (7, "ready\ncaught\n")


def test_its_end_ends_its_processes_and_removes_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    box = shoal.Sandbox.create(tier="fake")
    descriptors = len(os.listdir("/proc/self/fd"))
    running = box.commands.run("sleep 600 & sleep 600", background=True)
    box.commands.run("sleep 600 & echo left behind")
    pids = [int(pid) for pid in box.commands.run(["pgrep", "-x", "sleep", "-g", str(running.pid)]).stdout.split()]
    assert len(pids) == 2
    assert len(os.listdir(tmp_path)) == 1
    box.kill()
    with pytest.raises(shoal.SandboxGone, match="killed"):
        running.wait()
    with pytest.raises(shoal.SandboxGone, match="killed"):
        box.files.read("x")
    assert os.listdir(tmp_path) == []
    assert not residue.settled(lambda: [each for each in residue.descendants() if each.name == "sleep"])
    assert len(os.listdir("/proc/self/fd")) < descriptors
