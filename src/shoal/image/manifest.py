"""What is written down about a layer, and the name that follows from it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Final, Literal

import msgspec
from msgspec import Struct, field

from shoal.image.tree import Identity, Size

Form = Literal["erofs", "directory", "stack"]
"""How a layer is stored; a stack has nothing to store."""

_NO_TREE: Final = "0" * 64


class Meta(Struct, frozen=True):
    """How a layer is used, fields as in `Layer`. Part of its digest: two uses of one tree are two layers."""

    target: str = "/"
    path: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the store knows of a layer: the fields of `Layer` without the place, and where it came from."""

    digest: str
    format: Form
    target: str
    path: tuple[str, ...]
    env: dict[str, str]
    needs: tuple[str, ...]
    tree: str
    """Digest of the tree alone."""
    bytes: int
    """Apparent bytes of its files."""
    entries: int
    inputs: str | None
    """Fingerprint of what it was first built from."""
    created: float
    """Seconds since the epoch."""
    blob: str | None = None
    """sha256 of the EROFS file's bytes, 64 hex digits; None for a directory."""


def describe(identity: Identity, form: Form, meta: Meta, inputs: str | None) -> Manifest:
    """The manifest of a layer made now."""
    return Manifest(
        digest=f"sha256:{_name(identity.digest, meta)}",
        format=form,
        tree=identity.digest,
        bytes=identity.size.bytes,
        entries=identity.size.entries,
        inputs=inputs,
        created=time.time(),
        target=meta.target,
        path=meta.path,
        env=meta.env,
        needs=meta.needs,
    )


def describe_stack(parts: Sequence[Manifest], meta: Meta, inputs: str | None) -> Manifest:
    """The manifest of a layer that stands for others, highest first."""
    meta = msgspec.structs.replace(meta, needs=(*(part.digest for part in parts), *meta.needs))
    size = Size(sum(part.bytes for part in parts), sum(part.entries for part in parts))
    return describe(Identity(_NO_TREE, size), "stack", meta, inputs)


def _name(tree: str, meta: Meta) -> str:
    """The 64 hex digits of a layer: its tree and how it is used, whatever form it is stored in."""
    facts = msgspec.json.encode(meta, order="deterministic")
    return hashlib.sha256(b"shoal layer 1\n" + tree.encode() + b"\n" + facts).hexdigest()
