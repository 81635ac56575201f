"""What a tier is: the verbs that every kind of sandbox offers to the node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from msgspec import Struct

from shoal.sandbox.access import Access
from shoal.sandbox.audit import AuditLog
from shoal.sandbox.channel import Process, Receiver, Request
from shoal.types import Audit, Layer, Profile

Listeners = tuple[int, ...]
"""Descriptors of the sockets of a filtered network: egress TCP, DNS UDP, DNS TCP."""


class BoxSpec(Struct, frozen=True, kw_only=True):
    """A sandbox as a tier makes it: everything is resolved, nothing is a name any more."""

    id: str
    hostname: str
    layers: tuple[Layer, ...]
    """Highest first."""
    profile: Profile
    network: Literal["isolated", "filtered"] = "isolated"
    access: Access | None = None
    audit: Audit = Audit()


class Box(Protocol):
    """One live sandbox."""

    id: str
    upper: int
    """A directory descriptor: in it `up` is what was written below "/", `up<n>` below the n-th of `mounts`."""
    mounts: tuple[str, ...]
    """Paths that have a writable layer of their own."""
    listeners: Listeners
    writable: int
    """Bytes that its files may take."""
    storage: Literal["memory", "disk"]
    """Where they are."""
    audit: AuditLog
    """What was asked to be written down of it."""

    def start(self, request: Request, receive: Receiver, *, auto_credit: bool = True) -> Process:
        """Asks its init to start a command or a file operation. SandboxGone if it has ended."""
        ...

    async def lowers(self) -> list[list[int]]:
        """Directory descriptors of the read-only layers of each of `mounts`, highest first. The caller closes them."""
        ...

    async def set_access(self, access: Access) -> None:
        """Tightens what its commands may use, also of those that run. InvalidRequest if anything would be loosened;
        SetupFailed if a step fails, by which it may have become tighter and nothing looser."""
        ...

    async def kill(self, reason: str) -> None:
        """Ends all of it; returns when no process is left. Idempotent. The rest is cleaned up in the background."""
        ...


class Tier(Protocol):
    """Makes boxes."""

    unenforced: tuple[str, ...]
    """Limits of a profile that this tier can't enforce on this machine."""
    capabilities: tuple[str, ...]
    """What its sandboxes can do beyond what every one can, as in the SDK's `capabilities`."""
    layered: bool
    """Whether its sandboxes are made of layers and have networks of their own."""
    prefix: str
    """How the ids of its sandboxes begin."""

    async def start(self) -> None: ...

    async def create(self, spec: BoxSpec, on_end: Callable[[str, str], None]) -> Box:
        """Makes a sandbox, all or nothing. `on_end(id, reason)` is called once when it has ended, for whatever cause.

        SetupFailed names the step that failed."""
        ...

    async def forget(self, digests: Sequence[str]) -> None:
        """Lets go of layers that no box uses, so that their files may be removed."""
        ...

    async def close(self) -> None:
        """Ends every box and returns when nothing of them is left."""
        ...

    def forsake(self) -> None:
        """In a forked child of the node's process: lets go of all connections, so that they end with the parent."""
        ...
