"""The accounts of a sandbox: those that packages made on this machine, and `user`. No person, no password."""

from __future__ import annotations

from pathlib import Path

USER, USER_ID = "user", 1000
_NOBODY = 65534


def write(etc: Path, host_etc: Path) -> None:
    """Make passwd, group, shadow, gshadow, subuid and subgid in `etc` from those of `host_etc`."""
    users = _system_lines(host_etc / "passwd", fields=7)
    groups = _system_lines(host_etc / "group", fields=4)
    names = {user[0] for user in users}
    for group in groups:
        group[1] = "x"
        group[3] = ",".join(name for name in group[3].split(",") if name in names)
    users.append([USER, "x", str(USER_ID), str(USER_ID), "", f"/home/{USER}", "/bin/bash"])
    groups.append([USER, "x", str(USER_ID), ""])
    _write(etc / "passwd", [_anonymous(user) for user in users], 0o644)
    _write(etc / "group", groups, 0o644)
    _write(etc / "shadow", [[user[0], "*", "19000", "0", "99999", "7", "", "", ""] for user in users], 0o640)
    _write(etc / "gshadow", [[group[0], "*", "", ""] for group in groups], 0o640)
    for name in ("subuid", "subgid"):
        _write(etc / name, [], 0o644)


def _system_lines(file: Path, fields: int) -> list[list[str]]:
    """The entries below 1000, and nobody; root always, even if the file is unreadable or says otherwise."""
    try:
        lines = [line.split(":") for line in file.read_text(errors="replace").splitlines()]
    except OSError:
        lines = []
    found = [line for line in lines if len(line) == fields and _is_system(line[2]) and line[0] not in ("root", USER)]
    root = ["root", "x", "0", "0", "", "/root", "/bin/bash"] if fields == 7 else ["root", "x", "0", ""]
    return [root, *found]


def _is_system(number: str) -> bool:
    return number.isdecimal() and (0 < int(number) < USER_ID or int(number) == _NOBODY)


def _anonymous(user: list[str]) -> list[str]:
    """Without the comment, where people's names stand; `x` sends whoever asks to the locked shadow."""
    return [user[0], "x", *user[2:4], "", *user[5:]]


def _write(file: Path, lines: list[list[str]], mode: int) -> None:
    file.write_text("".join(":".join(line) + "\n" for line in lines))
    file.chmod(mode)
