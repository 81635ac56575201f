"""The layers of one machine, each under the name of its content.

    root/version            the format of what is below; a newer one is refused
    root/layers-v1/<hex>/   manifest.json, and `tree` (a directory) or `image.erofs`
    root/inputs-v1/<hex>    fingerprint of a build's inputs -> digest
    root/names-v1/<name>    name -> digest
    root/locks-v1/<hex>     one build at a time for a fingerprint
    root/tmp/<random>/      builds under way, each locked by its process: what nobody holds is swept

A layer is built aside, flushed, and renamed to its place as a whole. Whatever is below `layers-v1` is
therefore complete. The root is readable by its owner only: layers hold set-uid files that sandboxes made.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from shoal.errors import InvalidRequest, NotFound, PlatformError, Unsupported
from shoal.image import capture, disk, erofs, lock, tree
from shoal.image.holds import Holds
from shoal.image.manifest import Manifest, Meta, describe, describe_stack
from shoal.image.tree import Size
from shoal.types import Layer, MiB

FORMAT = 1
_FILES = {"directory": "tree", "erofs": "image.erofs", "stack": "manifest.json"}
_HEX = re.compile(r"[0-9a-f]{64}")
_PREFIX = re.compile(r"[0-9a-f]{8,64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+=-]{0,199}")


class Store:
    """A folder of layers for any number of processes. Opening makes it, and sweeps what dead builds left."""

    def __init__(self, root: Path) -> None:
        """Unsupported if a newer Shoal wrote it."""
        self.root = root
        self._layers = root / f"layers-v{FORMAT}"
        self._inputs = root / f"inputs-v{FORMAT}"
        self._names = root / f"names-v{FORMAT}"
        self._locks = root / f"locks-v{FORMAT}"
        self._tmp = root / "tmp"
        self._erofs: bool | None = None
        root.mkdir(parents=True, exist_ok=True)
        root.chmod(0o700)
        self._check_version()
        for folder in (self._layers, self._inputs, self._names, self._locks, self._tmp):
            folder.mkdir(exist_ok=True)
        self._sweep()

    @property
    def erofs(self) -> bool:
        """Whether new layers become EROFS files here; tried once."""
        if self._erofs is None:
            with self.stage() as folder:
                self._erofs = erofs.mountable(folder)
        return self._erofs

    # Looking up

    def get(self, key: str) -> Layer:
        """A layer by digest, a unique beginning of one (8 digits or more) or name; NotFound if none."""
        return self._layer(self.manifest(key))

    def manifest(self, key: str) -> Manifest:
        """The same, with all that is known of it."""
        return self._read(self._resolve(key))

    def exists(self, key: str) -> bool:
        """Whether `get` would find it. InvalidRequest if the key is ambiguous or malformed."""
        try:
            self._resolve(key)
        except NotFound:
            return False
        return True

    def find(self, inputs: str) -> Layer | None:
        """The layer that was built from these inputs, if it is here."""
        digest = _read_link(self._inputs / _check_fingerprint(inputs))
        with contextlib.suppress(NotFound):
            return self.get(digest) if digest else None
        return None

    def list(self) -> tuple[Manifest, ...]:
        """All layers, the oldest first."""
        found: list[Manifest] = []
        for entry in self._layers.iterdir():
            with contextlib.suppress(NotFound):  # removed while we look
                found.append(self._read(entry.name))
        return tuple(sorted(found, key=lambda manifest: (manifest.created, manifest.digest)))

    # Publishing

    def publish(self, path: Path, *, meta: Meta, inputs: str | None = None) -> Layer:
        """Keep a tree in the best form this machine can mount. See `publish_directory`."""
        if self.erofs:
            return self.publish_erofs(path, meta=meta, inputs=inputs)
        return self.publish_directory(path, meta=meta, inputs=inputs)

    def publish_directory(self, path: Path, *, meta: Meta, inputs: str | None = None) -> Layer:
        """Keep the tree at `path` as a directory: moved if it lies in a folder of `stage`, else copied.

        A layer with the same digest that is here already is returned as it is. StorageFull leaves the store
        as it was.
        """
        with self._staged(path) as (folder, source):
            return self._publish(folder, source, "directory", meta, inputs)

    def publish_erofs(self, path: Path, *, meta: Meta, inputs: str | None = None) -> Layer:
        """Keep the tree at `path` as an EROFS file; else as `publish_directory`."""
        with self._staged(path) as (folder, source):
            return self._publish(folder, source, "erofs", meta, inputs)

    def publish_stack(self, parts: Sequence[Layer], *, meta: Meta, inputs: str | None = None) -> Layer:
        """One key for several layers, highest first: it has no files, and needs them all."""
        manifest = describe_stack([self.manifest(part.digest) for part in parts], meta, inputs)
        digest = manifest.digest.removeprefix("sha256:")
        if not (self._layers / digest).exists():
            with self.stage() as folder:
                layer = folder / "layer"
                layer.mkdir(0o700)
                disk.write_flushed(layer / "manifest.json", msgspec.json.encode(manifest))
                self._move(layer, digest)
        return self._found(manifest, inputs)

    @contextlib.contextmanager
    def stage(self) -> Iterator[Path]:
        """A folder to build in, on the store's file system; gone at the end, swept if this process dies."""
        folder, fd = self._make_stage()
        try:
            with disk.reporting_full(self.root):
                yield folder
        finally:
            tree.remove(folder)
            os.close(fd)

    def check_room(self, need_bytes: int, need_inodes: int) -> None:
        """StorageFull, with the numbers, unless that much is free."""
        disk.check_room(self.root, need_bytes, need_inodes)

    # Building once

    @contextlib.contextmanager
    def locked(self, inputs: str) -> Iterator[None]:
        """Be the only one, in any process, that builds from these inputs. Waits."""
        with lock.locked(self._locks / _check_fingerprint(inputs)):
            yield

    @contextlib.asynccontextmanager
    async def locked_async(self, inputs: str) -> AsyncIterator[None]:
        """The same for a task, without blocking the event loop."""
        async with lock.locked_async(self._locks / _check_fingerprint(inputs)):
            yield

    def find_or_build(self, inputs: str, build: Callable[[], Layer]) -> Layer:
        """The same as `build_once`, for what is made without a sandbox and may block."""
        if (found := self.find(inputs)) is not None:
            return found
        with self.locked(inputs):
            return self.find(inputs) or build()

    async def build_once(self, inputs: str, build: Callable[[], Awaitable[Layer]]) -> Layer:
        """The layer of these inputs: found, or built by exactly one of all who ask at the same time."""
        if (found := self.find(inputs)) is not None:
            return found
        async with self.locked_async(inputs):
            return self.find(inputs) or await build()

    # Naming and removing

    def bind_name(self, name: str, digest: str) -> None:
        """Let `name` stand for a layer; a name may be bound anew."""
        if _NAME.fullmatch(name) is None or _PREFIX.fullmatch(name):
            raise InvalidRequest("name", f"letters, digits and . _ : @ + = - (and not a digest), not {name!r}")
        self._write(self._names / name, self.get(digest).digest.encode())

    def names(self) -> dict[str, str]:
        """What names stand for: name to digest."""
        found = ((name, _read_link(self._names / name)) for name in sorted(os.listdir(self._names)))
        return {name: digest for name, digest in found if digest is not None}

    def unbind_name(self, name: str) -> None:
        """NotFound if nothing is called that. The layer itself stays until it is collected."""
        try:
            (self._names / name).unlink()
        except (FileNotFoundError, IsADirectoryError, ValueError):
            raise NotFound(f"no layer is called {name!r}") from None

    def remove(self, key: str) -> None:
        """Delete a layer, its names and what found it. InvalidRequest while a process holds it."""
        digest = f"sha256:{self._resolve(key)}"
        if not self.discard(digest):
            raise InvalidRequest("layer", f"{digest[:19]} is in use by a node; end its sandboxes first")
        self.forget({digest})

    # For those that look after the store

    def holds(self) -> Holds:
        """Locks by which this process says what it uses."""
        return Holds(self._layers)

    def folder(self, digest: str) -> Path:
        """Where a layer lies, whether it is here or not."""
        return self._layers / digest.removeprefix("sha256:")

    def discard(self, digest: str) -> bool:
        """Delete a layer's files; `forget` is for what leads to it. False if it is held, or gone already."""
        folder = self.folder(digest)
        if (descriptor := lock.hold_folder(folder)) is None:
            return False
        try:
            with self.stage() as stage:
                folder.rename(stage / "removed")
        finally:
            os.close(descriptor)
        return True

    def forget(self, digests: Collection[str]) -> None:
        """Remove names and inputs that lead to layers which are gone."""
        for folder in (self._names, self._inputs):
            for entry in folder.iterdir():
                if _read_link(entry) in digests and not self._is_here(_read_link(entry)):
                    entry.unlink(missing_ok=True)

    def _is_here(self, digest: str | None) -> bool:
        return digest is not None and self.folder(digest).exists()

    # How it is done

    def _check_version(self) -> None:
        file = self.root / "version"
        if not file.exists():
            self._tmp.mkdir(exist_ok=True)
            self._write(file, b"%d\n" % FORMAT)
        text = file.read_text().strip()
        if text != str(FORMAT):
            way = "upgrade Shoal, or keep its store in another folder"
            raise Unsupported(f"{self.root} holds layers of format {text}, this Shoal knows {FORMAT}: {way}")

    def _sweep(self) -> None:
        for folder in self._tmp.iterdir():
            if (fd := lock.hold_folder(folder)) is not None:
                tree.remove(folder)
                os.close(fd)

    def _make_stage(self) -> tuple[Path, int]:
        while True:
            with disk.reporting_full(self.root):
                folder = Path(tempfile.mkdtemp(dir=self._tmp))
            # None: somebody who opened the store took it for a dead one's before it was locked.
            if (fd := lock.hold_folder(folder)) is not None:
                return folder, fd

    @contextlib.contextmanager
    def _staged(self, path: Path) -> Iterator[tuple[Path, Path]]:
        """A fresh stage, and the tree where only we can change it."""
        with self.stage() as folder:
            if self._tmp in path.parents:
                yield folder, path
                return
            source = tree.open_directory(path)
            try:
                self._check_fits(tree.measure(source))
                capture.copy(source, folder / "copy")
            finally:
                os.close(source)
            yield folder, folder / "copy"

    def _check_fits(self, size: Size) -> None:
        self.check_room(size.bytes + 16 * MiB, size.entries + 16)

    def _publish(
        self, folder: Path, source: Path, form: Literal["erofs", "directory"], meta: Meta, inputs: str | None
    ) -> Layer:
        root = tree.open_directory(source)
        try:
            identity = tree.identify(root)
        finally:
            os.close(root)
        manifest = describe(identity, form, meta, inputs)
        digest = manifest.digest.removeprefix("sha256:")
        if not (self._layers / digest).exists():
            layer = folder / "layer"
            layer.mkdir(0o700)
            if form == "erofs":
                self._check_fits(identity.size)
                erofs.pack(source, layer / "image.erofs")
                manifest = msgspec.structs.replace(manifest, blob=disk.digest(layer / "image.erofs"))
            else:
                source.rename(layer / "tree")
            (layer / "manifest.json").write_bytes(msgspec.json.encode(manifest))
            disk.flush(layer)
            self._move(layer, digest)
        return self._found(manifest, inputs)

    def _found(self, manifest: Manifest, inputs: str | None) -> Layer:
        """What was just published, from now on found by its inputs too."""
        if inputs is not None:
            self._write(self._inputs / _check_fingerprint(inputs), manifest.digest.encode())
        return self.get(manifest.digest)

    def _move(self, layer: Path, digest: str) -> None:
        """Put a finished, flushed layer in its place; another process may have been there first."""
        try:
            layer.rename(self._layers / digest)
        except OSError:
            if not (self._layers / digest).exists():
                raise
        disk.flush_folder(self._layers)

    def _read(self, digest: str) -> Manifest:
        file = self._layers / digest / "manifest.json"
        try:
            return msgspec.json.decode(file.read_bytes(), type=Manifest)
        except FileNotFoundError as error:
            raise NotFound(f"no layer sha256:{digest} in {self.root}") from error
        except msgspec.MsgspecError as error:
            raise PlatformError(f"{file} is damaged ({error}); remove its folder and build it again") from error

    def _layer(self, manifest: Manifest) -> Layer:
        file = _FILES[manifest.format]
        return Layer(
            digest=manifest.digest,
            source=str(self._layers / manifest.digest.removeprefix("sha256:") / file),
            format=manifest.format,
            target=manifest.target,
            path=manifest.path,
            env=manifest.env,
            needs=manifest.needs,
        )

    def _resolve(self, key: str) -> str:
        """The 64 hex digits that a key stands for."""
        prefix = key.removeprefix("sha256:")
        if _PREFIX.fullmatch(prefix):
            return self._complete(prefix)
        if _NAME.fullmatch(key) is None:
            raise InvalidRequest("layer", f"a digest, 8 or more digits of one, or a name, not {key!r}")
        digest = _read_link(self._names / key)
        if digest is None:
            known = ", ".join(sorted(os.listdir(self._names))[:20]) or "none"
            raise NotFound(f"no layer is called {key!r}; names known: {known}")
        return self._complete(digest.removeprefix("sha256:"))

    def _complete(self, prefix: str) -> str:
        if _HEX.fullmatch(prefix):
            found = [prefix] if (self._layers / prefix).exists() else []
        else:
            found = [name for name in os.listdir(self._layers) if name.startswith(prefix)]
        if len(found) > 1:
            raise InvalidRequest("layer", f"{prefix} is the beginning of {len(found)} digests; give more of it")
        if not found:
            raise NotFound(f"no layer sha256:{prefix} in {self.root}")
        return found[0]

    def _write(self, file: Path, content: bytes) -> None:
        with self.stage() as folder:
            disk.replace_file(file, content, folder)


def _check_fingerprint(inputs: str) -> str:
    if _HEX.fullmatch(inputs) is None:
        raise InvalidRequest("inputs", f"a fingerprint is 64 hex digits, not {inputs!r}")
    return inputs


def _read_link(file: Path) -> str | None:
    try:
        return file.read_text()
    except FileNotFoundError:
        return None
