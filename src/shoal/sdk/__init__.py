"""The SDK: `Sandbox` blocks, `AsyncSandbox` is for asyncio; the same verbs in both."""

from shoal.sdk.commands import AsyncCommand
from shoal.sdk.sandbox import AsyncSandbox
from shoal.sdk.shells import AsyncPty, AsyncShell
from shoal.sdk.sync import Sandbox
from shoal.sdk.sync_commands import Command
from shoal.sdk.sync_shells import Pty, Shell

__all__ = ["AsyncCommand", "AsyncPty", "AsyncSandbox", "AsyncShell", "Command", "Pty", "Sandbox", "Shell"]
