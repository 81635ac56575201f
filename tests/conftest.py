"""What all tests share: a home for Shoal's data, sandboxes, the `root` marker, and a look at what a run leaves behind."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from shoal.node import facts
from shoal.node.doctor.finding import Finding, Scene
from shoal.node.doctor.probe import PROBES, examine
from shoal.node.local import LocalNode
from shoal.sdk import embedded

PR_SET_CHILD_SUBREAPER = 36
OURS = ("shoal-init", "shoal-spawner")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    finding = privilege()
    if finding.status == "ok":
        return
    for item in items:
        if item.get_closest_marker("root") is not None:
            item.add_marker(pytest.mark.skip(reason=f"{finding.detail}. {finding.fix}"))


def privilege() -> Finding:
    """What `shoal doctor` says of the user who runs the tests."""
    (probe,) = (probe for probe in PROBES if probe.id == "host.privilege")
    return examine(probe, Scene(tempfile.gettempdir(), ""))


# What a run leaves


@pytest.fixture(scope="session", autouse=True)
def nothing_left(shoal_home: Path) -> Iterator[None]:
    """After the whole run no process, mount, cgroup or namespace of ours is there.

    Orphans come to us and not to the machine's init, so what tests started is told from what others run here.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    mounts, cgroups = mount_points(), cgroup_directories()
    yield
    embedded.close()
    left = wait_for_none(lambda: [f"process {process}" for process in descendants()])
    left += [f"mount {mount}" for mount in mount_points() - mounts]
    left += [f"cgroup {path}" for path in cgroup_directories() - cgroups if not owner_lives(path)]
    left += [f"descriptor of a namespace {name}" for name in held_namespaces()]
    assert not left, "the tests left:\n" + "\n".join(left)


def wait_for_none[T](look: object) -> list[T]:
    raise NotImplementedError
