"""The fuzzers build and find nothing in a few seconds. `make fuzz` gives them longer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[1] / "fuzz"


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("clang") or shutil.which("clang-14")) or not shutil.which("make"),
    reason="no clang or make: as root on Debian 12, apt-get install make clang-14 libclang-rt-14-dev",
)
@pytest.mark.parametrize("target", ["frames", "requests", "plans"])
def test_nothing_is_found(target: str) -> None:
    outcome = subprocess.run(
        ["make", "-C", FUZZ, f"run-{target}", "SECONDS=5", f"PYTHON={sys.executable}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=240,
    )
    assert outcome.returncode == 0, outcome.stdout
    assert "stat::number_of_executed_units" in outcome.stdout
