"""Images by name and digest, and that they hold their layers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.errors import InvalidRequest, NotFound, PlatformError
from shoal.image.catalog import Catalog, Record, check_name
from shoal.image.garbage import Policy, collect
from shoal.image.manifest import Meta
from shoal.image.store import Store
from shoal.types import Layer


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def publish(store: Store, tmp_path: Path, text: str) -> Layer:
    source = tmp_path / text
    source.mkdir()
    (source / "file").write_text(text)
    return store.publish_directory(source, meta=Meta())


def test_a_name_stands_for_an_image_until_it_is_bound_anew(store: Store, tmp_path: Path) -> None:
    catalog = Catalog(store)
    lower, upper = publish(store, tmp_path, "a"), publish(store, tmp_path, "b")
    one = Record(layers=(lower.digest,), env={"PATH": "/bin"}, cwd="/srv", user="app")
    two = msgspec.structs.replace(one, layers=(upper.digest, lower.digest))
    first = catalog.add(one, "team/app:1")
    assert catalog.add(one, "latest") == first
    assert catalog.get("team/app:1").layers == (lower,)
    assert (catalog.get(first[:19]).cwd, catalog.get("latest").env) == ("/srv", {"PATH": "/bin"})
    second = catalog.add(two, "team/app:1")
    assert second != first
    assert catalog.get("team/app:1").digest == second
    assert catalog.get("latest").digest == first
    assert list(catalog.list()) == [first, second]
    assert Catalog(store).tags() == {"latest": first, "team/app:1": second}


def test_an_image_keeps_its_layers_until_it_is_forgotten(store: Store, tmp_path: Path) -> None:
    catalog = Catalog(store)
    layer = publish(store, tmp_path, "a")
    digest = catalog.add(Record(layers=(layer.digest,)), "one")
    catalog.add(Record(layers=(layer.digest,)), "two")
    assert collect(store, Policy(keep_bytes=0)).removed == ()
    catalog.remove("one")
    assert catalog.get("two").digest == digest
    catalog.remove(digest)
    with pytest.raises(NotFound, match="known: host"):
        catalog.get("two")
    assert collect(store, Policy(keep_bytes=0)).removed == (layer.digest,)


def test_what_is_not_here_or_damaged_is_said(store: Store, tmp_path: Path) -> None:
    catalog = Catalog(store)
    with pytest.raises(NotFound, match="no layer"):
        catalog.add(Record(layers=("sha256:" + "0" * 64,)), "name")
    digest = catalog.add(Record(layers=(publish(store, tmp_path, "a").digest,)), "name")
    (store.root / "images-v1" / digest.removeprefix("sha256:")).write_text("{")
    with pytest.raises(PlatformError, match="damaged"):
        catalog.get("name")


@pytest.mark.parametrize("name", ["host", "", "Upper", "../x", "a b", "deadbeef", "x" * 300, "-x"])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(InvalidRequest, match="name"):
        check_name(name)
