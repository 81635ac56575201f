"""What a probe is and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "warn", "fail", "absent"]
"""`fail`: sandboxes cannot run. `warn`: they run with less. `absent`: not here, and nothing needs it yet."""

MISSING_FIX = "Report this with the output of `shoal doctor --json`; the other findings stand."


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `fix` is what to do, and empty only where `status` is ok."""

    id: str
    group: str
    title: str
    status: Status
    detail: str
    why: str
    fix: str


@dataclass(frozen=True)
class Scene:
    """Where probes act."""

    data: str
    """The data folder; it need not be there yet."""
    scratch: str
    """An empty folder on the data folder's file system, removed afterwards; "" where none could be made."""
    scratch_error: str = ""
    """Why there is no scratch folder."""

    @property
    def folder(self) -> Path:
        """The scratch folder, for probes that cannot do without."""
        if not self.scratch:
            raise Shortfall(f"not tried: {self.scratch_error}")
        return Path(self.scratch)


class Shortfall(Exception):
    """What a probe raises when the thing is not as it should be. None leaves the probe's own word."""

    def __init__(self, detail: str, status: Status | None = None, fix: str | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.status = status
        self.fix = fix


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Something to try. `run` says what it saw, or raises Shortfall or OSError."""

    id: str
    title: str
    run: Callable[[Scene], str]
    why: str
    """Why it matters for Shoal."""
    fix: str
    """What to do if it is missing."""
    missing: Status = "warn"
    """The status where it is not there."""
    limits: tuple[str, ...] = ()
    """Fields of a profile that nothing enforces without it."""
    as_user: bool = False
    """Tried as nobody when the caller is root."""
    timeout: float = 3.0
    """Seconds until it is ended."""

    @property
    def group(self) -> str:
        return self.id.partition(".")[0]

    def found(self, status: Status, detail: str, fix: str | None = None) -> Finding:
        way_out = "" if status == "ok" else (self.fix if fix is None else fix)
        return Finding(self.id, self.group, self.title, status, detail, self.why, way_out)
