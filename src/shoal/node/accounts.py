"""Users of a sandbox, by its own /etc/passwd and /etc/group, which it may have changed: parsed as hostile text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from shoal.errors import InvalidRequest
from shoal.sandbox.slots import IDS

_LINES_MAX: Final = 65_536
_GROUPS_MAX: Final = 64


class Account(Struct, frozen=True):
    """Who a command runs as."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str
    groups: tuple[int, ...] = ()

    def environment(self) -> dict[str, str]:
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name, "SHELL": self.shell}


ROOT: Final = Account("root", 0, 0, "/root", "/bin/bash")


def find_account(user: str | int, passwd: bytes, group: bytes) -> Account:
    """By name or number. A number without an entry is taken as it is, with its own group and / as home."""
    wanted = str(user)
    number = _id(wanted) if wanted.isascii() and wanted.isdigit() else None
    if number is None and wanted.isascii() and wanted.isdigit():
        raise InvalidRequest("user", f"{wanted[:20]} is outside of the sandbox's ids, 0 to {IDS - 1}")
    for fields in _entries(passwd, 7):
        name, uid, gid = fields[0], _id(fields[2]), _id(fields[3])
        if uid is not None and gid is not None and (name == wanted or uid == number):
            return Account(name, uid, gid, fields[5] or "/", fields[6] or "/bin/sh", _groups(name, gid, group))
    if number is None:
        raise InvalidRequest("user", f"the sandbox has no user {user!r}")
    return Account(wanted, number, number, "/", "/bin/sh")


def _entries(text: bytes, fields: int) -> Iterator[list[str]]:
    for line in text.split(b"\n", _LINES_MAX)[:_LINES_MAX]:
        if b"\0" in line:  # could not be handed over in an environment
            continue
        parts = line.decode("utf-8", "surrogateescape").split(":")
        if len(parts) == fields and "\0" not in "".join(parts):
            yield parts


def _id(text: str) -> int | None:
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 8 else IDS
    return value if value < IDS else None


def _groups(name: str, own: int, group: bytes) -> tuple[int, ...]:
    found = {own: None}
    for fields in _entries(group, 4):
        gid = _id(fields[2])
        if gid is not None and name in fields[3].split(","):
            found[gid] = None
    return tuple(found)[:_GROUPS_MAX]
