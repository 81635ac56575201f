"""Shoal: elastic sandboxes for agentic reinforcement learning.

with shoal.Sandbox.create() as box:
    print(box.commands.run("echo hi").stdout)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal.errors import (
    BuildFailed,
    CapacityError,
    CommandFailed,
    DigestMismatch,
    FileExists,
    Interrupted,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    PermissionDenied,
    PlatformError,
    SandboxGone,
    SetupFailed,
    ShoalError,
    StorageFull,
    Unsupported,
)
from shoal.types import Change, FileEvent, FileInfo, Layer, Mark, NetworkPolicy, Profile, Result, SandboxInfo

if TYPE_CHECKING:
    from shoal import rollouts
    from shoal.sdk import AsyncCommand, AsyncSandbox, AsyncWatch, Command, Sandbox, Watch

__version__ = "0.1.0"

__all__ = [
    "AsyncCommand",
    "AsyncSandbox",
    "AsyncWatch",
    "BuildFailed",
    "CapacityError",
    "Change",
    "Command",
    "CommandFailed",
    "DigestMismatch",
    "FileEvent",
    "FileExists",
    "FileInfo",
    "Interrupted",
    "InvalidRequest",
    "Layer",
    "LimitExceeded",
    "Mark",
    "NetworkPolicy",
    "NotFound",
    "PermissionDenied",
    "PlatformError",
    "Profile",
    "Result",
    "Sandbox",
    "SandboxGone",
    "SandboxInfo",
    "SetupFailed",
    "ShoalError",
    "StorageFull",
    "Unsupported",
    "Watch",
    "rollouts",
]

_LAZY = {
    "AsyncCommand": "shoal.sdk",
    "AsyncSandbox": "shoal.sdk",
    "AsyncWatch": "shoal.sdk",
    "Command": "shoal.sdk",
    "Sandbox": "shoal.sdk",
    "Watch": "shoal.sdk",
    "rollouts": "shoal.rollouts",
}
"""Loaded when first used, so that `import shoal` stays cheap and does nothing else."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        from shoal.sdk.requests import missing

        raise missing("shoal", name)
    module = import_module(_LAZY[name])
    return module if name == "rollouts" else getattr(module, name)
