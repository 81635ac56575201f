"""OCI images as files: layouts (folder or archive) and what `docker save` writes.

An archive is somebody else's: names, sizes and links in it are looked at and never followed to a file of this machine.
Every blob is held against its digest while it is read, every layer against the digest that the configuration gives for
its uncompressed bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct, field

from shoal.errors import InvalidRequest, NotFound, Unsupported
from shoal.image.archive import Files
from shoal.image.blob import checked, decompressed
from shoal.types import GiB, MiB

_DOCUMENT_MAX = 16 * MiB
"""Bytes of an index, manifest or configuration that are read."""
_LAYERS_MAX = 2000
_DEPTH = 4
"""Of an index that names indexes."""
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_REFERENCE = "org.opencontainers.image.ref.name"


class Descriptor(Struct, frozen=True, rename="camel"):
    """What an image's documents say of a blob."""

    digest: str
    size: int = -1
    media_type: str = ""
    annotations: dict[str, str] = field(default_factory=dict)
    platform: dict[str, Any] = field(default_factory=dict)


class Execution(Struct, frozen=True, rename="pascal"):
    """The part of a configuration that says how to run things."""

    env: list[str] | None = None
    working_dir: str | None = None
    user: str | None = None
    cmd: list[str] | None = None
    entrypoint: list[str] | None = None
    shell: list[str] | None = None


class _RootFs(Struct, frozen=True):
    diff_ids: list[str]


class Configuration(Struct, frozen=True):
    """An image's configuration, as far as a sandbox has use for it."""

    rootfs: _RootFs
    architecture: str = ""
    os: str = "linux"
    config: Execution | None = None


class _Manifest(Struct, frozen=True):
    config: Descriptor
    layers: list[Descriptor]


class _Index(Struct, frozen=True):
    manifests: list[Descriptor]


class _DockerManifest(Struct, frozen=True, rename="pascal"):
    config: str
    layers: list[str]
    repo_tags: list[str] | None = None


class OciLayer(Struct, frozen=True):
    """One layer of an image: a tar."""

    diff_id: str
    """sha256 of the uncompressed tar: what names it, however it was compressed."""
    size: int
    """Bytes in the archive, compressed or not; -1 unknown."""
    _open: Callable[[], BinaryIO]

    @contextlib.contextmanager
    def opened(self, most: int = 64 * GiB) -> Iterator[BinaryIO]:
        """The uncompressed tar. DigestMismatch at its end if it is not what was promised; LimitExceeded past `most`."""
        with contextlib.closing(self._open()) as raw, contextlib.closing(decompressed(raw)) as plain:
            yield checked(plain, self.diff_id, f"layer {self.diff_id}", most)


class OciImage(Struct, frozen=True):
    """An image found in an archive."""

    digest: str
    """Of its configuration, which covers the layers too: "sha256:<hex>"."""
    names: tuple[str, ...]
    configuration: Configuration
    layers: tuple[OciLayer, ...]
    """The lowest first."""


def find_images(files: Files) -> list[OciImage]:
    """Every image of an archive that this machine can run. InvalidRequest if it is no image archive."""
    if files.has("index.json"):
        index = _document(files, "index.json", _Index)
        return [_from_layout(files, each) for each in _manifests(files, index)]
    if files.has("manifest.json"):
        return [_from_docker(files, each) for each in _document(files, "manifest.json", list[_DockerManifest])]
    raise InvalidRequest("archive", "holds neither index.json (an OCI layout) nor manifest.json (docker save)")


def find_image(files: Files, name: str | None = None) -> OciImage:
    """The one image, or the one that is called `name`. NotFound tells which names there are."""
    found = find_images(files)
    matching = [image for image in found if name is None or name in image.names]
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(name for image in found for name in image.names) or "none"
    if not matching:
        raise NotFound(f"no image called {name!r} for this machine in the archive; names in it: {names}")
    raise InvalidRequest("name", f"the archive holds {len(matching)} images; say which of: {names}")


# OCI layouts


