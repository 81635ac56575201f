"""Where a sandbox's files go, and how many bytes they may take."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from shoal.errors import InvalidRequest, Unsupported
from shoal.sandbox import disk
from shoal.types import Profile


class Rooms:
    """This machine's memory, and the disk below a folder."""

    def __init__(self, folder: Path, *, memory: int | None = None) -> None:
        """`memory`: bytes that the machine has; found out by default."""
        self._folder = folder
        self._memory = memory or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def settle(self, profile: Profile) -> Profile:
        """The profile with `upper` and `disk` as the sandbox gets them.

        "auto" gives memory, but to no sandbox more than half of the machine's. Where that would be less than half of
        what the profile asks for it gives disk, if this machine can and it has more there: a create takes a few
        milliseconds longer then. "memory" and "disk" give what was asked for, or raise.
        """
        match profile.upper:
            case "disk":
                if (why := disk.missing()) is not None:
                    raise Unsupported(f"profile.upper: 'disk' needs {why}; use 'memory' or 'auto'")
                return profile
            case "memory":
                if profile.disk > self._memory:
                    detail = f"{profile.disk} bytes in memory; this machine has {self._memory}"
                    raise InvalidRequest("profile.disk", detail)
                return profile
            case _:
                return self._choose(profile)

    def _choose(self, profile: Profile) -> Profile:
        in_memory = min(profile.disk, self._memory // 2)
        if profile.disk > self._memory and disk.missing() is None:
            on_disk = min(profile.disk, disk.free(self._folder))
            if on_disk > in_memory:
                return msgspec.structs.replace(profile, upper="disk", disk=on_disk)
        return msgspec.structs.replace(profile, upper="memory", disk=in_memory)
