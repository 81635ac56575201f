"""A plan: the flat list of operations by which shoal-init makes a sandbox.

All policy is here and in its callers; C walks the list.

A plan can be printed (`str(plan)`) and is sent as bytes. Descriptors are named by number: below `KEPT` they are
registers of this plan (the descriptors sent along come first), from `KEPT` on they stay with the spawner until dropped.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

from shoal.sandbox.values import encode_int, encode_list, encode_text

NONE: Final = -1
"""No descriptor; for a directory, the current one."""
KEPT: Final = 1000
HOST_MOUNTS, OWN_MOUNTS, HOST_NETWORK, NULL_DEVICE = range(KEPT, KEPT + 4)
"""What every spawner keeps from its start: the host's and its own mounts, the host's network, /dev/null."""
HOME_GROUP: Final = KEPT + 4
"""The file by which a spawner leaves the node's cgroups at its end, where it lives in one of them."""
FIRST_FREE_KEY: Final = KEPT + 16

# Name and argument types of each operation; its index is its code in init/setup.c.
# i integer or descriptor, s text or bytes, l list of texts, n list of integers.
OPERATIONS: Final = (
    ("mount", "isil"),
    ("overlay", "iiiiiln"),
    ("clone_tree", "iis"),
    ("idmap", "ii"),
    ("attributes", "iii"),
    ("attach", "iis"),
    ("pivot", "i"),
    ("enter", "i"),
    ("mkdir", "isi"),
    ("open", "iisi"),
    ("write", "iss"),
    ("chown", "isi"),
    ("remove_tree", "is"),
    ("keep", "ii"),
    ("drop", "i"),
    ("send", "i"),
    ("userns", "iss"),
    ("netns", "iis"),
    ("netlink", "isi"),
    ("listen", "iisii"),
    ("clone", "iissiiii"),
    ("identity", ""),
    ("join", "i"),
    ("unshare", "i"),
    ("hostname", "s"),
    ("rlimit", "iii"),
    ("commands", "iiiiiiin"),
    ("capabilities", "i"),
    ("seccomp", "is"),
    ("affinity", "s"),
    ("bind", "issl"),
    ("seccomp_audited", "is"),
    ("restrict", "isiii"),
    ("hide", "isi"),
    ("clone_all", "ii"),
    ("visit", "i"),
    ("view", "i"),
    ("no_memory_files", ""),
    ("landlock", "l"),
)
Argument = int | str | bytes | Sequence[str] | Sequence[int]


def _number(value: int) -> bytes:
    return encode_int(value if value < 1 << 63 else value - (1 << 64))


def _numbers(values: Sequence[int]) -> bytes:
    return encode_int(len(values)) + b"".join(map(encode_int, values))


_ENCODERS: Final[dict[str, Callable[[Any], bytes]]] = {"i": _number, "s": encode_text, "l": encode_list, "n": _numbers}
_CODES: Final = {
    name: (bytes([code]), tuple(_ENCODERS[kind] for kind in types)) for code, (name, types) in enumerate(OPERATIONS)
}


def _encode(name: str, arguments: tuple[Argument, ...]) -> bytes:
    code, encoders = _CODES[name]
    if len(encoders) != len(arguments):
        raise TypeError(f"{name} takes {len(encoders)} arguments, not {len(arguments)}")
    try:
        return code + b"".join([encode(value) for encode, value in zip(encoders, arguments, strict=True)])
    except (TypeError, AttributeError, struct.error) as error:
        raise TypeError(f"{name} takes no {arguments!r}: {error}") from error


_encode_again = functools.lru_cache(maxsize=4096)(_encode)
"""Most operations of a sandbox's plan are those of the one before."""


class Plan:
    """Operations in the order they were added."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, tuple[Argument, ...]]] = []
        self._wire = bytearray()

    def add(self, name: str, *arguments: Argument) -> None:
        """Appends one operation of `OPERATIONS`."""
        try:
            self._wire += _encode_again(name, arguments)
        except TypeError:  # a list cannot be remembered, or the arguments are wrong
            self._wire += _encode(name, arguments)
        self.steps.append((name, arguments))

    def extend(self, other: Plan) -> None:
        """Appends all of another plan."""
        self.steps += other.steps
        self._wire += other.wire()

    def wire(self) -> bytes:
        return bytes(self._wire)

    def describe(self, index: int) -> str:
        """One step as text; long bytes are cut."""
        if index >= len(self.steps):
            return f"step {index}"
        name, arguments = self.steps[index]
        shown = (f"<{len(a)} bytes>" if isinstance(a, bytes) and len(a) > 60 else repr(a) for a in arguments)
        return f"step {index}, {name}({', '.join(shown)})"

    def __str__(self) -> str:
        return "\n".join(self.describe(index) for index in range(len(self.steps)))
