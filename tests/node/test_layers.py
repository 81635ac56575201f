"""What a node holds in the store: layers of live sandboxes are never collected, others are, also while it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import shoal
from shoal.image.garbage import Policy
from shoal.image.manifest import Meta
from shoal.sdk.embedded import call, engine
from shoal.types import Layer

EVERYTHING = Policy(keep_bytes=0)


def publish(tmp_path: Path, form: str) -> Layer:
    store = engine().node.store
    if form == "erofs" and not store.erofs:
        pytest.skip("EROFS files cannot be mounted here; see `shoal doctor`")
    source = tmp_path / "tree"
    source.mkdir(exist_ok=True)
    (source / "file").write_text("content " + form)
    publishing = store.publish_erofs if form == "erofs" else store.publish_directory
    return publishing(source, meta=Meta(target="/opt/held"))


@pytest.mark.parametrize("form", ["directory", "erofs"])
def test_a_layer_goes_when_no_sandbox_uses_it_and_comes_back(tmp_path: Path, form: str) -> None:
    layer = publish(tmp_path, form)
    for _ in range(2):
        with shoal.Sandbox.create(layers=[layer.digest]) as box:
            removal = call(engine().node.collect(EVERYTHING))
            assert layer.digest in removal.in_use
            assert box.commands.run("cat /opt/held/file").stdout == "content " + form
        removal = call(engine().node.collect(EVERYTHING))
        assert layer.digest in removal.removed
        with pytest.raises(shoal.InvalidRequest, match="no layer"):
            shoal.Sandbox.create(layers=[layer.digest])
        # A mount of the one that is gone must not stand in for the new one.
        assert publish(tmp_path, form) == layer
    with shoal.Sandbox.create(layers=[layer.digest]) as box:
        assert box.commands.run("cat /opt/held/file").stdout == "content " + form
