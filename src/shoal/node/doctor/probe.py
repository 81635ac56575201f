"""All probes, and the small process that runs them.

`python -m shoal.node.doctor.probe SCENE` tries each in a fork of its own, which ends by its time limit at the
latest, and prints a finding a line. It is a process apart because the node is large and must not fork.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import NoReturn

from shoal.node.doctor import (
    audit,
    calls,
    cgroups,
    erofs,
    host,
    limits,
    mounts,
    namespaces,
    network,
    security,
    storage,
)
from shoal.node.doctor.finding import MISSING_FIX, Finding, Probe, Scene, Shortfall

NOBODY = 65534

PROBES: tuple[Probe, ...] = (
    *namespaces.PROBES,
    *mounts.PROBES,
    *erofs.PROBES,
    *cgroups.PROBES,
    *security.PROBES,
    *network.PROBES,
    *storage.PROBES,
    *host.PROBES,
    *limits.PROBES,
    *audit.PROBES,
)


class TimeIsUp(Exception):
    """Raised in a probe by SIGTERM, so that it removes what it made."""


def examine(probe: Probe, scene: Scene) -> Finding:
    """Runs the probe here and now; whatever goes wrong in it is a finding."""
    try:
        return probe.found("ok", probe.run(scene))
    except Shortfall as shortfall:
        return probe.found(shortfall.status or probe.missing, shortfall.detail, shortfall.fix)
    except TimeIsUp:
        return probe.found(probe.missing, f"no answer within {probe.timeout:g} s")
    except OSError as error:
        return probe.found(probe.missing, error.strerror or str(error))
    except Exception as error:
        return probe.found("warn", f"the probe itself failed: {type(error).__name__}: {error}", MISSING_FIX)


def attempt(probe: Probe, scene: Scene) -> Finding:
    """Runs the probe in a fork with a time limit; nothing it started outlives this call."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _inside(probe, scene, writer)
    os.close(writer)
    try:
        answer = _answer(reader, pid, probe.timeout)
    except SystemExit:
        _ask_to_end(reader, pid)
        raise
    finally:
        os.close(reader)
        _end(pid)
    if not answer:
        return probe.found(probe.missing, f"the probe ended without an answer within {probe.timeout:g} s")
    return Finding(**json.loads(answer))


def _inside(probe: Probe, scene: Scene, writer: int) -> NoReturn:
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, _time_is_up)
        if probe.as_user and os.geteuid() == 0:
            _become_nobody()
        calls.prctl("prctl", calls.PR_SET_PDEATHSIG, signal.SIGTERM)
        os.write(writer, json.dumps(asdict(examine(probe, scene))).encode())
    finally:
        os._exit(0)


def _time_is_up(_number: int, _frame: object) -> NoReturn:
    raise TimeIsUp


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    # Changing ids makes a process undumpable, and then its own /proc files belong to root.
    calls.prctl("prctl", calls.PR_SET_DUMPABLE, 1)


def _answer(reader: int, pid: int, timeout: float) -> bytes:
    if select.select([reader], [], [], timeout)[0] or _ask_to_end(reader, pid):
        return os.read(reader, 65536)
    return b""


def _ask_to_end(reader: int, pid: int) -> bool:
    """Gives the probe half a second to take back what it made; whether it had something to say."""
    os.kill(pid, signal.SIGTERM)
    return bool(select.select([reader], [], [], 0.5)[0])


def _end(pid: int) -> None:
    # The group may not exist yet if the fork has not run at all; the pid always does until it is waited for.
    for kill, target in ((os.killpg, pid), (os.kill, pid)):
        try:
            kill(target, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os.waitpid(pid, 0)


def main(arguments: Sequence[str]) -> None:
    scene = Scene(**json.loads(arguments[0]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for probe in PROBES:
        print(json.dumps(asdict(attempt(probe, scene))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
