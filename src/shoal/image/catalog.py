"""The images of one machine: which layers each consists of, and by which names it is asked for.

    store/images-v1/<hex>     an image, by the digest of all that it is
    store/tags-v1/<name>      name -> digest; "/" and the like stand as %2F

An image pins its layers: the collection of what is unused leaves them.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from urllib.parse import quote, unquote

import msgspec
from msgspec import Struct, field

from shoal.errors import InvalidRequest, NotFound, PlatformError
from shoal.image import disk
from shoal.image.store import Store
from shoal.types import Image

FORMAT = 1
_NAME = re.compile(r"[a-z0-9][A-Za-z0-9._/:@-]{0,199}")
_HEX = re.compile(r"[0-9a-f]{8,64}")


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept of an image."""

    layers: tuple[str, ...]
    """Digests of layers in the store, highest first; what a machine adds is not among them (`locality`, `skeleton`)."""
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    """Where its commands start, if it says so."""
    user: str | None = None
    cmd: tuple[str, ...] = ()
    """What it would run if it were a container; kept, and never run by itself."""
    shell: tuple[str, ...] = ()
    source: str = ""
    """Where it came from, for people."""
    created: float = 0.0
    """Seconds since the epoch."""

    @property
    def digest(self) -> str:
        """Of all that decides what a sandbox of it is."""
        facts = (self.layers, self.env, self.cwd, self.user, self.shell)
        content = b"shoal image 1\n" + msgspec.json.encode(facts, order="deterministic")
        return f"sha256:{hashlib.sha256(content).hexdigest()}"


class Catalog:
    """The images that belong to a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._images = store.root / f"images-v{FORMAT}"
        self._tags = store.root / f"tags-v{FORMAT}"
        for folder in (self._images, self._tags):
            folder.mkdir(exist_ok=True)

    def add(self, record: Record, name: str | None = None) -> str:
        """Keeps an image and binds the name to it; its digest. NotFound if a layer of it is not in the store."""
        for layer in record.layers:
            self._store.manifest(layer)
        if name is not None:
            check_name(name)
        record = msgspec.structs.replace(record, created=record.created or time.time())
        self._write(self._images, record.digest.removeprefix("sha256:"), msgspec.json.encode(record))
        if name is not None:
            self._write(self._tags, quote(name, safe=""), record.digest.encode())
        return record.digest

    def get(self, key: str) -> Image:
        """By name, digest, or 8 digits of one or more. NotFound says which there are."""
        digest = self.resolve(key)
        record = self.record(digest)
        return Image(
            name=key,
            digest=digest,
            layers=tuple(self._store.get(layer) for layer in record.layers),
            env=record.env,
            cwd=record.cwd,
            user=record.user,
        )

    def record(self, digest: str) -> Record:
        """NotFound if there is no image of that digest."""
        file = self._images / digest.removeprefix("sha256:")
        try:
            return msgspec.json.decode(file.read_bytes(), type=Record)
        except FileNotFoundError:
            raise NotFound(f"no image {digest} in {self._store.root}") from None
        except msgspec.MsgspecError as error:
            raise PlatformError(f"{file} is damaged ({error}); remove it and import the image again") from error

    def resolve(self, key: str) -> str:
        """The digest that a key stands for now."""
        prefix = key.removeprefix("sha256:")
        if _HEX.fullmatch(prefix):
            found = [name for name in os.listdir(self._images) if name.startswith(prefix)]
            if len(found) > 1:
                raise InvalidRequest("image", f"{prefix} is the beginning of {len(found)} digests; give more of it")
            if found:
                return f"sha256:{found[0]}"
        digest = self.tags().get(key)
        if digest is None:
            known = ", ".join(["host", *self.tags()][:20])
            raise NotFound(f"no image is called {key!r}; known: {known}")
        return digest

    def tags(self) -> dict[str, str]:
        """Name to digest."""
        found: dict[str, str] = {}
        for entry in sorted(self._tags.iterdir()):
            try:
                found[unquote(entry.name)] = entry.read_text()
            except FileNotFoundError:  # removed while we look
                continue
        return found

    def list(self) -> dict[str, Record]:
        """Digest to image, the oldest first."""
        records = {f"sha256:{name}": self.record(name) for name in os.listdir(self._images)}
        return dict(sorted(records.items(), key=lambda pair: (pair[1].created, pair[0])))

    def remove(self, key: str) -> str:
        """Forgets a name; and the image with its last one, or if it is given by digest. Layers stay until collected."""
        digest = self.resolve(key)
        tags = self.tags()
        names = [key] if key in tags else [name for name, bound in tags.items() if bound == digest]
        for name in names:
            (self._tags / quote(name, safe="")).unlink(missing_ok=True)
        if digest not in self.tags().values():
            (self._images / digest.removeprefix("sha256:")).unlink(missing_ok=True)
        return digest

    def layers(self) -> set[str]:
        """Digests of all layers that images consist of."""
        return {layer for record in self.list().values() for layer in record.layers}

    def _write(self, folder: os.PathLike[str], name: str, content: bytes) -> None:
        with self._store.stage() as stage:
            disk.replace_file(self._store.root / folder / name, content, stage)


def check_name(name: str) -> str:
    """InvalidRequest unless it can be the name of an image."""
    if _NAME.fullmatch(name) is None or _HEX.fullmatch(name) or name == "host":
        raise InvalidRequest("name", f"like debian:bookworm or example.org/team/image:1, not {name!r}")
    return name
