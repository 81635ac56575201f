"""Moments that `changes` and `diff` can look back to: what differed from the layers then, and small files' contents."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final, NamedTuple

from shoal.errors import NotFound
from shoal.node.changes import Changes, Trees
from shoal.node.versions import Room, Version, look_at
from shoal.types import MiB

_MARKS_MAX: Final = 4
"""Of one sandbox."""
_CONTENTS_MAX: Final = 8 * MiB
"""Bytes of contents that one mark keeps. Beside them it takes some 500 bytes for each changed path."""


class Moment(NamedTuple):
    """One of them."""

    changes: Changes
    versions: Mapping[str, Version | None]
    """By path, of all that differed; None for what was removed."""

    def removed(self, path: str) -> bool:
        """Whether a directory that it was in had been removed by then."""
        while path := path.rpartition("/")[0]:
            if (found := self.changes.get(path)) is not None and found.change.kind == "removed":
                return True
        return False


def take_mark(trees: Trees) -> Moment:
    """LimitExceeded as from `find_changes`."""
    look = look_at(trees, Room(_CONTENTS_MAX), old=False)
    return Moment(look.changes, {path: pair.new for path, pair in look.pairs.items()})


class Marks:
    """The last few of one sandbox."""

    def __init__(self) -> None:
        self._moments: OrderedDict[int, Moment] = OrderedDict()
        self._ids = itertools.count(1)

    def add(self, moment: Moment) -> int:
        id = next(self._ids)
        self._moments[id] = moment
        while len(self._moments) > _MARKS_MAX:
            self._moments.popitem(last=False)
        return id

    def get(self, id: int) -> Moment:
        """NotFound for one that never was, or has been forgotten for newer ones."""
        if id not in self._moments:
            raise NotFound(f"since: there is no mark {id}; of each sandbox the last {_MARKS_MAX} are kept")
        return self._moments[id]
