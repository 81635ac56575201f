"""The SDK: `Sandbox` blocks, `AsyncSandbox` is for asyncio; the same verbs in both."""

from shoal.sdk.sandbox import AsyncCommand, AsyncSandbox
from shoal.sdk.sync import Command, Sandbox

__all__ = ["AsyncCommand", "AsyncSandbox", "Command", "Sandbox"]
