"""The whole examination: starts the probes' process, and draws the conclusion for the namespace tier."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path

from shoal import config
from shoal.node import facts
from shoal.node.doctor.finding import MISSING_FIX, Finding, Probe, Scene
from shoal.node.doctor.probe import PROBES

PATIENCE = 30.0
"""Seconds for all probes together."""


@dataclass(frozen=True)
class Tier:
    """Whether sandboxes of a tier can run here, and what nothing would enforce in them."""

    available: bool
    unenforced: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """What `shoal doctor` says."""

    machine: dict[str, facts.Fact]
    findings: tuple[Finding, ...]
    tier: dict[str, Tier]


def examine(data: Path | None = None) -> Report:
    """Tries everything, for about five seconds. `data` None means the data folder of this user."""
    folder = (data or config.data_dir()).absolute()
    with scene(folder) as where:
        findings = tuple(_findings(where))
    return Report(facts.machine(folder), findings, {"namespace": namespace_tier(findings)})


@contextmanager
def scene(data: Path) -> Iterator[Scene]:
    """A scratch folder on the file system of `data`, gone afterwards with all that probes left in it."""
    try:
        scratch = tempfile.mkdtemp(prefix=".shoal-doctor-", dir=facts.existing(data))
    except OSError as error:
        yield Scene(str(data), "", f"{facts.existing(data)}: {error.strerror}")
        return
    try:
        yield Scene(str(data), scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _findings(where: Scene) -> Iterator[Finding]:
    """One for each probe, also for those that the process did not come to."""
    try:
        lines, reason = _run(where).splitlines(), "the process that tries things ended early"
    except OSError as error:
        lines, reason = [], f"{sys.executable} cannot be started: {error.strerror}"
    for probe, line in zip_longest(PROBES, lines[: len(PROBES)]):
        yield _not_tried(probe, reason) if line is None else Finding(**json.loads(line))


def _not_tried(probe: Probe, reason: str) -> Finding:
    return probe.found(probe.missing, f"not tried: {reason}", MISSING_FIX)


def _run(where: Scene) -> str:
    command = [sys.executable, "-P", "-m", "shoal.node.doctor.probe", json.dumps(asdict(where))]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as process:
        try:
            return process.communicate(timeout=PATIENCE)[0]
        except subprocess.TimeoutExpired:
            process.terminate()
            return process.communicate()[0]
        except BaseException:
            # Ctrl-C: asked to end, it takes back what it made.
            process.terminate()
            raise


def namespace_tier(findings: tuple[Finding, ...]) -> Tier:
    status = {finding.id: finding.status for finding in findings}
    available = "fail" not in status.values()
    lacking = {field for probe in PROBES if status.get(probe.id, "ok") != "ok" for field in probe.limits}
    return Tier(available, tuple(sorted(lacking)))
