"""Damage to a layer is found, named, and only in the layer that has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import NotFound
from shoal.image.manifest import Meta
from shoal.image.store import Store
from shoal.image.verify import verify


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def source(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "file").write_text(name * 9000)
    return folder


@pytest.mark.parametrize("form", ["directory", "erofs"])
def test_one_flipped_byte_is_found(store: Store, tmp_path: Path, form: str) -> None:
    if form == "erofs" and not store.erofs:
        pytest.skip("EROFS files cannot be mounted here; see `shoal doctor`")
    publish = store.publish_erofs if form == "erofs" else store.publish_directory
    good, bad = publish(source(tmp_path, "a"), meta=Meta()), publish(source(tmp_path, "b"), meta=Meta())
    assert [verdict.fault for verdict in verify(store)] == [None, None]
    file = Path(bad.source) if form == "erofs" else Path(bad.source, "file")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    told: list[int] = []
    faults = {verdict.digest: verdict.fault for verdict in verify(store, tell=told.append)}
    assert faults[good.digest] is None
    assert "expected sha256" in (faults[bad.digest] or "")
    assert told == [9000, 9000]


def test_a_layer_without_its_files_is_damaged(store: Store, tmp_path: Path) -> None:
    layer = store.publish_directory(source(tmp_path, "a"), meta=Meta())
    Path(layer.source).rename(tmp_path / "elsewhere")
    (verdict,) = verify(store, [layer.digest])
    assert "No such file" in (verdict.fault or "")


def test_an_unknown_layer_is_an_error(store: Store) -> None:
    with pytest.raises(NotFound):
        verify(store, ["0" * 64])
