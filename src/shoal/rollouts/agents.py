"""Agents: what acts in a sandbox before it is graded."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any, NamedTuple, Protocol, cast

from shoal.errors import InvalidRequest
from shoal.rollouts.box import Box
from shoal.rollouts.changes import apply_patch
from shoal.rollouts.downloads import Downloads
from shoal.rollouts.preparation import WORKSPACE
from shoal.rollouts.pypi import fetch_releases
from shoal.rollouts.tasks import Task
from shoal.rollouts.trees import solution

KNOWN = 'oracle, noop, "cmd: ...", or pkg.mod:Class'


class Agent(Protocol):
    """Anything that acts in the box. What it leaves in /workspace is graded after it returns.

    `task.statement` says what is wanted; it is also in the box, in the file that $SHOAL_TASK_FILE names.
    CommandFailed out of a `check=True` ends its turn, and what stands is graded; any other exception counts
    as a failure of the platform.
    """

    async def __call__(self, task: Task, box: Box) -> None: ...


class NamedAgent(NamedTuple):
    """An agent and what results call it."""

    name: str
    act: Agent


class Noop:
    """Does nothing. Its reward is 0 where a task is sound."""

    async def __call__(self, task: Task, box: Box) -> None:
        del task, box


class Oracle:
    """Applies the fix, got on the host when its turn comes. Its reward is 1 where a task is sound."""

    def __init__(self, downloads: Downloads) -> None:
        self._downloads = downloads

    async def __call__(self, task: Task, box: Box) -> None:
        releases = await fetch_releases(task, self._downloads)
        await apply_patch(box, solution(releases.base, releases.fix))


class CommandAgent:
    """Runs a shell command in /workspace. However it ends, what it left is graded."""

    def __init__(self, command: str) -> None:
        self._command = command

    async def __call__(self, task: Task, box: Box) -> None:
        del task  # it finds the statement in the box
        await box.commands.run(self._command, cwd=WORKSPACE)


def find_agent(agent: str | Agent, downloads: Downloads) -> NamedAgent:
    """The agent that a name stands for. Raises InvalidRequest("agent") with what would have been right."""
    if not isinstance(agent, str):
        return NamedAgent(_name_of(agent), _instance(agent, _name_of(agent)))
    if agent == "oracle":
        return NamedAgent(agent, Oracle(downloads))
    if agent == "noop":
        return NamedAgent(agent, Noop())
    if agent.startswith("cmd:"):
        return NamedAgent(agent, CommandAgent(_command(agent)))
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", agent):
        return NamedAgent(agent, _instance(_load(agent), agent))
    raise InvalidRequest("agent", f"no agent {agent!r}; give {KNOWN}")


def _command(agent: str) -> str:
    command = agent.removeprefix("cmd:").strip()
    if not command:
        raise InvalidRequest("agent", 'no command after "cmd:"; for example "cmd: ./solve.sh"')
    return command


def _load(agent: str) -> Any:
    module, _, name = agent.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise InvalidRequest("agent", f"{agent!r} can't be loaded: {error}") from error
    return found


def _instance(agent: Any, name: str) -> Agent:
    """A class is made into an object; an async function, or an object with an async `__call__`, is one."""
    try:
        made: Any = agent() if inspect.isclass(agent) else agent
    except TypeError as error:
        raise InvalidRequest("agent", f"{name} can't be made without arguments: {error}") from error
    if not any(map(inspect.iscoroutinefunction, (made, getattr(made, "__call__", None)))):  # noqa: B004
        raise InvalidRequest("agent", f"{name} is no agent; it needs `async def __call__(self, task, box)`")
    return cast(Agent, made)


def _name_of(agent: Any) -> str:
    named = agent if hasattr(agent, "__qualname__") else type(agent)
    return f"{named.__module__}:{named.__qualname__}"
