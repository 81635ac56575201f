"""Names of agents and what they stand for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import InvalidRequest
from shoal.network.index import PackageIndex
from shoal.rollouts.agents import NamedAgent, find_agent
from shoal.rollouts.downloads import Downloads
from shoal.rollouts.tasks import Task
from shoal.types import Result

from .stand_in import BASE, FIX, Box, honest, make_task


class Writer:
    """An agent such as a user would write."""

    async def __call__(self, task: Task, box: Any) -> None:
        await box.files.write("/workspace/thing.py", task.package)


async def writer(task: Task, box: Any) -> None:
    await box.files.write("/workspace/thing.py", task.package)


class Picky(Writer):
    def __init__(self, model: str) -> None: ...


class Sync:
    def __call__(self, task: Task, box: Any) -> None: ...


def find(agent: Any, shelf: Path) -> NamedAgent:
    return find_agent(agent, Downloads(shelf / "d", PackageIndex(find_links=(str(shelf),), no_index=True)))


def act(agent: Any, shelf: Path) -> Box:
    box = Box(0, BASE, honest, Result(exit_code=0))

    async def go() -> None:
        index = PackageIndex(find_links=(str(shelf),), no_index=True)
        async with Downloads(shelf / "d", index) as downloads:
            await find_agent(agent, downloads).act(make_task(shelf), box)

    asyncio.run(go())
    return box


def test_noop_does_nothing_and_oracle_all_but_the_tests(shelf: Path) -> None:
    assert act("noop", shelf).workspace == BASE
    after = act("oracle", shelf).workspace
    assert after["tests/test_thing.py"] == BASE["tests/test_thing.py"]
    assert {p: e for p, e in after.items() if "test" not in p} == {p: e for p, e in FIX.items() if "test" not in p}


def test_a_command_runs_in_the_workspace(shelf: Path) -> None:
    assert act("cmd: make fix ", shelf).ran == [("make fix", {"cwd": "/workspace"})]


@pytest.mark.parametrize("agent", [f"{__name__}:Writer", f"{__name__}:writer", Writer, Writer(), writer])
def test_a_class_an_object_and_a_function_will_do(shelf: Path, agent: Any) -> None:
    assert act(agent, shelf).workspace["thing.py"].data == b"thing"
    assert find(agent, shelf).name.lower() == f"{__name__}:writer"


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        ("orcale", 'oracle, noop, "cmd: ..."'),
        ("", "no agent"),
        ("cmd:", "no command"),
        ("no_such_module:X", "No module named"),
        (f"{__name__}:Missing", "no attribute 'Missing'"),
        (f"{__name__}:Picky", "without arguments"),
        (f"{__name__}:Sync", "async def __call__"),
        (f"{__name__}:BASE", "async def __call__"),
        (3, "async def __call__"),
    ],
)
def test_what_is_no_agent_is_refused_with_the_way_out(shelf: Path, agent: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        find(agent, shelf)
    assert caught.value.field == "agent"
    assert says in str(caught.value)
