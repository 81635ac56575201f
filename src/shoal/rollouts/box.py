"""The part of a sandbox that rollouts use, and so all that a stand-in in tests must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from shoal.types import Change, FileInfo, Result


class Commands(Protocol):
    async def run(
        self,
        cmd: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
    ) -> Result: ...


class Files(Protocol):
    async def read(self, path: str, format: Any = "text") -> Any: ...

    async def write(self, path: str, data: bytes | str, mode: int | None = None) -> Any: ...

    async def stat(self, path: str) -> FileInfo: ...

    async def make_dir(self, path: str) -> Any: ...

    async def remove(self, path: str) -> Any: ...


class Box(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def commands(self) -> Commands: ...

    @property
    def files(self) -> Files: ...

    async def changes(self) -> list[Change]: ...

    async def kill(self) -> Any: ...
