"""Each test runs once for each tier that claims it, through the public SDK."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal

from .tiers import reason_to_skip, tiers_for

HERE = Path(__file__).parent


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "tier" in metafunc.fixturenames:
        metafunc.parametrize("tier", tiers_for(metafunc.function.__name__))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE and (reason := reason_to_skip(item.name)):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def box(tier: str) -> Iterator[shoal.Sandbox]:
    """A fresh sandbox of the tier."""
    with shoal.Sandbox.create(tier=tier) as sandbox:
        yield sandbox
