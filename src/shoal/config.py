"""Where Shoal keeps things on this machine: functions of the environment and the user that create nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def data_dir(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """What outlives a node: layers, logs, the node's database. `uid` None means the effective user."""
    if home := environ.get("SHOAL_HOME"):
        return Path(home).absolute()
    if _is_root(uid):
        return Path("/var/lib/shoal")
    if data := environ.get("XDG_DATA_HOME"):
        return Path(data).absolute() / "shoal"
    return Path(environ.get("HOME") or "~").expanduser() / ".local/share/shoal"


def run_dir(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """What ends with the machine's uptime: sockets and locks. A socket's path has 107 bytes at most."""
    if _is_root(uid):
        return Path("/run/shoal")
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime).absolute() / "shoal"
    return data_dir(environ, uid) / "run"


def _is_root(uid: int | None) -> bool:
    return (os.geteuid() if uid is None else uid) == 0
