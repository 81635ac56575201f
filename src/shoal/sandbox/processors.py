"""Which of the machine's processors a sandbox runs on, so that all have about as many sandboxes."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable


class Processors:
    """Those that this process may use, with the number of sandboxes on each."""

    def __init__(self, usable: Iterable[int] | None = None) -> None:
        """`usable`: their numbers; by default those that this process may run on."""
        self._load = dict.fromkeys(sorted(os.sched_getaffinity(0) if usable is None else usable), 0)

    @property
    def count(self) -> int:
        return len(self._load)

    def take(self, count: int) -> tuple[int, ...]:
        """The `count` that have the fewest; none where that is all of them, for which nothing needs to be set."""
        if count >= len(self._load):
            return ()
        chosen = tuple(heapq.nsmallest(count, self._load, key=self._load.__getitem__))
        for number in chosen:
            self._load[number] += 1
        return chosen

    def give(self, chosen: Iterable[int]) -> None:
        """They are another's now."""
        for number in chosen:
            self._load[number] -= 1


def as_mask(chosen: Iterable[int]) -> bytes:
    """As sched_setaffinity(2) takes it: whole words, the lowest processor in the lowest bit."""
    mask = sum(1 << number for number in chosen)
    words = max(1, -(-mask.bit_length() // 64))
    return mask.to_bytes(8 * words, "little")
