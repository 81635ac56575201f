"""What `import shoal` costs and does: next to nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

LOOK = """
import json, os, sys, threading, time
start = time.perf_counter()
import shoal
seconds = time.perf_counter() - start
print(json.dumps({
    "seconds": seconds,
    "modules": sorted(sys.modules),
    "threads": threading.active_count(),
    "children": open(f"/proc/self/task/{os.getpid()}/children").read().split(),
    "descriptors": sorted(os.listdir("/proc/self/fd")),
}))
"""


@pytest.fixture(scope="module")
def fresh() -> dict[str, Any]:
    """A fresh interpreter after `import shoal`."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "SHOAL_HOME": "/not/there"}
    done = subprocess.run([sys.executable, "-I", "-c", BOOT + LOOK], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


BOOT = f"import sys; sys.path[:] = {[path for path in sys.path if path]!r}\n"


@pytest.mark.parametrize(
    "name", ["uvloop", "httpx", "typer", "rich", "asyncio", "dnslib", "shoal.node", "shoal.sdk", "shoal.rollouts"]
)
def test_what_is_heavy_waits_until_it_is_used(fresh: dict[str, Any], name: str) -> None:
    assert name not in fresh["modules"]


def test_it_starts_and_opens_nothing(fresh: dict[str, Any]) -> None:
    assert fresh["threads"] == 1
    assert fresh["children"] == []
    assert len(fresh["descriptors"]) == 4  # and the one of the listing


def test_it_is_quick(fresh: dict[str, Any]) -> None:
    assert fresh["seconds"] < 0.15 * 4  # the promise is 150 ms; machines that run tests are busy


def test_the_public_names_are_loaded_when_they_are_used() -> None:
    code = (
        BOOT + "import shoal\nfor name in shoal.__all__: getattr(shoal, name)\nprint('shoal.node.local' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")
