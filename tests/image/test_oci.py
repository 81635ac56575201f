"""Image archives: layouts and what `docker save` writes. Damage, wrong digests and ways out of them are refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path
from typing import Any

import pytest
import zstandard

from shoal.errors import DigestMismatch, InvalidRequest, LimitExceeded, NotFound, Unsupported
from shoal.image.archive import opened
from shoal.image.oci import OciImage, find_image, find_images

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def make_tar(files: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return target.getvalue()


PLAIN = [make_tar({"a": b"one"}), make_tar({"b": b"two" * 50_000})]
PACKED = [gzip.compress(PLAIN[0]), zstandard.compress(PLAIN[1])]


def configuration(**facts: Any) -> bytes:
    known = {
        "architecture": ARCHITECTURE,
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [*map(digest, PLAIN)]},
    }
    return json.dumps({**known, "config": {"Env": ["A=b"], "WorkingDir": "/srv"}, **facts}).encode()


def layout(blobs: list[bytes] | None = None, config: bytes | None = None, **index: Any) -> dict[str, bytes]:
    """The files of an OCI layout with one image."""
    layers, document = blobs or PACKED, config or configuration()
    entries = [{"mediaType": "application/octet-stream", "digest": digest(blob), "size": len(blob)} for blob in layers]
    manifest = json.dumps({"config": {"digest": digest(document), "size": len(document)}, "layers": entries}).encode()
    entry = {
        "digest": digest(manifest),
        "size": len(manifest),
        "annotations": {"org.opencontainers.image.ref.name": "one"},
    }
    files = {digest(blob).replace(":", "/"): blob for blob in (*layers, document, manifest)}
    return {
        "index.json": json.dumps({"manifests": [{**entry, **index}]}).encode(),
        **{f"blobs/{name}": data for name, data in files.items()},
    }


def docker(config: bytes | None = None) -> dict[str, bytes]:
    document = config or configuration()
    name = digest(document).removeprefix("sha256:") + ".json"
    manifest = [{"Config": name, "RepoTags": ["team/app:1"], "Layers": ["x/layer.tar", "y/layer.tar"]}]
    return {
        "manifest.json": json.dumps(manifest).encode(),
        name: document,
        "x/layer.tar": PLAIN[0],
        "y/layer.tar": PLAIN[1],
    }


def write(files: dict[str, bytes], path: Path, form: str) -> Path:
    if form == "folder":
        for name, data in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
        return path
    packed = make_tar(files)
    path.write_bytes(gzip.compress(packed) if form == "tar.gz" else packed)
    return path


def contents(image: OciImage) -> list[bytes]:
    found = []
    for layer in image.layers:
        with layer.opened() as tar:
            found.append(tar.read())
    return found


@pytest.mark.parametrize("form", ["folder", "tar", "tar.gz"])
@pytest.mark.parametrize("kind", [layout, docker])
def test_an_image_is_read_whole(tmp_path: Path, kind: Any, form: str) -> None:
    with opened(write(kind(), tmp_path / "image", form), tmp_path) as files:
        image = find_image(files)
        assert contents(image) == PLAIN
        assert image.digest == digest(configuration())
        assert image.names == (("one",) if kind is layout else ("team/app:1",))
        assert image.configuration.config is not None
        assert (image.configuration.config.env, image.configuration.config.working_dir) == (["A=b"], "/srv")
        with pytest.raises(NotFound, match="names in it"):
            find_image(files, "another")


def test_a_blob_that_is_not_what_its_name_says(tmp_path: Path) -> None:
    files = layout()
    name = next(name for name, data in files.items() if data == PACKED[0])
    files[name] = gzip.compress(make_tar({"a": b"two"}))
    with opened(write(files, tmp_path / "image", "tar"), tmp_path) as found, pytest.raises(DigestMismatch):
        contents(find_image(found))


def test_a_layer_that_the_configuration_does_not_know(tmp_path: Path) -> None:
    files = layout(blobs=[PACKED[0], zstandard.compress(make_tar({"c": b"evil"}))])
    with opened(write(files, tmp_path / "image", "tar"), tmp_path) as found, pytest.raises(DigestMismatch):
        contents(find_image(found))


def test_what_is_cut_off_or_larger_than_allowed(tmp_path: Path) -> None:
    files = layout(blobs=[PACKED[0][:-9], PACKED[1]])
    with (
        opened(write(files, tmp_path / "image", "tar"), tmp_path) as found,
        pytest.raises(InvalidRequest, match="cut off"),
    ):
        contents(find_image(found))
    with opened(write(layout(), tmp_path / "whole", "tar"), tmp_path) as found:
        large = find_image(found).layers[1]
        with large.opened(most=1000) as tar, pytest.raises(LimitExceeded):
            tar.read()


def test_links_and_names_that_lead_out(tmp_path: Path) -> None:
    folder = write(layout(), tmp_path / "image", "folder")
    (folder / "blobs").rename(tmp_path / "elsewhere")
    (folder / "blobs").symlink_to(tmp_path / "elsewhere")
    with opened(folder, tmp_path) as found, pytest.raises(NotFound, match="behind a link"):
        find_images(found)
    manifest = [{"Config": "../../etc/passwd", "RepoTags": [], "Layers": []}]
    files = {"manifest.json": json.dumps(manifest).encode()}
    with (
        opened(write(files, tmp_path / "other", "tar"), tmp_path) as found,
        pytest.raises(InvalidRequest, match="leads out"),
    ):
        find_images(found)


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({"hello": b""}, InvalidRequest),
        ({"index.json": b"{"}, InvalidRequest),
        ({"manifest.json": b'[{"Config": 1}]'}, InvalidRequest),
        (docker(configuration(architecture="s390x")), Unsupported),
        (docker(configuration(rootfs={"diff_ids": []})), InvalidRequest),
    ],
)
def test_what_is_no_image_for_this_machine(tmp_path: Path, files: dict[str, bytes], error: type[Exception]) -> None:
    with opened(write(files, tmp_path / "image", "tar"), tmp_path) as found, pytest.raises(error):
        find_images(found)


def test_images_of_other_machines_in_an_index_are_passed_over(tmp_path: Path) -> None:
    files = layout(platform={"architecture": "s390x", "os": "linux"})
    with opened(write(files, tmp_path / "image", "tar"), tmp_path) as found:
        assert find_images(found) == []
        with pytest.raises(NotFound, match="for this machine"):
            find_image(found)


def test_no_archive_at_all(tmp_path: Path) -> None:
    with pytest.raises(NotFound), opened(tmp_path / "missing", tmp_path):
        pass
    (tmp_path / "text").write_text("no tar")
    with pytest.raises(InvalidRequest, match="no tar"), opened(tmp_path / "text", tmp_path):
        pass
