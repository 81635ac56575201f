"""The tables of this suite: no case is missing, nothing is claimed that is not tested, exceptions are few."""

from __future__ import annotations

import re

import pytest

import shoal
from shoal.node.doctor.probe import PROBES

from .conftest import HERE
from .tiers import CASES, FAKE, REFUSALS, refusal_of

NAMES = re.findall(r"^def (test_\w+)", "".join(path.read_text() for path in HERE.glob("test_*.py")), re.MULTILINE)


def test_every_case_has_a_test() -> None:
    assert len(CASES) == 19
    assert {name[5:8] for name in NAMES if re.match(r"test_t\d\d_", name)} == CASES.keys()


def test_what_the_fake_tier_claims_is_tested() -> None:
    assert set(NAMES) >= FAKE


def test_exceptions_are_few_and_each_is_a_finding_of_doctor() -> None:
    assert len(REFUSALS) <= 10
    assert {refusal.probe for refusal in REFUSALS.values()} <= {probe.id for probe in PROBES}
    for refusal in REFUSALS.values():
        for pattern in refusal.tests:
            assert any(name.startswith(re.split(r"[*?]", pattern)[0]) for name in NAMES), pattern


def test_only_the_table_excuses_an_ordinary_user(request: pytest.FixtureRequest) -> None:
    """A test here that needs root stands in `REFUSALS`, with the reason that `shoal doctor` gives."""
    here = [item for item in request.session.items if item.path.parent == HERE]
    assert not [item.name for item in here if item.get_closest_marker("root") and not refusal_of(item.name)]


def test_a_sandbox_says_what_it_is(tier: str) -> None:
    with shoal.Sandbox.create(tier=tier) as box:
        info = box.info()
        assert info.tier == tier
        assert box.id.startswith("fake-") == (tier == "fake")
        assert ("isolation" in info.unenforced) == (tier == "fake")
        assert box.capabilities == frozenset(info.capabilities)
        assert ("pty" in box.capabilities) == (tier == "namespace")
