"""What rollouts need of Shoal, in one place: environments, workspaces, sandboxes. The verbs are the SDK's."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from shoal.errors import NotFound
from shoal.rollouts.sharing import Once
from shoal.rollouts.tasks import Task
from shoal.rollouts.trees import Tree, write_tree
from shoal.types import Layer

if TYPE_CHECKING:
    from shoal.rollouts.box import Box

WORKSPACE = "/workspace"
TASK_FILE = "/tmp/shoal-task.md"
TREE_FORMAT = "v1"
"""Changes when the same archive would give another workspace."""


class Platform(Protocol):
    """Where rollouts happen."""

    async def environment(self, task: Task) -> Layer:
        """The task's pins, installed. Tasks with the same pins share one."""

    async def workspace(self, task: Task, tree: Tree) -> Layer:
        """The tree as a layer at /workspace."""

    async def sandbox(self, layers: Sequence[Layer], life: float) -> Box:
        """A fresh sandbox without network, in /workspace, that lives at most `life` seconds."""

    async def close(self) -> None:
        """Ends what still runs."""


class Machine:
    """This machine, or the server that SHOAL_URL names, through the SDK."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._environments: Once[str, Layer] = Once()

    async def environment(self, task: Task) -> Layer:
        key = "\n".join((task.python, *sorted(task.requirements)))
        return await self._environments.get(key, lambda: self._build(task))

    async def _build(self, task: Task) -> Layer:
        """With the very interpreter of the task, else one of the same minor version."""
        from shoal.sdk.environments import build_environment

        pins = list(task.requirements)
        try:
            return await build_environment(pins, task.python, no_deps=True)
        except NotFound:
            return await build_environment(pins, task.python.rpartition(".")[0], no_deps=True)

    async def workspace(self, task: Task, tree: Tree) -> Layer:
        from shoal.sdk.environments import publish_layer

        self._scratch.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="workspace-", dir=self._scratch))
        try:
            folder.chmod(0o755)
            await asyncio.to_thread(write_tree, tree, folder)
            return await publish_layer(folder, target=WORKSPACE, key=workspace_key(task))
        finally:
            await asyncio.to_thread(shutil.rmtree, folder)

    async def sandbox(self, layers: Sequence[Layer], life: float) -> Box:
        from shoal.sdk import AsyncSandbox

        return await AsyncSandbox.create(
            layers=tuple(layers), network=None, ttl=life, cwd=WORKSPACE, env={"SHOAL_TASK_FILE": TASK_FILE}
        )

    async def close(self) -> None:
        await self._environments.close()


def workspace_key(task: Task) -> str:
    """Names the workspace by all that decides it."""
    inputs = (TREE_FORMAT, task.base_sdist.sha256, task.package, task.base_version, task.base_root)
    return "workspace-" + hashlib.sha256("\n".join(inputs).encode()).hexdigest()
