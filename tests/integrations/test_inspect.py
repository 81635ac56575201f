"""The sandbox for inspect_ai: inspect_ai's own suite for sandboxes, and a task from end to end."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Awaitable, Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from inspect_ai.util import (
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
)
from inspect_ai.util._sandbox import self_check
from inspect_ai.util._sandbox.limits import override_max_exec_output_size

from shoal.integrations.inspect import ShoalConfig, ShoalSandboxEnvironment

Check = Callable[[SandboxEnvironment], Awaitable[None]]
CHECKS: dict[str, Check] = {name.removeprefix("test_"): getattr(self_check, name) for name in self_check.__all__}

ONE_USER_CANNOT = {
    "exec_as_user",
    "read_file_not_allowed",
    "write_binary_file_without_permissions",
    "write_text_file_without_permissions",
}
"""Where an ordinary user runs the node, root is the only user in a sandbox, whom no file mode stops."""


@pytest.fixture
def environment() -> Iterator[SandboxEnvironment]:
    """As a task without any configuration has it."""
    made = asyncio.run(ShoalSandboxEnvironment.sample_init("checks", None, {}))
    yield made["default"]
    asyncio.run(ShoalSandboxEnvironment.sample_cleanup("checks", None, made, False))


def test_no_check_is_missing() -> None:
    assert len(CHECKS) >= 44


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.root if name in ONE_USER_CANNOT else ()) for name in CHECKS]
)
def test_check(environment: SandboxEnvironment, name: str) -> None:
    asyncio.run(CHECKS[name](environment))


def test_a_task_from_end_to_end(tmp_path: Path) -> None:
    """A model calls inspect_ai's bash tool; the sample's files are there, the sandbox is gone after.

    In a process of its own, since inspect_ai does not run without warnings."""
    command = [sys.executable, Path(__file__).parent / "task.py", tmp_path]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    who = "user" if os.geteuid() == 0 else "root"
    observed = [f"42\nsandbox\n{who}\n"]
    assert json.loads(done.stdout) == {"status": "success", "accuracy": 1.0, "observed": observed, "left": []}


def test_what_a_task_configures() -> None:
    """By an object, by what a log holds of one, and by a file; a field that is none is refused."""
    wanted = ShoalConfig(profile="small", env={"A": "1"}, user="root")
    assert ShoalSandboxEnvironment.config_deserialize(wanted.model_dump(mode="json")) == wanted
    with pytest.raises(ValueError, match="colour"):
        ShoalSandboxEnvironment.config_deserialize({"colour": "red"})


def test_a_file_configures(tmp_path: Path) -> None:
    path = tmp_path / "sandbox.yaml"
    path.write_text("profile: small\nenv: {A: '1'}\nuser: root\ncwd: /tmp\n")

    async def look() -> str:
        made = await ShoalSandboxEnvironment.sample_init("task", str(path), {})
        try:
            return (await made["default"].exec(["sh", "-c", "echo $A; id -u; pwd"])).stdout
        finally:
            await ShoalSandboxEnvironment.sample_cleanup("task", None, made, True)

    assert asyncio.run(look()) == "1\n0\n/tmp\n"


def test_errors_are_those_of_inspect_ai(environment: SandboxEnvironment) -> None:
    async def look() -> None:
        assert (await environment.exec(["no-such-program"])).returncode == 127
        assert (await environment.exec(["true"], cwd="/none")).returncode == 127
        with pytest.raises(SandboxUserUnsupportedError, match="nobody-of-that-name"):
            await environment.exec(["true"], user="nobody-of-that-name")
        with override_max_exec_output_size(2048), pytest.raises(OutputLimitExceededError, match="2 KiB") as much:
            await environment.exec(["sh", "-c", "yes | head -c 10000"])
        assert much.value.truncated_output is not None
        assert len(much.value.truncated_output) <= 2048
        await environment.write_file("raw", b"\xff")
        with pytest.raises(UnicodeDecodeError):
            await environment.read_file("raw")
        await environment.as_type(ShoalSandboxEnvironment).kill()
        with pytest.raises(SandboxUnavailableError, match="killed"):
            await environment.exec(["true"])

    asyncio.run(look())


def test_a_command_of_a_sample_that_is_cancelled_ends(environment: SandboxEnvironment) -> None:
    async def look() -> str:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(environment.exec(["sh", "-c", "sleep 61 & sleep 61"]), 0.5)
        await environment.exec(["sh", "-c", "while pgrep -x sleep; do sleep 0 ; done"], timeout=10)
        return (await environment.exec(["pgrep", "-x", "sleep"])).stdout

    assert asyncio.run(look()) == ""


def test_inspect_ai_finds_it_by_its_entry_point() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (target,) = project["entry-points"]["inspect_ai"].values()
    assert EntryPoint("shoal", target, "inspect_ai").load().ShoalSandboxEnvironment is ShoalSandboxEnvironment
