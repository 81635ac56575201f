"""Jobs about many bytes: output, upload and download, beside a bare copy through a Unix socket."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from shoal import Sandbox
from shoal.bench.figures import Sample
from shoal.bench.job import Job, Place
from shoal.types import MiB

_OUTPUT: Final = 200_000_000
_FILE: Final = 64 * MiB
_PIECE: Final = 64 << 10
_WRITER: Final = f"dd if=/dev/zero bs={_OUTPUT // 1000} count=1000 status=none"


def _rate(count: int, work: Callable[[], object]) -> float:
    """MB/s of a work that moves so many bytes."""
    start = time.perf_counter()
    work()
    return count / 1e6 / (time.perf_counter() - start)


@contextmanager
def socket_copy(_: Place) -> Iterator[Job]:
    """What Python can receive at most here: a thread writes the same block again and again, nobody looks at it."""
    command = f"socketpair; a thread: sendall of 64 KiB, {_OUTPUT // MiB} MiB in all; here: recv(64 KiB)"
    yield Job(command, lambda: Sample(_rate(_OUTPUT, _copy)))


def _copy() -> None:
    near, far = socket.socketpair()
    with near:
        thread = threading.Thread(target=_send, args=(far,))
        thread.start()
        while near.recv(_PIECE):
            pass
        thread.join()


def _send(far: socket.socket) -> None:
    block = bytes(_PIECE)
    with far:
        for _ in range(-(-_OUTPUT // _PIECE)):
            far.sendall(block)


@contextmanager
def output_200m(_: Place) -> Iterator[Job]:
    """As text to a function; `bytes` is the same without one, head and tail kept."""
    with Sandbox.create() as box:

        def once() -> Sample:
            as_text = _rate(_OUTPUT, lambda: _read_output(box))
            return Sample(as_text, {"bytes": _rate(_OUTPUT, lambda: box.commands.run(_WRITER, check=True))})

        yield Job(f"box.commands.run({_WRITER!r}, on_stdout=count)", once)


def _read_output(box: Sandbox) -> None:
    got = 0

    def count(text: str) -> None:
        nonlocal got
        got += len(text)

    box.commands.run(_WRITER, on_stdout=count, check=True)
    if got != _OUTPUT:
        raise RuntimeError(f"{got} bytes came")


@contextmanager
def upload_64m(place: Place) -> Iterator[Job]:
    """`write_alone` is what a program inside reaches that writes such a file from nothing, which nobody can beat."""
    data = os.urandom(_FILE)
    local = place.folder / "data"
    local.write_bytes(data)
    inside = f"dd if=/dev/zero of=/workspace/alone bs=64k count={_FILE >> 16} status=none"
    with Sandbox.create() as box:

        def once() -> Sample:
            return Sample(
                _rate(_FILE, lambda: box.files.write("/workspace/data", data)),
                {
                    "upload": _rate(_FILE, lambda: box.files.upload(local, "/workspace/data")),
                    "write_alone": _rate(_FILE, lambda: box.commands.run(inside, check=True)),
                },
            )

        yield Job("box.files.write(path, data)", once)


@contextmanager
def download_64m(place: Place) -> Iterator[Job]:
    local = place.folder / "data"
    with Sandbox.create() as box:
        box.files.write("/workspace/data", os.urandom(_FILE))

        def once() -> Sample:
            return Sample(
                _rate(_FILE, lambda: _read_pieces(box)),
                {
                    "bytes": _rate(_FILE, lambda: box.files.read("/workspace/data", "bytes")),
                    "download": _rate(_FILE, lambda: box.files.download("/workspace/data", local)),
                },
            )

        yield Job("for piece in box.files.read(path, 'stream'): ...", once)


def _read_pieces(box: Sandbox) -> None:
    if (got := sum(map(len, box.files.read("/workspace/data", "stream")))) != _FILE:
        raise RuntimeError(f"{got} bytes came")


@contextmanager
def bulk_memory(place: Place) -> Iterator[Job]:
    """How far the process with the node grows by all of it, none of it asked for or given whole."""
    local = place.folder / "data"
    with local.open("wb") as file:
        file.writelines(os.urandom(MiB) for _ in range(_FILE // MiB))
    with Sandbox.create() as box:
        box.commands.run(["true"], check=True)

        def once() -> Sample:
            before = _peak()
            _read_output(box)
            after_output = _peak()
            box.files.upload(local, "/workspace/data")
            _read_pieces(box)
            box.files.download("/workspace/data", local)
            return Sample(_peak() - before, {"output": after_output - before})

        yield Job("all of the above, files by pieces; growth of the largest resident size", once)


def _peak() -> float:
    """MiB. Not by getrusage, where what the parent had before the exec counts too."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024
