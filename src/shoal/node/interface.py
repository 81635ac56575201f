"""The verbs of a node, and the requests they take. The SDK's engine seam: one in this process now, HTTP later."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from shoal.types import (
    AccessPolicy,
    Audit,
    AuditRecord,
    Change,
    CommandInfo,
    FileEvent,
    FileInfo,
    Layer,
    NetworkPolicy,
    Profile,
    Result,
    SandboxInfo,
    Unclaimed,
)

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
    access: AccessPolicy | None = None
    env: Mapping[str, str] = {}
    cwd: str = "/workspace"
    user: str | int = "root"
    ttl: float | None = 3600.0
    """Seconds after which it is ended; None for as long as the node lives."""
    metadata: Mapping[str, str] = {}
    audit: Audit = Audit()


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
    hold: bool = False
    """In the background: its output waits for the one who started it, however long that takes. Else it goes on without
    a reader, and what is oldest falls out of what is kept."""


class ShellRequest(Struct, frozen=True, kw_only=True):
    """A shell that stays, for one command after the other."""

    env: Mapping[str, str] = {}
    cwd: str | None = None
    user: str | int | None = None


class ShellCommand(Struct, frozen=True, kw_only=True):
    """Text for the shell of a session; the limits as those of `CommandRequest`."""

    cmd: str
    timeout: float | None = None
    silence: float | None = None
    output_limit: int = OUTPUT_LIMIT


class ShellEnd(Struct, frozen=True):
    """How a command of a session ended, and whether the session ended with it."""

    result: Result
    closed: bool


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
    async def set_access(self, sandbox: str, policy: AccessPolicy) -> None:
        """InvalidRequest if it would allow what the present one refuses."""
        ...

    async def run(self, sandbox: str, request: CommandRequest) -> Result: ...
    async def start(self, sandbox: str, request: CommandRequest) -> tuple[int, int]:
        """(id of the command, its pid inside). What becomes of its output `node.retained` says."""
        ...

    async def output(self, sandbox: str, command: int, offset: int = 0, reader: str = "") -> list[Output]:
        """The next pieces from that byte on, empty once the command has ended and all was given. Waits for some.

        `reader` tells those who read at the same time apart; the one who started the command is "". A reader has used
        up what is before the offset that it asks for. OutputLost if that has fallen out of what is kept."""
        ...

    async def leave_output(self, sandbox: str, command: int, reader: str = "") -> None:
        """That reader will take no more: the command does not wait for it."""
        ...

    async def wait(self, sandbox: str, command: int, reader: str = "") -> Result:
        """Its end. Whoever waits reads no more; see `leave_output`."""
        ...

    async def list_commands(self, sandbox: str) -> list[CommandInfo]:
        """Those that run in the background, and those that ended not long ago."""
        ...

    async def find_command(self, sandbox: str, command: int) -> CommandInfo: ...
    async def signal(self, sandbox: str, command: int, signal: int) -> None: ...
    async def send_stdin(self, sandbox: str, command: int, data: bytes) -> None: ...
    async def close_stdin(self, sandbox: str, command: int) -> None: ...
    async def resize(self, sandbox: str, command: int, cols: int, rows: int) -> None: ...

    async def open_shell(self, sandbox: str, request: ShellRequest) -> tuple[int, int]:
        """(id of the session, the pid of its shell inside)."""
        ...

    async def run_in_shell(self, sandbox: str, shell: int, command: ShellCommand) -> ShellEnd:
        """SessionClosed if the shell has ended before. Those of one session run one after the other."""
        ...

    def stream_in_shell(self, sandbox: str, shell: int, command: ShellCommand) -> AsyncIterator[Output | ShellEnd]:
        """The same with its output as it comes, and its end as the last. Who stops reading ends the command."""
        ...

    async def unclaimed(self, sandbox: str, shell: int) -> Unclaimed:
        """What was written while no command ran, since the last call."""
        ...

    async def close_shell(self, sandbox: str, shell: int) -> None:
        """Ends the shell and all it started. Idempotent."""
        ...

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
    async def audit(self, sandbox: str, since: float = 0.0) -> list[AuditRecord]: ...
    async def changes(self, sandbox: str, since: int | None = None) -> list[Change]: ...
    async def mark(self, sandbox: str) -> int: ...
    async def diff(self, sandbox: str, since: int | None = None, path: str = "/", limit: int = ...) -> str: ...
