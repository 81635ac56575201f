"""A small sandbox to attack: what it can use up is little."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import shoal

from .intruder import SMALL


@pytest.fixture
def small(shoal_home: object) -> Iterator[shoal.Sandbox]:
    """A fresh one for each test."""
    with shoal.Sandbox.create(profile=SMALL) as box:
        yield box


@pytest.fixture(scope="module")
def calm(shoal_home: object) -> Iterator[shoal.Sandbox]:
    """One for all tests of a file that only look."""
    with shoal.Sandbox.create(profile=SMALL) as box:
        yield box
