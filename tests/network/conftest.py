from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from shoal.network.namespace import Recipe, filtered, isolated

EXECUTOR = Path(__file__).with_name("executor.py")


class Namespace:
    """A network namespace made by a recipe, and the listeners that it handed out."""

    def __init__(self, control: socket.socket, listeners: list[socket.socket]) -> None:
        self.control = control
        self.listeners = listeners

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs a program inside, as root of a user namespace that does not own the network."""
        self.control.send(msgspec.msgpack.encode((arguments, {**os.environ, **environment})))
        code, out, err = msgspec.msgpack.decode(self.control.recv(1 << 20), type=tuple[int, bytes, bytes])
        return subprocess.CompletedProcess(arguments, code, out.decode(), err.decode())

    def python(self, code: str) -> str:
        """What the code prints."""
        done = self.run(sys.executable, "-c", code)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@contextmanager
def enter(recipe: Recipe, count: int) -> Iterator[Namespace]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ExitStack() as stack:
        stack.enter_context(ours)
        executor = [sys.executable, str(EXECUTOR), str(theirs.fileno())]
        process = subprocess.Popen(executor, pass_fds=[theirs.fileno()])
        stack.callback(process.wait)
        stack.callback(process.kill)
        theirs.close()
        ours.settimeout(90)
        ours.send(msgspec.msgpack.encode(recipe))
        ready, descriptors, _, _ = socket.recv_fds(ours, 64, count)
        if ready != b"ready":
            pytest.fail("the executor could not carry out the recipe")
        listeners = [stack.enter_context(socket.socket(fileno=descriptor)) for descriptor in descriptors]
        yield Namespace(ours, listeners)


Enter = Callable[[Recipe], Namespace]


@pytest.fixture(scope="module")
def make_namespace() -> Iterator[Enter]:
    with ExitStack() as stack:
        yield lambda recipe: stack.enter_context(enter(recipe, len(recipe.listeners)))


@pytest.fixture(scope="module")
def filtered_namespace(make_namespace: Enter) -> Namespace:
    return make_namespace(filtered())


@pytest.fixture(scope="module")
def isolated_namespace(make_namespace: Enter) -> Namespace:
    return make_namespace(isolated())
