"""What is slow to take apart, done in a thread of its own: cgroups, and descriptors of full trees."""

from __future__ import annotations

import os
import threading
import time
from collections import deque

from shoal.sandbox.cgroup import Cgroups, Group

_PAUSE_SECONDS = 0.1
_CLOSE_TRIES = 30


class Janitor:
    """Takes leftovers of sandboxes that have ended. `close` returns when all that can go has gone."""

    def __init__(self, cgroups: Cgroups) -> None:
        self._cgroups = cgroups
        self._groups: deque[Group] = deque()
        self._descriptors: deque[int] = deque()
        self._work = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="shoal-janitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def remove_group(self, group: Group) -> None:
        """Nothing may be running in it any more, or what is must be dying."""
        self._groups.append(group)
        self._work.set()

    def close_descriptor(self, descriptor: int) -> None:
        """The last one of a tree frees all its pages."""
        self._descriptors.append(descriptor)
        self._work.set()

    def _run(self) -> None:
        while not self._stop:
            self._work.wait()
            self._work.clear()
            # Deaths come in bursts, and each batch costs the loop's thread a switch.
            time.sleep(_PAUSE_SECONDS)
            self._sweep()

    def _sweep(self) -> None:
        for _ in range(len(self._descriptors)):
            os.close(self._descriptors.popleft())
        for _ in range(len(self._groups)):
            group = self._groups.popleft()
            if not self._cgroups.remove(group):
                self._groups.append(group)  # a process of it is still on its way out
                self._work.set()

    def close(self) -> None:
        """What is not gone after a few seconds, because a process hangs in the kernel, stays."""
        self._stop = True
        self._work.set()
        if self._thread.is_alive():
            self._thread.join()
        for _ in range(_CLOSE_TRIES):
            self._sweep()
            if not self._groups:
                return
            time.sleep(_PAUSE_SECONDS)
