"""Which layers this process uses, told to every other process by a lock on each layer's folder.

What is held is not removed, by whichever process. A hold outlives the sandbox that asked for it for as long as the
layer may stay mounted for the next one: `idle` says which those are, and `release` lets them go.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from shoal.errors import NotFound
from shoal.image import lock
from shoal.types import Layer

_TOUCH_SECONDS = 600.0
"""How exact the time of a layer's last use is; noting it more often would only write."""


class Holds:
    """Counted holds on layers of one store. Layers that lie elsewhere (`host:`) need none."""

    def __init__(self, layers: Path) -> None:
        """`layers`: the store's folder of them."""
        self._layers = layers
        self._held: dict[str, int] = {}
        self._users: Counter[str] = Counter()

    def take(self, layers: Iterable[Layer]) -> None:
        """One more user of each, all or none. NotFound for a layer that was removed since it was looked up."""
        names = [name for layer in layers if (name := self._name(layer)) is not None]
        for name in names:
            if name not in self._held:
                self._held[name] = self._lock(name)
        self._users.update(names)

    def give(self, layers: Iterable[Layer]) -> None:
        """One user less of each."""
        self._users.subtract(name for layer in layers if (name := self._name(layer)) is not None)

    def idle(self) -> list[str]:
        """Digests of layers that are held and have no user, the longest held first."""
        return [f"sha256:{name}" for name in self._held if not self._users[name]]

    def release(self, digests: Iterable[str]) -> None:
        """Lets go of those that have no user; the caller has unmounted them."""
        for digest in digests:
            name = digest.removeprefix("sha256:")
            if not self._users[name] and (descriptor := self._held.pop(name, None)) is not None:
                os.close(descriptor)
                del self._users[name]

    def close(self) -> None:
        """Lets go of everything."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()
        self._users.clear()

    def _name(self, layer: Layer) -> str | None:
        """Of the layer's folder, if it is of this store."""
        folder = Path(layer.source).parent
        return folder.name if folder.parent == self._layers else None

    def _lock(self, name: str) -> int:
        folder = self._layers / name
        descriptor = lock.share_folder(folder)
        if descriptor is None:
            raise NotFound(f"layer sha256:{name} was removed while it was asked for; ask again or build it anew")
        note_use(descriptor)
        return descriptor


def note_use(folder: int) -> None:
    """Marks a layer as used now: the time of its folder. On a read-only store nothing is noted."""
    now = time.time()
    if now - os.fstat(folder).st_mtime > _TOUCH_SECONDS:
        try:
            os.utime(folder, (now, now))
        except OSError:
            return
