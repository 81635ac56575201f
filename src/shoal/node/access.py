"""An access policy as users write it, checked and made plain."""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import Sequence
from itertools import product
from typing import Final

from shoal.errors import InvalidRequest, SetupFailed, Unsupported
from shoal.sandbox.access import Access, contains
from shoal.types import AccessPolicy

_PATHS_MAX: Final = 256
_PATH_MAX: Final = 4095
_OTHERS: Final = ("/proc", "/sys")
"""Have rules of their own, and processes come and go in the first."""


def plain_access(policy: AccessPolicy) -> Access:
    """The policy as tiers take it. InvalidRequest names the field; Unsupported for what is for later."""
    if not isinstance(policy, AccessPolicy):
        raise InvalidRequest("access", f"takes an AccessPolicy, not {policy!r}")
    if policy.sealed:
        raise Unsupported(
            "access.sealed: sealed paths come with a later version; `hidden` covers them from every command"
        )
    access = Access(
        read_only=_paths("read_only", policy.read_only),
        hidden=_outermost(_paths("hidden", policy.hidden)),
        writable=None if policy.writable is None else _paths("writable", policy.writable),
        programs=None if policy.programs is None else _paths("programs", policy.programs),
    )
    _check_conflicts(access)
    return access


def _paths(field: str, paths: Sequence[str]) -> tuple[str, ...]:
    if isinstance(paths, str) or not isinstance(paths, Sequence):
        raise InvalidRequest(f"access.{field}", f"takes a list of paths, not {paths!r}")
    if len(paths) > _PATHS_MAX:
        raise InvalidRequest(f"access.{field}", f"{len(paths)} paths; {_PATHS_MAX} at most")
    return tuple(dict.fromkeys(_path(field, path) for path in paths))


def _path(field: str, path: str) -> str:
    if not isinstance(path, str) or not path.startswith("/"):
        raise InvalidRequest(f"access.{field}", f"takes absolute paths, not {path!r}")
    if "\0" in path or ".." in path.split("/") or len(os.fsencode(path)) > _PATH_MAX:
        raise InvalidRequest(
            f"access.{field}", f"{path[:80]!r} has a NUL or `..` in it, or more than {_PATH_MAX} bytes"
        )
    plain = "/" + posixpath.normpath(path).strip("/")
    if any(contains(folder, plain) for folder in _OTHERS):
        raise InvalidRequest(f"access.{field}", f"{plain}: /proc and /sys have rules of their own")
    return plain


def _outermost(paths: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(path for path in paths if not any(contains(other, path) for other in paths if other != path))


def _check_conflicts(access: Access) -> None:
    if "/" in access.hidden:
        raise InvalidRequest("access.hidden", "'/' cannot be hidden; nothing would run")
    if "/" in (access.programs or ()):
        raise InvalidRequest("access.programs", "'/' is every program; leave the field out for that")
    if both := set(access.read_only) & set(access.writable or ()):
        raise InvalidRequest("access.writable", f"{min(both)} is in read_only too")
    for program, place in product(access.programs or (), access.writable or ()):
        if place != "/" and contains(program, place):
            raise InvalidRequest("access.writable", f"{place} is below {program}, whose files are programs")
    inner = [("read_only", access.read_only), ("writable", access.writable), ("programs", access.programs)]
    for field, paths in inner:
        for path in paths or ():
            if access.hides(path):
                raise InvalidRequest(f"access.{field}", f"{path} is hidden")


_REASONS: Final = {
    "ENOENT": "is not there",
    "ENOTDIR": "goes through a file",
    "ELOOP": "goes through a symbolic link; in a sandbox that runs name the real path",
    "EMLINK": "is a file that has other names (hard links), by which it could still be reached; name those folders",
    "EBUSY": "has files that are open for writing; end what writes there first",
    "EACCES": "is hidden already",
}


def refused(error: SetupFailed) -> Exception:
    """Why a plan could not put the policy into force: the caller's doing where a path of it is to blame."""
    name = error.step.partition(", ")[2].partition("(")[0]
    reason = _REASONS.get(errno.errorcode.get(error.errno, ""))
    if name not in ("restrict", "hide") or reason is None:
        return error
    return InvalidRequest("access.hidden" if name == "hide" else "access", f"{error.detail} {reason}")
