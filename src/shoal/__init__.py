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
    OutputLost,
    PermissionDenied,
    PlatformError,
    SandboxGone,
    SessionClosed,
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
    CommandInfo,
    FileEvent,
    FileInfo,
    Layer,
    Mark,
    NetworkPolicy,
    Profile,
    Result,
    SandboxInfo,
    Unclaimed,
)

if TYPE_CHECKING:
    from shoal import rollouts
    from shoal.sdk import (
        AsyncCommand,
        AsyncPty,
        AsyncSandbox,
        AsyncShell,
        AsyncWatch,
        Command,
        Pty,
        Sandbox,
        Shell,
        Watch,
    )

__version__ = "0.1.0"

__all__ = [
    "AccessPolicy",
    "AsyncCommand",
    "AsyncPty",
    "AsyncSandbox",
    "AsyncShell",
    "AsyncWatch",
    "Audit",
    "AuditRecord",
    "BuildFailed",
    "CapacityError",
    "Change",
    "Command",
    "CommandFailed",
    "CommandInfo",
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
    "OutputLost",
    "PermissionDenied",
    "PlatformError",
    "Profile",
    "Pty",
    "Result",
    "Sandbox",
    "SandboxGone",
    "SandboxInfo",
    "SessionClosed",
    "SetupFailed",
    "Shell",
    "ShoalError",
    "StorageFull",
    "Unclaimed",
    "Unsupported",
    "Watch",
    "rollouts",
]

_LAZY = {
    "AsyncCommand": "shoal.sdk",
    "AsyncPty": "shoal.sdk",
    "AsyncSandbox": "shoal.sdk",
    "AsyncShell": "shoal.sdk",
    "AsyncWatch": "shoal.sdk",
    "Command": "shoal.sdk",
    "Pty": "shoal.sdk",
    "Sandbox": "shoal.sdk",
    "Shell": "shoal.sdk",
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
