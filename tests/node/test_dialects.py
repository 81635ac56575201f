"""The text for a shell, given to real shells over a socket: what they say of it, and that it is never taken apart."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.node import dialects
from shoal.node.dialects import Bash, Dialect, End, Sh, State

BASH, DASH = shutil.which("bash") or "/bin/bash", "/bin/sh"


class Session:
    """A shell of this machine, without a sandbox."""

    def __init__(self, shell: str, dialect: Dialect) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(20)
        self._dialect = dialect
        self._state = State()
        self._out = os.memfd_create("out")
        self.process = subprocess.Popen(
            dialects.argv(shell),
            stdin=theirs,
            stdout=self._out,
            stderr=subprocess.STDOUT,
            env={"PATH": "/usr/bin:/bin"},
        )
        theirs.close()
        self._socket.sendall(dialects.greeting("feed").encode())
        self.version = self._words(1)[0][2]

    def _words(self, lines: int) -> list[list[str]]:
        said = b""
        while len(found := [line for line in said.split(b"\n")[:-1] if line]) < lines:
            piece = self._socket.recv(1000)
            assert piece, "the shell has ended"
            said += piece
        return [line.decode().split(" ") for line in found]

    def run(self, text: str) -> tuple[End | None, str]:
        os.ftruncate(self._out, 0)
        self._socket.sendall(self._dialect.command(text, "beef", self._state).encode("utf-8", "surrogateescape"))
        begin, end = self._words(2)
        assert begin == ["beef"]
        assert end[0] == "beef"
        found = dialects.parse_end(end[1:])
        assert found is not None
        self._state = State(*found)
        size = os.fstat(self._out).st_size
        return found, os.pread(self._out, size, 0).lstrip(b"\0").decode("utf-8", "surrogateescape")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._socket.close()
        os.close(self._out)


@pytest.fixture(scope="module", params=["bash", "sh"])
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    shell = Session(BASH, Bash()) if request.param == "bash" else Session(DASH, Sh())
    yield shell
    shell.close()


def test_it_says_which_shell_it_is(session: Session) -> None:
    chosen = dialects.dialect(session.version)
    assert type(chosen) is type(session._dialect)


@pytest.mark.parametrize("version", ["v", "", "v5.0.18(1)-release", "v4.4.20", "x5.2", "v5"])
def test_an_old_or_unknown_shell_is_a_plain_one(version: str) -> None:
    assert isinstance(dialects.dialect(version), Sh)
    assert isinstance(dialects.dialect("v5.1.4(1)-release"), Bash)
    assert isinstance(dialects.dialect("v12.0"), Bash)


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=200))
def test_any_text_arrives_as_it_is(session: Session, text: str) -> None:
    quoted = "'" + text.replace("'", "'\\''") + "'"
    end, out = session.run(f"printf '%s' {quoted}")
    assert end is not None
    assert (end.code, out.encode("utf-8", "surrogateescape")) == (0, text.encode())


def test_what_a_command_left_is_found_by_the_next(session: Session) -> None:
    assert session.run("false")[0] == End(1, session._state.flags)
    assert session.run("echo $?")[1] == "1\n"
    session.run("set -x")
    assert session.run("echo seen")[1].splitlines()[-1] == "seen"
    assert "echo seen" in session.run("echo seen")[1]
    assert "printf" not in session.run("false")[1]
    session.run("set +x")
    assert session.run("echo quiet")[1] == "quiet\n"


NOT_OURS = [
    [], ["0"], ["0", "h", "x"], ["-1", "h"], ["256", "h"], ["", "h"], ["1e1", "h"], ["\u0663", "h"], ["9" * 5000, "h"],
]  # fmt: skip


@pytest.mark.parametrize("words", NOT_OURS)
def test_what_no_shell_of_ours_says(words: list[str]) -> None:
    assert dialects.parse_end(words) is None
    assert dialects.parse_end(["255", "hB"]) == End(255, "hB")
