"""An access policy as mounts and a Landlock domain: which paths are covered by what. Pure, from it to plans."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Collection, Iterable
from typing import Final

from msgspec import Struct

from shoal.errors import InvalidRequest
from shoal.sandbox.plan import NONE, OWN_MOUNTS, Plan

_RDONLY, _NOEXEC = 1, 8
"""MOUNT_ATTR_*"""
_MAY_BE_MISSING, _REAL_PATH, _IN_PLACE, _ONLY_LOOK = 1, 2, 8, 16
"""How init/mounts.c looks a path up, and what it does there."""
_ROOT, _VIEW = 0, 1
"""Registers of a plan for a sandbox that runs."""
MEMORY: Final = "/dev/shm"
_LOADERS: Final = (
    "/lib64/ld-linux-x86-64.so.2",
    "/lib/ld-linux-aarch64.so.1",
    "/lib/ld-musl-x86_64.so.1",
    "/lib/ld-musl-aarch64.so.1",
    "/lib/ld-linux.so.2",
)
"""The kernel executes them with each dynamic program."""
_LIBRARY_FOLDERS: Final = ("lib", "lib32", "lib64", "libx32")


class Access(Struct, frozen=True):
    """An access policy that was checked: paths are absolute and have no `.`, `..` or double slashes."""

    read_only: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    writable: tuple[str, ...] | None = None
    """None: all that is not read-only."""
    programs: tuple[str, ...] | None = None
    """None: all."""

    def hides(self, path: str) -> bool:
        return _deepest(path, self.hidden) is not None

    def writes(self, path: str) -> bool:
        """Whether what is there may be written; the entry nearest to it decides."""
        refused = _deepest(path, self.read_only)
        allowed = _deepest(path, ("/",) if self.writable is None else self.writable)
        return allowed is not None and (refused is None or len(allowed) > len(refused))

    def runs(self, path: str) -> bool:
        return self.programs is None or _deepest(path, self.programs) is not None

    @property
    def paths(self) -> set[str]:
        """Where anything changes from one state to another."""
        return {"/", *self.read_only, *self.hidden, *(self.writable or ()), *(self.programs or ())}


ALL: Final = Access()
"""What a sandbox without a policy allows."""


def contains(folder: str, path: str) -> bool:
    """Whether `path` is the folder or below it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _deepest(path: str, entries: Iterable[str]) -> str | None:
    return max((entry for entry in entries if contains(entry, path)), key=len, default=None)


def check_tighter(old: Access, new: Access) -> None:
    """InvalidRequest, naming the field, if anything is allowed by `new` that `old` refuses."""
    for path in sorted(old.paths | new.paths):
        if new.hides(path):
            continue
        if old.hides(path):
            raise InvalidRequest("access.hidden", f"{path} is hidden; a policy can only be tightened")
        if new.writes(path) and not old.writes(path):
            field = "read_only" if path in old.read_only else "writable"
            raise InvalidRequest(f"access.{field}", f"{path} is read-only; a policy can only be tightened")
    kept = new.programs if old.programs is not None else ()
    if kept is None or not set(kept) <= set(old.programs or ()):
        raise InvalidRequest("access.programs", "may only get shorter; a policy can only be tightened")
    for path in new.writable or ():
        if (outer := _newly_read_only(old, new, path)) is not None:
            raise InvalidRequest(
                "access.read_only", f"{outer} has {path} in it, which stays writable: name what is beside"
            )


def _newly_read_only(old: Access, new: Access, path: str) -> str | None:
    """An entry above a path that was writable by itself, and would be covered together with it."""
    if path not in (old.writable or ()):
        return None
    above = (entry for entry in new.read_only if entry != path and contains(entry, path))
    return next((entry for entry in above if old.writes(entry)), None)


class _Cover(Struct, frozen=True):
    """Attributes for one path."""

    path: str
    set: int
    clear: int = 0
    flags: int = 0


