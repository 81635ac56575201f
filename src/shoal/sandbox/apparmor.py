"""AppArmor, where the machine has it and an administrator has loaded our profile. Nothing depends on it."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Final

from shoal.sandbox.plan import NONE, Plan

NAME: Final = "shoal-sandbox"
_LOADED: Final = Path("/sys/kernel/security/apparmor/profiles")


def profile_file() -> Path:
    """What an administrator loads."""
    return Path(str(files("shoal.sandbox") / "data" / f"{NAME}.apparmor"))


def is_loaded(loaded: Path = _LOADED) -> bool:
    """Whether the kernel has the profile. No where this process may not see: ordinary users may not."""
    try:
        lines = loaded.read_text().splitlines()
    except OSError:
        return False
    return any(line.partition(" (")[0] == NAME for line in lines)


def confine(plan: Plan) -> None:
    """Puts the sandbox's init under the profile, and with it all that it starts."""
    plan.add("write", NONE, "/proc/self/attr/apparmor/current", f"changeprofile {NAME}")
