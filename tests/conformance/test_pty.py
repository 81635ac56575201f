"""Terminals: what a program in front of one sees, and what its other end gets."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, Queue

import pytest

import shoal

PROMPT = rb"[$#] $"


class Screen:
    """Somebody in front of a terminal: reads all the time, and looks for what is to come."""

    def __init__(self, pty: shoal.Pty) -> None:
        self.pty = pty
        self._pieces: Queue[bytes | None] = Queue()
        self._seen = b""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for piece in self.pty:
                self._pieces.put(piece)
        finally:
            self._pieces.put(None)

    def type(self, text: str | bytes) -> None:
        self.pty.send(text)

    def expect(self, pattern: bytes, seconds: float = 20) -> re.Match[bytes]:
        """Reads on until what came since the last match has it."""
        end = time.monotonic() + seconds
        while (found := re.search(pattern, self._seen)) is None:
            try:
                piece = self._pieces.get(timeout=max(end - time.monotonic(), 0))
            except Empty:
                raise AssertionError(f"no {pattern!r} in {self._seen!r}") from None
            assert piece is not None, f"ended without {pattern!r} in {self._seen!r}"
            self._seen += piece
        self._seen = self._seen[found.end() :]
        return found

    def do(self, command: str) -> bytes:
        """What it prints, up to the next prompt."""
        self.type(f"{command}; echo do''ne\r")
        return self.expect(rb"(?s)\r\n(.*)done\r\n.*?[$#] $")[1]


@pytest.fixture
def screen(box: shoal.Sandbox) -> Iterator[Screen]:
    """A login shell."""
    pty = box.pty.create(env={"PS1": "$ "})
    seat = Screen(pty)
    seat.expect(PROMPT)
    seat.type("bind 'set enable-bracketed-paste off'\r")  # its marks would be all over what is looked at
    seat.expect(rb"off'\r\n.*" + PROMPT)
    yield seat
    pty.kill()


def test_a_program_has_a_terminal_of_its_own(screen: Screen) -> None:
    assert re.fullmatch(rb"/dev/pts/\d+\r\n", screen.do("tty"))
    assert screen.do("echo $TERM; test -t 0 && test -t 1 && test -t 2 && echo all") == b"xterm-256color\r\nall\r\n"
    assert b"m" in screen.do("echo $-")


def test_its_size_and_resize(screen: Screen) -> None:
    assert screen.do("stty size") == b"24 80\r\n"
    screen.type("""sh -c 'trap "stty size" WINCH; echo re""ady; while :; do sleep 0.05; done'\r""")
    screen.expect(rb"[\r\n]ready\r\n")
    screen.pty.resize(cols=132, rows=50)
    screen.expect(rb"50 132\r\n")
    screen.type("\x03")
    screen.expect(PROMPT)
    assert screen.do("stty size") == b"50 132\r\n"


def test_a_size_that_is_none(box: shoal.Sandbox) -> None:
    pty = box.pty.create("cat", cols=100, rows=7)
    for cols, rows, field in ((0, 1, "cols"), (1, 65536, "rows"), (-1, 1, "cols"), (True, 1, "cols"), ("8", 1, "cols")):
        with pytest.raises(shoal.InvalidRequest, match=field):
            pty.resize(cols, rows)  # type: ignore[arg-type]
        with pytest.raises(shoal.InvalidRequest, match=field):
            box.pty.create("true", cols=cols, rows=rows)  # type: ignore[arg-type]
    pty.kill()
    assert box.pty.create("stty size", cols=100, rows=7).wait().stdout == "7 100\r\n"


def test_interrupt_suspend_and_end_of_input(screen: Screen) -> None:
    screen.type("sleep 60\r")
    time.sleep(0.5)
    screen.type("\x03")
    screen.expect(PROMPT)
    assert screen.do("echo $?") == b"130\r\n"
    screen.type("sleep 61\r")
    time.sleep(0.5)
    screen.type("\x1a")
    screen.expect(rb"Stopped +sleep 61\r\n")
    screen.expect(PROMPT)
    screen.type("bg\r")
    screen.expect(rb"sleep 61 &\r\n")
    assert b"Running" in screen.do("jobs")
    screen.type("fg\r")
    screen.expect(rb"\r\nsleep 61\r\n")
    time.sleep(0.5)  # bash says so before it hands the terminal over
    screen.type("\x03")
    screen.expect(PROMPT)
    assert b"sleep" not in screen.do("jobs")
    screen.type("cat\r")
    screen.expect(rb"cat\r\n")
    screen.type("line\r")
    screen.expect(rb"line\r\nline\r\n")
    screen.type("\x04")
    screen.expect(PROMPT)
    screen.type("(exit 3)\r")
    screen.expect(PROMPT)
    screen.type("\x04")
    assert screen.pty.wait().exit_code == 3


def test_utf8_whole_and_edited_by_characters(screen: Screen) -> None:
    assert screen.do("printf '☕ø漢\\xff\\x00.'") == "☕ø漢".encode() + b"\xff\x00."
    screen.type("stty -echo; cat\r")
    screen.expect(rb"cat\r\n")
    for byte in "☕x漢\x7f.\r".encode():  # ^? takes the whole last character away
        screen.type(bytes([byte]))
    screen.expect("☕x.\r\n".encode())
    screen.type("\x04")
    screen.expect(PROMPT)


def test_a_megabyte_pasted_while_it_comes_back(box: shoal.Sandbox) -> None:
    pty = box.pty.create("stty raw -echo; echo ready; head -c 1048576 | tee copy; sha256sum copy > sum; stty sane")
    stream = iter(pty)
    seen = b""
    while b"ready" not in seen:
        seen += next(stream)
    data = bytes(range(256)) * 4096
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(pty.send, data)
        rest = seen.partition(b"ready\n")[2] + b"".join(stream)
        sending.result(60)
    assert pty.wait().exit_code == 0
    assert len(rest) == len(data)
    assert rest == data
    assert box.files.read("copy", "bytes") == data


def test_lines_pasted_into_a_program_that_echoes(box: shoal.Sandbox) -> None:
    """Every line arrives. Of what the terminal echoes the kernel drops what there is no room for."""
    lines = [f"{number:05} {'x' * 90}" for number in range(3000)]
    pty = box.pty.create("cat > copy; exit 4")
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(pty.send, "".join(f"{line}\n" for line in lines) + "\x04")
        echoed = b"".join(pty)
        sending.result(60)
    assert pty.wait().exit_code == 4
    assert box.files.read("copy") == "".join(f"{line}\n" for line in lines)
    assert 0 < echoed.count(b"\r\n") <= 3000


def test_kill_hangs_up(box: shoal.Sandbox) -> None:
    pty = box.pty.create(
        "sleep 71 & nohup sleep 72 & (trap '' HUP TERM; sleep 73) & echo re''ady; sleep 74; echo never"
    )
    for piece in pty:
        if b"ready" in piece:
            break
    pty.kill()
    assert pty.wait().signal == 9
    time.sleep(0.3)
    if box.info().unenforced == ():
        assert box.commands.run("pgrep -x sleep").stdout == ""
    assert b"never" not in b"".join(pty)
    pty.send("lost")
    pty.kill()


def test_a_program_in_front_gets_hup_when_its_leader_is_gone(box: shoal.Sandbox) -> None:
    waiting = """sh -c 'trap "echo hup > got; exit" HUP; while :; do sleep 0.05; done' & sleep 0.5; kill -9 $$"""
    assert box.pty.create(waiting).wait().signal == 9
    end = time.monotonic() + 10
    while not box.files.exists("got"):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_limits_hold_on_a_terminal(box: shoal.Sandbox) -> None:
    slow = box.pty.create("echo x; sleep 60", timeout=0.5).wait()
    assert (slow.stdout, slow.limit, slow.verdict) == ("x\r\n", "timeout", "policy_timeout")
    much = box.pty.create("seq 100000", output_limit="4KiB").wait()
    assert (much.truncated, much.stdout_total) == (True, 688_895)


def test_another_handle_finds_it(box: shoal.Sandbox) -> None:
    pty = box.pty.create("read a; echo got $a")
    other = box.commands.connect(pty.id)
    other.send_stdin("x\r")
    assert b"".join(piece.data for piece in other).endswith(b"got x\r\n")
    assert b"".join(pty).endswith(b"got x\r\n")


def test_an_async_terminal(box: shoal.Sandbox) -> None:
    async def work() -> bytes:
        sandbox = await shoal.AsyncSandbox.connect(box.id)
        pty = await sandbox.pty.create(["cat"])
        await pty.send("hello\n\x04")
        data = b"".join([piece async for piece in pty])
        assert (await pty.wait()).exit_code == 0
        return data

    assert asyncio.run(work()) == b"hello\r\nhello\r\n"


@pytest.mark.root
@pytest.mark.parametrize("user", ["user", "1000"])
def test_as_another_user(box: shoal.Sandbox, user: str) -> None:
    found = box.pty.create("id -un; id -G; echo $HOME; stat -c %U $(tty)", user=user).wait().stdout.split()
    assert found == ["user", box.commands.run("id -G", user="user").stdout.strip(), "/home/user", "user"]


@pytest.mark.root
def test_without_bash_it_is_sh(box: shoal.Sandbox) -> None:
    box.commands.run(["rm", "/bin/bash"], check=True)
    screen = Screen(box.pty.create())
    screen.expect(PROMPT)
    screen.type("echo $0\r")
    screen.expect(rb"\r\n(-?[a-z/]*sh)\r\n")
    screen.pty.kill()
