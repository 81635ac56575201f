"""The SDK: `Sandbox` blocks, `AsyncSandbox` is for asyncio; the same verbs in both."""

from shoal.sdk.commands import AsyncCommand
from shoal.sdk.sandbox import AsyncSandbox, AsyncWatch
from shoal.sdk.shells import AsyncPty, AsyncShell
from shoal.sdk.sync import Sandbox, Watch
from shoal.sdk.sync_commands import Command
from shoal.sdk.sync_shells import Pty, Shell

__all__ = [
    "AsyncCommand",
    "AsyncPty",
    "AsyncSandbox",
    "AsyncShell",
    "AsyncWatch",
    "Command",
    "Pty",
    "Sandbox",
    "Shell",
    "Watch",
]
