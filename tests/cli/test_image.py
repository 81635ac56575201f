"""`shoal image`: list, inspect, verify, collect, in a store of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli.image import parse_age
from shoal.errors import InvalidRequest
from shoal.image.catalog import Catalog, Record
from shoal.image.manifest import Meta
from shoal.image.store import Store
from shoal.types import Layer

from .command import Outcome, complaint, shoal


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def layer(home: Path) -> Layer:
    source = home / "source"
    source.mkdir()
    (source / "file").write_text("x" * 10_000)
    return Store(home / "store").publish_directory(source, meta=Meta(target="/opt/tool"))


def told(outcome: Outcome) -> str:
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout.decode()


def test_layers_are_listed_with_names(home: Path, layer: Layer) -> None:
    Store(home / "store").bind_name("tool:1", layer.digest)
    text = told(shoal("image", "ls", "--layers"))
    assert layer.digest.removeprefix("sha256:")[:12] in text
    assert "/opt/tool" in text
    assert "tool:1" in text
    (facts,) = json.loads(told(shoal("image", "ls", "--layers", "--json")))
    assert (facts["digest"], facts["names"], facts["bytes"]) == (layer.digest, ["tool:1"], 10_000)
    assert json.loads(told(shoal("image", "inspect", "tool:1"))) == facts


def test_images_are_listed_inspected_and_forgotten(home: Path, layer: Layer) -> None:
    store = Store(home / "store")
    record = Record(layers=(layer.digest,), env={"A": "b"}, source="a test")
    digest = Catalog(store).add(record, "example.org/team/tool:1")
    assert "example.org/team/tool:1" in told(shoal("image", "ls"))
    (facts,) = json.loads(told(shoal("image", "ls", "--json")))
    assert (facts["digest"], facts["names"], facts["bytes"]) == (digest, ["example.org/team/tool:1"], 10_000)
    assert json.loads(told(shoal("image", "inspect", "example.org/team/tool:1"))) == facts
    assert json.loads(told(shoal("image", "gc", "--keep", "0", "--json")))["removed"] == []
    assert told(shoal("image", "rm", "example.org/team/tool:1")).strip() in digest
    assert json.loads(told(shoal("image", "ls", "--json"))) == []
    assert json.loads(told(shoal("image", "gc", "--keep", "0", "--json")))["removed"] == [layer.digest]
    assert "known: host" in complaint(shoal("run", "--image", "example.org/team/tool:1", "--", "true"))


def test_only_debian_is_built_by_name(home: Path) -> None:
    assert "debian:SUITE" in complaint(shoal("image", "build", "fedora:42"))


def test_damage_is_said_and_in_the_exit_code(layer: Layer) -> None:
    assert "as it was made" in told(shoal("image", "verify"))
    Path(layer.source, "file").write_text("y" * 10_000)
    outcome = shoal("image", "verify", layer.digest, "--json")
    assert outcome.returncode == 1
    assert "expected sha256" in json.loads(outcome.stdout)[0]["fault"]


def test_room_is_made_as_asked(home: Path, layer: Layer) -> None:
    assert "--keep" in complaint(shoal("image", "gc"))
    store = Store(home / "store")
    dry = json.loads(told(shoal("image", "gc", "--keep", "0", "--dry-run", "--json")))
    assert dry["removed"] == [layer.digest]
    assert json.loads(told(shoal("image", "gc", "--unused-for", "1h", "--json")))["removed"] == []
    store.bind_name("kept", layer.digest)
    assert json.loads(told(shoal("image", "gc", "--keep", "0", "--json")))["removed"] == []
    store.unbind_name("kept")
    outcome = shoal("image", "gc", "--keep", "0")
    assert outcome.stdout.decode().split() == [layer.digest.removeprefix("sha256:")[:12]]
    assert b"in 1 layers" in outcome.stderr
    assert not store.exists(layer.digest)


def test_unknown_layers_are_misuse(home: Path) -> None:
    assert "names known" in complaint(shoal("image", "inspect", "nothing"))
    assert shoal("image", "verify", "nothing").returncode == 2


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1.5h", 5400), ("30d", 2_592_000), ("2w", 1_209_600)])
def test_ages(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "12", "h", "-1h", "1y"])
def test_other_ages_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="unused_for"):
        parse_age(text)
