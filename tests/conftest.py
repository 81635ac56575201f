"""What all tests share: a home for Shoal's data, sandboxes, the `root` marker, and a look at what a run leaves."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import residue
import shoal
from shoal.node import facts
from shoal.node.doctor.finding import Finding, Scene
from shoal.node.doctor.probe import PROBES, examine
from shoal.sdk import embedded

PR_SET_CHILD_SUBREAPER = 36


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() == 0:
        return
    finding = privilege()
    for item in items:
        if item.get_closest_marker("root") is not None:
            item.add_marker(pytest.mark.skip(reason=f"{finding.detail}. {finding.fix}"))


def privilege() -> Finding:
    """What `shoal doctor` says of the user who runs the tests."""
    (probe,) = (probe for probe in PROBES if probe.id == "host.privilege")
    return examine(probe, Scene(tempfile.gettempdir(), ""))


@pytest.fixture(scope="session")
def shoal_home() -> Iterator[Path]:
    """Shared by the session, so that the host's image is made once; on a disk, where EROFS can be mounted from."""
    places = (Path(tempfile.gettempdir()), Path("/var/tmp"), Path(__file__).parent)
    place = next((place for place in places if facts.filesystem(place) not in ("tmpfs", "overlay")), places[0])
    home = Path(tempfile.mkdtemp(prefix="shoal-tests-", dir=place))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_HOME", str(home))
        yield home
    shutil.rmtree(home)


@pytest.fixture(scope="session", autouse=True)
def nothing_left(shoal_home: Path) -> Iterator[None]:
    """After the whole run no process, mount, cgroup or descriptor of ours is there.

    Orphans come to us and not to the machine's init, so what the tests started is told from what others run here.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    mounts, cgroups = residue.mounts(), residue.cgroups()
    yield
    embedded.close()
    left: list[object] = [*residue.settled(residue.sandbox_processes), *(residue.mounts() - mounts)]
    left += residue.settled(lambda: {path for path in residue.cgroups() - cgroups if not _in_use(path)})
    left += [name for name in residue.descriptors().values() if name.startswith(("net:", "mnt:", "user:"))]
    assert not left, "the tests left:\n" + "\n".join(map(str, left))


def _in_use(cgroup: Path) -> bool:
    maker = residue.maker(cgroup)
    return maker != os.getpid() and os.path.exists(f"/proc/{maker}")


@pytest.fixture
def box() -> Iterator[shoal.Sandbox]:
    """A fresh sandbox."""
    with shoal.Sandbox.create() as sandbox:
        yield sandbox
