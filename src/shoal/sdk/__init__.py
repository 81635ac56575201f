"""The SDK: `Sandbox` blocks, `AsyncSandbox` is for asyncio; the same verbs in both."""

from shoal.sdk.sandbox import AsyncCommand, AsyncSandbox, AsyncWatch
from shoal.sdk.sync import Command, Sandbox, Watch

__all__ = ["AsyncCommand", "AsyncSandbox", "AsyncWatch", "Command", "Sandbox", "Watch"]
