"""The images and layers of one node: names become layers, and what is in use stays in the store."""

from __future__ import annotations

import asyncio
import os
from typing import Final

import msgspec

from shoal.errors import InvalidRequest, NotFound
from shoal.image.catalog import Catalog
from shoal.image.host import host
from shoal.image.interpreter import Interpreter, Interpreters
from shoal.image.locality import publish_locality
from shoal.image.skeleton import publish_skeleton
from shoal.image.store import Store
from shoal.node.interface import CreateRequest
from shoal.types import Image, Layer

_IDLE_LAYERS: Final = 256
"""Layers that are kept mounted, and so in the store, for the next sandbox."""


class Images:
    """Looks up what sandboxes are made of."""

    def __init__(self, store: Store, catalog: Catalog) -> None:
        self._store = store
        self.catalog = catalog
        self.holds = store.holds()
        self._host: Image | None = None
        self._lock = asyncio.Lock()
        self._around: tuple[Layer, Layer] | None = None
        self._interpreters = Interpreters(os.environ)
        self._found: dict[str, tuple[Interpreter, int]] = {}

    async def get(self, name: str) -> Image:
        """InvalidRequest for one that is not known here."""
        if name == "host":
            return await self._host_image()
        try:
            found = await asyncio.to_thread(self.catalog.get, name)
        except (NotFound, InvalidRequest) as error:
            raise InvalidRequest("image", f"{error}; `shoal image ls` shows what there is") from None
        locality, skeleton = await self._surroundings()
        layers = (locality, *found.layers, skeleton)
        return msgspec.structs.replace(found, layers=layers, env={**found.env, **locality.env})

    async def _host_image(self) -> Image:
        async with self._lock:
            if self._host is None:
                found = await asyncio.to_thread(host, self._store)
                self.holds.take(found.layers)  # for as long as it is remembered
                self._host = found
        return self._host

    async def _surroundings(self) -> tuple[Layer, Layer]:
        """What images that were made elsewhere need of this machine: above them and below."""
        async with self._lock:
            if self._around is None:
                above = await asyncio.to_thread(publish_locality, self._store, os.environ)
                below = await asyncio.to_thread(publish_skeleton, self._store)
                self.holds.take((above, below))
                self._around = (above, below)
        return self._around

    def resolve(self, request: CreateRequest) -> tuple[Layer, ...]:
        """Each layer that was asked for, and what it needs, once."""
        asked = request.layers if request.workspace is None else (request.workspace, *request.layers)
        found: dict[str, Layer] = {}
        for item in asked:
            field = "workspace" if item is request.workspace else "layers"
            for layer in self._layers(item, field):
                found.setdefault(layer.digest, layer)
        return tuple(found.values())

    def _layers(self, item: str | Layer, field: str) -> tuple[Layer, ...]:
        if isinstance(item, Layer):
            own: tuple[Layer, ...] = (item,)
        elif not isinstance(item, str):
            raise InvalidRequest(field, f"takes keys of layers, not {item!r}")
        elif item.startswith("python:"):
            return self.interpreter(item.removeprefix("python:")).layers
        else:
            try:
                own = (self._store.get(item),)
            except (NotFound, InvalidRequest) as error:
                raise InvalidRequest(field, f"{error}; `shoal env ls` shows what there is") from None
        needs = [key for layer in own for key in layer.needs]
        return (*own, *(layer for key in needs for layer in self._layers(key, field)))

    def interpreter(self, version: str) -> Interpreter:
        """Looking through all that are installed takes longer than a create; remembered while it is the same."""
        found, seen = self._found.get(version, (None, 0))
        if found is None or _modified(found.path) != seen:
            found = self._interpreters.find(version)
            self._found[version] = (found, _modified(found.path))
        return found

    def superfluous(self) -> list[str]:
        """Digests of layers that are held for no sandbox and more than need be kept."""
        idle = self.holds.idle()
        return idle[: len(idle) - _IDLE_LAYERS // 2] if len(idle) > _IDLE_LAYERS else []


def environment(image: Image, layers: tuple[Layer, ...]) -> dict[str, str]:
    """Of commands in a sandbox of these, before its own: a higher layer wins and comes first in PATH."""
    merged = dict(image.env)
    for layer in reversed(layers):
        merged.update(layer.env)
        if layer.path:
            merged["PATH"] = ":".join([*layer.path, *filter(None, [merged.get("PATH", "")])])
    return merged


def _modified(path: str) -> int:
    """0 for one that is gone."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