def add_policy(
    plan: Plan, root: int, access: Access, targets: Iterable[str], *, old: Access = ALL, look: int = 0
) -> None:
    """Narrows the tree at `root`, whose own mounts are at `targets`, from what `old` allows to what `access` does.

    `look`: how paths are looked up, by the flags above."""
    mounts = {"/", *targets, MEMORY}
    for path in sorted(mounts):
        if (attributes := _base(path, old, access)) and not look & _ONLY_LOOK:
            plan.add("restrict", root, path, attributes, 0, look | _IN_PLACE)
    for cover in _covers(old, access, mounts):
        plan.add("restrict", root, cover.path, cover.set, cover.clear, look | cover.flags)
    for path in access.hidden:
        if not old.hides(path):
            plan.add("hide", root, path, look)


def _base(mount: str, old: Access, new: Access) -> int:
    """What becomes true of a whole mount, and so in place: nobody who has it open already can go past that."""
    read_only = old.writes(mount) and not new.writes(mount)
    no_programs = old.programs is None and new.programs is not None and not new.runs(mount)
    return _RDONLY * read_only | _NOEXEC * no_programs


def _covers(old: Access, new: Access, mounts: Collection[str]) -> list[_Cover]:
    """Outer ones first: the copy of an outer path brings along what lies on an inner one."""
    paths = [path for path in old.paths | new.paths if path not in mounts and not new.hides(path)]
    found = [_Cover(path, _RDONLY) for path in paths if old.writes(path) and not new.writes(path)]
    no_programs = _NOEXEC if new.programs is not None else 0
    rooms = new.writable or ()
    found += [_Cover(path, no_programs, _RDONLY) for path in rooms if old.writable is None or path not in old.writable]
    if new.programs is not None and old.programs is None:
        found += [_Cover(path, _RDONLY, _NOEXEC, _MAY_BE_MISSING) for path in library_folders(mounts)]
        found += [_Cover(path, _RDONLY, _NOEXEC) for path in new.programs]
    found += [_Cover(path, _NOEXEC) for path in old.programs or () if not new.runs(path)]
    return sorted(found, key=lambda cover: (cover.path.count("/"), cover.path))


def library_folders(mounts: Iterable[str]) -> list[str]:
    """From where code may be mapped though it is no program: what a loader needs, and a writer must not change."""
    prefixes = sorted({"/", "/usr", "/usr/local", *mounts} - {MEMORY})
    return [posixpath.join(prefix, name) for prefix in prefixes for name in _LIBRARY_FOLDERS]


def executable(access: Access) -> list[str]:
    """The paths that Landlock lets through: in library folders, from which code must be mapped, mounts can't tell what
    is a program. A domain that lets all through still keeps those in it from looking into processes outside of it."""
    return ["/"] if access.programs is None else [*access.programs, *_LOADERS]


def add_domain(plan: Plan, access: Access) -> None:
    """What is left to do when the mounts are in place, by the process that all commands descend from."""
    plan.add("landlock", executable(access))
    if access.programs is not None:
        plan.add("no_memory_files")


def show(pid: int, mount: str) -> Plan:
    """The plan that sends out a mount of a sandbox that runs, by where it is."""
    plan = Plan()
    plan.add("visit", pid)
    plan.add("open", _ROOT, NONE, mount, os.O_PATH)
    plan.add("enter", OWN_MOUNTS)
    plan.add("send", _ROOT)
    return plan


def inspect(pid: int, access: Access, targets: Iterable[str], old: Access) -> Plan:
    """The plan that looks up all that `visit` will need, so that what fails changes nothing, and sends out the tree of
    a sandbox that runs as it is now."""
    plan = Plan()
    plan.add("visit", pid)
    plan.add("open", _ROOT, NONE, "/", os.O_PATH | os.O_DIRECTORY)
    add_policy(plan, _ROOT, access, targets, old=old, look=_REAL_PATH | _ONLY_LOOK)
    plan.add("clone_all", _VIEW, _ROOT)
    plan.add("enter", OWN_MOUNTS)
    plan.add("send", _VIEW)
    return plan


def visit(pid: int, access: Access, targets: Iterable[str], old: Access) -> Plan:
    """The plan that narrows a sandbox that runs."""
    plan = Plan()
    plan.add("visit", pid)
    plan.add("open", _ROOT, NONE, "/", os.O_PATH | os.O_DIRECTORY)
    add_policy(plan, _ROOT, access, targets, old=old, look=_REAL_PATH)
    plan.add("enter", OWN_MOUNTS)
    return plan