def _manifests(files: Files, index: _Index, depth: int = 0) -> Iterator[Descriptor]:
    """Those for this machine; an index may name further ones."""
    if depth == _DEPTH:
        raise InvalidRequest("archive", f"indexes that name indexes, {_DEPTH} deep")
    for descriptor in index.manifests[:_LAYERS_MAX]:
        if descriptor.platform and not _runs_here(descriptor.platform):
            continue
        if descriptor.media_type in _INDEX_TYPES:
            inner = _blob_document(files, descriptor, _Index)
            for each in _manifests(files, inner, depth + 1):
                yield msgspec.structs.replace(each, annotations={**descriptor.annotations, **each.annotations})
        else:
            yield descriptor


def _runs_here(described: dict[str, Any]) -> bool:
    own = _ARCHITECTURES.get(platform.machine(), platform.machine())
    return bool(described.get("os", "linux") == "linux" and described.get("architecture", own) == own)


def _from_layout(files: Files, descriptor: Descriptor) -> OciImage:
    manifest = _blob_document(files, descriptor, _Manifest)
    configuration = _blob_document(files, manifest.config, Configuration)
    openers = [partial(_open_blob, files, each) for each in manifest.layers]
    name = descriptor.annotations.get(_REFERENCE)
    sizes = [layer.size for layer in manifest.layers]
    return _image(manifest.config.digest, (name,) if name else (), configuration, sizes, openers)


def _open_blob(files: Files, descriptor: Descriptor) -> BinaryIO:
    algorithm, _, digits = descriptor.digest.partition(":")
    if algorithm != "sha256" or len(digits) != 64 or not set(digits) <= set("0123456789abcdef"):
        raise Unsupported(f"blobs are named by sha256 here, not {descriptor.digest[:100]!r}")
    content = files.open(f"blobs/sha256/{digits}")
    return checked(content, descriptor.digest, f"blob {descriptor.digest}", 64 * GiB)


def _blob_document(files: Files, descriptor: Descriptor, kind: type[Any]) -> Any:
    with contextlib.closing(_open_blob(files, descriptor)) as content:
        return _decode(content, kind, descriptor.digest)


# docker save


def _from_docker(files: Files, manifest: _DockerManifest) -> OciImage:
    with contextlib.closing(files.open(manifest.config)) as content:
        raw = content.read(_DOCUMENT_MAX)
    configuration = _parse(raw, Configuration, manifest.config)
    openers = [partial(files.open, each) for each in manifest.layers]
    digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
    return _image(digest, tuple(manifest.repo_tags or ()), configuration, [-1] * len(openers), openers)


# Both


def _image(
    digest: str,
    names: tuple[str, ...],
    configuration: Configuration,
    sizes: list[int],
    openers: Sequence[Callable[[], BinaryIO]],
) -> OciImage:
    if not _runs_here({"os": configuration.os, "architecture": configuration.architecture}):
        made_for = f"{configuration.os} on {configuration.architecture}"
        raise Unsupported(f"an image for {made_for}; this machine is {platform.machine()}")
    ids = configuration.rootfs.diff_ids
    if len(ids) != len(openers) or len(ids) > _LAYERS_MAX:
        raise InvalidRequest("archive", f"{len(openers)} layers, and a configuration for {len(ids)}")
    layers = tuple(OciLayer(id, size, open_it) for id, size, open_it in zip(ids, sizes, openers, strict=True))
    return OciImage(digest=digest, names=names, configuration=configuration, layers=layers)


def _document(files: Files, name: str, kind: Any) -> Any:
    with contextlib.closing(files.open(name)) as content:
        return _decode(content, kind, name)


def _decode(content: BinaryIO, kind: Any, name: str) -> Any:
    raw = content.read(_DOCUMENT_MAX + 1)
    if len(raw) > _DOCUMENT_MAX:
        raise InvalidRequest("archive", f"{name}: a document of more than {_DOCUMENT_MAX >> 20} MiB")
    content.read(1)  # a blob's digest is looked at when its end is reached
    return _parse(raw, kind, name)


def _parse(raw: bytes, kind: Any, name: str) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest("archive", f"{name} can't be read: {error}") from None
