"""The verbs of a node, and the requests they take. The SDK's engine seam: one in this process now, HTTP later."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from shoal.types import Change, FileEvent, FileInfo, Layer, NetworkPolicy, Profile, Result, SandboxInfo

OUTPUT_LIMIT = 1 << 20
"""Bytes kept of each stream where the caller names no limit."""


class CreateRequest(Struct, frozen=True, kw_only=True):
    """A sandbox to be made. Names are not resolved yet."""

    image: str = "host"
    layers: tuple[str | Layer, ...] = ()
    """Highest first, above the image's."""
    workspace: str | Layer | None = None
    profile: str | Profile = "basic"
    tier: str = "namespace"
    network: str | NetworkPolicy | None = None
    env: Mapping[str, str] = {}
    cwd: str = "/workspace"
    user: str | int = "root"
    ttl: float | None = 3600.0
    """Seconds after which it is ended; None for as long as the node lives."""
    metadata: Mapping[str, str] = {}


class CommandRequest(Struct, frozen=True, kw_only=True):
    """A command to be run."""

    cmd: str | Sequence[str]
    """Text goes to a shell, a list is run as it is."""
    env: Mapping[str, str] = {}
    cwd: str | None = None
    """None means the sandbox's; a relative one starts there."""
    user: str | int | None = None
    timeout: float | None = None
    """Seconds until everything the command started is killed."""
    silence: float | None = None
    """Seconds without output until the same."""
    output_limit: int = OUTPUT_LIMIT
    """Bytes kept of each stream."""
    stdin: bytes | None = None
    """What it reads; EOF after it. None means EOF at once, unless `feed`."""
    feed: bool = False
    """More input will come by `send_stdin`."""
    changes: bool = False
    terminal: tuple[int, int] | None = None
    """Columns and rows of a terminal to run it on."""


class Output(Struct, frozen=True):
    """A piece of what a command wrote."""

    stream: int
    """1 stdout, 2 stderr."""
    data: bytes


class Node(Protocol):
    """One machine's sandboxes."""

    async def create(self, request: CreateRequest) -> SandboxInfo: ...
    async def info(self, sandbox: str) -> SandboxInfo: ...
    async def list_sandboxes(self) -> list[SandboxInfo]: ...
    async def kill(self, sandbox: str) -> None: ...

    async def run(self, sandbox: str, request: CommandRequest) -> Result: ...
    async def start(self, sandbox: str, request: CommandRequest) -> tuple[int, int]:
        """(id of the command, its pid inside). Its output must be taken by `output`."""
        ...

    async def output(self, sandbox: str, command: int) -> list[Output]:
        """The next pieces, empty once the command has ended and all was given. Waits for some."""
        ...

    async def wait(self, sandbox: str, command: int) -> Result: ...
    async def signal(self, sandbox: str, command: int, signal: int) -> None: ...
    async def send_stdin(self, sandbox: str, command: int, data: bytes) -> None: ...
    async def close_stdin(self, sandbox: str, command: int) -> None: ...
    async def resize(self, sandbox: str, command: int, cols: int, rows: int) -> None: ...

    async def read_file(self, sandbox: str, path: str, user: str | int | None = None, limit: int = ...) -> bytes:
        """LimitExceeded if there are more than `limit` bytes, by default 512 MiB."""
        ...

    def stream_file(self, sandbox: str, path: str, user: str | int | None = None) -> AsyncIterator[bytes]: ...
    async def write_file(
        self,
        sandbox: str,
        path: str,
        data: bytes | AsyncIterator[bytes],
        mode: int | None = None,
        user: str | int | None = None,
    ) -> None: ...
    async def append_file(
        self, sandbox: str, path: str, data: bytes | AsyncIterator[bytes], user: str | int | None = None
    ) -> None: ...
    def pack_files(self, sandbox: str, path: str, user: str | int | None = None) -> AsyncIterator[bytes]:
        """A file or a tree as a tar stream. Its names, sizes and links are the sandbox's choice."""
        ...

    async def unpack_files(
        self,
        sandbox: str,
        path: str,
        data: AsyncIterator[bytes],
        user: str | int | None = None,
        owners: bool = False,
    ) -> None:
        """A tar stream to the file or tree `path`; with `owners` its files belong to whom it names."""
        ...

    async def watch_files(
        self, sandbox: str, path: str, recursive: bool = False, user: str | int | None = None
    ) -> int: ...
    async def file_events(self, sandbox: str, watch: int, timeout: float | None = None) -> list[FileEvent]:
        """The next ones. Waits for some; none come once the watch was ended, or after `timeout` seconds."""
        ...

    async def end_watch(self, sandbox: str, watch: int) -> None: ...
    async def list_files(self, sandbox: str, path: str, depth: int = 1) -> list[FileInfo]: ...
    async def stat_file(self, sandbox: str, path: str) -> FileInfo: ...
    async def make_dir(self, sandbox: str, path: str, mode: int = 0o755) -> None: ...
    async def remove_file(self, sandbox: str, path: str) -> None: ...
    async def rename_file(self, sandbox: str, old: str, new: str) -> None: ...
    async def symlink_file(self, sandbox: str, path: str, target: str) -> None: ...
    async def changes(self, sandbox: str, since: int | None = None) -> list[Change]: ...
    async def mark(self, sandbox: str) -> int: ...
    async def diff(self, sandbox: str, since: int | None = None, path: str = "/", limit: int = ...) -> str: ...
