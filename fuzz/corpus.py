"""Writes seeds for the fuzzers: what the Python side of each format would send. Usage: corpus.py FOLDER"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from shoal.sandbox.frame import Flag, Kind, Request, encode
from shoal.sandbox.plan import NONE, OPERATIONS, Argument, Plan

REQUESTS = (
    Request(["sh", "-c", "echo hi"], ["PATH=/usr/bin:/bin", "A="], "/workspace"),
    Request(["true"], [], "", uid=1000, gid=1000, groups=(4, 27), flags=Flag.STDIN),
    Request([b"\xff" * 200], ["LANG=C"], "/", flags=Flag.TTY, rows=24, cols=80),
    Request(["/a", "/b"], [], "/", operation=8),
    Request(["/file"], [], "/", operation=2, number=0o644),
)
ARGUMENTS: dict[str, Argument] = {"i": 0, "s": "10.0.0.1", "l": ["size=1m", "ro"], "n": [0, 1]}


def plans() -> Iterator[bytes]:
    """Each operation alone, all of them, and what is nested and read by a caller of its own."""
    every = Plan()
    for name, types in OPERATIONS:
        one = Plan()
        one.add(name, *(ARGUMENTS[kind] for kind in types))
        every.extend(one)
        yield one.wire()
    yield every.wire()
    nested = Plan()
    nested.add("netns", 3, NONE, every.wire())
    nested.add("keep", 3, 1016)
    nested.add("drop", 1016)
    yield nested.wire()
    clone = Plan()
    clone.add("clone", 0x20000000, 1000, "0 1000 1", "0 1000 1", NONE, NONE, 0, NONE)
    yield clone.wire()


def frames() -> Iterator[bytes]:
    for number, request in enumerate(REQUESTS):
        kind = Kind.FILE if request.operation > 0 else Kind.SPAWN
        yield encode(kind, number, request.wire(65536)) + encode(Kind.INPUT, number, b"input", number=1)
    yield b"".join(encode(kind, 1, bytes(8), number=number) for number, kind in enumerate(Kind))


def write(folder: Path, seeds: Iterator[bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
        (folder / f"{number:02}").write_bytes(seed)


def main(folder: Path) -> None:
    write(folder / "frames", frames())
    write(folder / "requests", (bytes([request.operation > 0]) + request.wire(65536) for request in REQUESTS))
    write(folder / "plans", (luck + plan for luck in (bytes(4), b"\1\2\3\4") for plan in plans()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
