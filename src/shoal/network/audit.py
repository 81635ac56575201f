"""What the egress reports: one event for each thing that a sandbox asked of the outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct


class Event(Struct, frozen=True, kw_only=True):
    """A name asked for, or a connection. Names and addresses were chosen by the sandbox."""

    kind: Literal["resolve", "connect", "close"]
    """`close` follows an allowed `connect` and carries the byte counts."""
    time: float
    """Seconds since the epoch."""
    allowed: bool
    name: str | None = None
    address: str | None = None
    """The address that the sandbox used."""
    port: int | None = None
    rule: str | None = None
    """The entry of the policy that decided, as it was written; None if no entry applies."""
    reason: str | None = None
    """Why it was refused or failed, where the policy's rule does not say it."""
    sent: int = 0
    """Bytes from the sandbox to the destination."""
    received: int = 0


Audit = Callable[[Event], None]
"""Called in the event loop: it must not block."""
