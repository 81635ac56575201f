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
from shoal.types import (
    AccessPolicy,
    Audit,
    AuditRecord,
    Change,
    FileInfo,
    Layer,
    NetworkPolicy,
    Profile,
    Result,
    SandboxInfo,
)

if TYPE_CHECKING:
    from shoal import rollouts
    from shoal.sdk import AsyncCommand, AsyncSandbox, Command, Sandbox

__version__ = "0.1.0"

__all__ = [
    "AccessPolicy",
    "AsyncCommand",
    "AsyncSandbox",
    "Audit",
    "AuditRecord",
    "BuildFailed",
    "CapacityError",
    "Change",
    "Command",
    "CommandFailed",
    "DigestMismatch",
    "FileExists",
    "FileInfo",
    "Interrupted",
    "InvalidRequest",
    "Layer",
    "LimitExceeded",
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
    "rollouts",
]

_LAZY = {
    "AsyncCommand": "shoal.sdk",
    "AsyncSandbox": "shoal.sdk",
    "Command": "shoal.sdk",
    "Sandbox": "shoal.sdk",
    "rollouts": "shoal.rollouts",
}
"""Loaded when first used, so that `import shoal` stays cheap and does nothing else."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        from shoal.sdk.requests import missing

        raise missing("shoal", name)
    module = import_module(_LAZY[name])
    return module if name == "rollouts" else getattr(module, name)
