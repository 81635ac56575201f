"""From what users write to what a node takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from shoal.errors import InvalidRequest, Unsupported
from shoal.types import Audit, Layer, Profile

_LATER: Final = {
    "volumes": "volumes",
    "idle": "idle times",
    "snapshot": "snapshots",
    "session": "sessions",
    "on_divergence": "sessions",
    "priority": "priorities",
    "group": "groups",
    "seed": "seeds",
    "wait": "waiting for room",
    "key": "idempotent creates",
}
"""Arguments of the interface that come with later versions."""


_LATER_VERBS: Final = {
    "Sandbox": "state metrics pause resume set_ttl inject observe reset release set_network host"
    " snapshot fork rollback run_code",
    "Files": "",
    "shoal": "AsyncGroup AsyncPool AsyncSession Divergence Group Pool Session"
    " Snapshot TaskRequest connect function judge session submit",
}
"""Names of the interface that come with later versions, by where they belong."""


def missing(owner: str, name: str) -> Exception:
    """What asking for an attribute that is not there raises: Unsupported if a later version has it."""
    if name in _LATER_VERBS[owner].split():
        return Unsupported(f"{owner}.{name} comes with a later version")
    return AttributeError(f"{owner} has no attribute {name!r}")


def refuse_later(options: Mapping[str, Any]) -> None:
    """Unsupported for an argument of a later version, InvalidRequest for one that is none."""
    for name in options:
        if name in _LATER:
            raise Unsupported(f"{name}: {_LATER[name]} are not in this version")
        raise InvalidRequest(name, "is not an argument of Sandbox.create")


def plain_env(env: Mapping[str, str] | None) -> dict[str, str]:
    if env is not None and not isinstance(env, Mapping):
        raise InvalidRequest("env", f"maps names to texts; {env!r} does not")
    return dict(env or {})


def plain_layers(layers: Iterable[str | Layer]) -> tuple[str | Layer, ...]:
    if isinstance(layers, str):
        raise InvalidRequest("layers", f"takes a list of keys, not the one text {layers!r}")
    return tuple(layers)


def profile_of(profile: str | Profile) -> str | Profile:
    if not isinstance(profile, (str, Profile)):
        raise InvalidRequest("profile", f"takes a name or a Profile, not {profile!r}")
    return profile


def audit_of(audit: Audit | None) -> Audit:
    if audit is not None and not isinstance(audit, Audit):
        raise InvalidRequest("audit", f"takes an Audit, not {audit!r}")
    return audit or Audit()
