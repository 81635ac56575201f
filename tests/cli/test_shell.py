"""`shoal shell` on a real terminal."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from .command import PATIENCE, SHOAL, complaint, shoal

PROMPT = rb"root@sandbox:/workspace# $"


class Terminal:
    """A user in front of `shoal shell`."""

    def __init__(self, process: subprocess.Popen[bytes], master: int, device: int) -> None:
        self.process = process
        self._master = master
        self._device = device
        self._seen = b""

    def type(self, text: bytes) -> None:
        os.write(self._master, text)

    def expect(self, pattern: bytes) -> re.Match[bytes]:
        """Reads on until what came since the last match has it."""
        end = time.monotonic() + PATIENCE
        while (found := re.search(pattern, self._seen)) is None:
            assert time.monotonic() < end, f"no {pattern!r} in {self._seen!r}"
            if select.select([self._master], [], [], 0.1)[0]:
                self._seen += os.read(self._master, 65536)
        self._seen = self._seen[found.end() :]
        return found

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def settings(self) -> list[Any]:
        return termios.tcgetattr(self._device)

    def end(self) -> int:
        """The exit code; what is still printed meanwhile is taken."""
        end = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < end:
            if select.select([self._master], [], [], 0.1)[0]:
                self._seen += os.read(self._master, 65536)
        return self.process.wait(0)


@contextmanager
def terminal(*options: str) -> Iterator[Terminal]:
    master, device = os.openpty()
    try:
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        with subprocess.Popen(
            ["setsid", "--ctty", *SHOAL, "shell", *options], stdin=device, stdout=device, stderr=device
        ) as process:
            try:
                yield Terminal(process, master, device)
            finally:
                process.kill()
    finally:
        os.close(master)
        os.close(device)


@pytest.fixture
def user() -> Iterator[Terminal]:
    with terminal() as seat:
        seat.expect(PROMPT)
        yield seat


def test_what_is_typed_is_echoed_and_done(user: Terminal) -> None:
    user.type(b"echo $((40 + 2))\r")
    user.expect(rb"echo \$\(\(40 \+ 2\)\)\r\n")
    user.expect(rb"42\r\n")
    user.expect(PROMPT)
    user.type(b"exit 7\r")
    assert user.end() == 7


def test_it_has_the_size_of_the_terminal_and_follows_it(user: Terminal) -> None:
    user.type(b"stty size\r")
    user.expect(rb"[\r\n]24 80\r\n")
    user.type(b"""sh -c 'trap "stty size" WINCH; echo re""ady; while :; do sleep 0.05; done'\r""")
    user.expect(rb"[\r\n]ready\r\n")
    user.resize(50, 132)
    user.expect(rb"50 132\r\n")
    user.type(b"\x03")
    user.expect(PROMPT)


def test_ctrl_c_ends_the_command_and_not_the_shell(user: Terminal) -> None:
    user.type(b"""sh -c 'echo re""ady; exec sleep 60'\r""")
    user.expect(rb"[\r\n]ready\r\n")
    user.type(b"\x03")
    user.expect(PROMPT)
    user.type(b"echo code=$?\r")
    user.expect(rb"[\r\n]code=130\r\n")


def test_ctrl_d_ends_it(user: Terminal) -> None:
    user.type(b"(exit 3)\r")
    user.expect(PROMPT)
    user.type(b"\x04")
    assert user.end() == 3


def test_it_is_a_login_shell_with_job_control_and_a_terminal_of_its_own(user: Terminal) -> None:
    user.type(b"tty; echo $-; shopt -q login_shell && echo a login\r")
    user.expect(rb"/dev/pts/\d+\r\n")
    assert b"m" in user.expect(rb"([a-zA-Z]+)\r\n")[1]
    user.expect(rb"a login\r\n")


def test_all_bytes_come_through(user: Terminal) -> None:
    user.type(rb"printf '\xff\x00\xe2\x98\x95.'" + b"\r")
    user.expect(b"\xff\x00\xe2\x98\x95\\.")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_terminal_is_as_before_whatever_ends_it(number: signal.Signals) -> None:
    with terminal() as seat:
        before = seat.settings()
        seat.expect(PROMPT)
        assert seat.settings() != before
        seat.process.send_signal(number)
        assert seat.end() in (128 + signal.SIGHUP, 128 + signal.SIGKILL)  # bash may wait for a key before it goes
        assert seat.settings() == before


@pytest.mark.root
def test_options_are_those_of_run() -> None:
    with terminal("--user", "1000") as seat:
        seat.expect(rb"[$#] $")
        seat.type(b"id -u\r")
        seat.expect(rb"[\r\n]1000\r\n")


def test_without_a_terminal_it_is_refused() -> None:
    outcome = shoal("shell")
    assert outcome.returncode == 2
    assert "needs a terminal; use `shoal run" in complaint(outcome)
