"""Commands: output, time limits, processes, and what they are blamed for. Each case once broke a system like this."""

from __future__ import annotations

import hashlib
import os
import random
import resource
import time
from pathlib import Path

import pytest

import shoal
from shoal.types import MiB


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _count(box: shoal.Sandbox, name: str) -> int:
    """Live processes of that name."""
    return int(box.commands.run(["pgrep", "-c", "-x", name]).stdout)


@pytest.mark.parametrize("to", ["", ">&2"])
def test_t01_much_output(box: shoal.Sandbox, to: str) -> None:
    """200 MB: head and tail are kept within the limit, the rest is counted, and the node holds none of it."""
    before = _resident()
    result = box.commands.run(
        f"(echo first; head -c 200000000 /dev/zero | tr '\\0' x; echo last) {to}; exit 3", timeout=60
    )
    kept, total = (result.stderr_bytes, result.stderr_total) if to else (result.stdout_bytes, result.stdout_total)
    assert result.exit_code == 3
    assert len(kept) <= 1 * MiB
    assert kept.startswith(b"first\n")
    assert kept.endswith(b"xlast\n")
    assert b"bytes left out" in kept
    assert result.truncated
    assert total == 200_000_000 + len("first\nlast\n")
    assert _resident() - before < 64 * MiB
    assert result.duration < 30
    assert box.commands.run(["echo", "next"]).stdout == "next\n"


@pytest.mark.parametrize("to", ["", ">&2"])
def test_t02_bytes_that_are_no_text(box: shoal.Sandbox, to: str) -> None:
    """They come as they are, as text with U+FFFD, and with nothing appended where no newline ends them."""
    result = box.commands.run(rf"printf 'a\377\376b' {to}")
    raw, text = (result.stderr_bytes, result.stderr) if to else (result.stdout_bytes, result.stdout)
    assert result.exit_code == 0
    assert raw == b"a\xff\xfeb"
    assert text == "a\ufffd\ufffdb"
    assert not result.truncated
    assert (result.stdout_total, result.stderr_total) == ((0, 4) if to else (4, 0))


SPLIT = r"""
import os
data, at, step = "☕".encode() * 100000, 0, 0
while at < len(data):
    step = step % 7 + 1
    os.write(1, data[at:at + step])
    at += step
"""


def test_t03_split_characters(box: shoal.Sandbox) -> None:
    pieces: list[str] = []
    result = box.commands.run(["python3", "-c", SPLIT], on_stdout=pieces.append, timeout=120)
    assert "".join(pieces) == result.stdout == "☕" * 100_000


def test_t03_split_characters_of_a_background_command(box: shoal.Sandbox) -> None:
    handle = box.commands.run(["python3", "-c", SPLIT], background=True, timeout=120)
    assert b"".join(piece.data for piece in handle).decode() == "☕" * 100_000
    assert handle.wait().stdout_total == 300_000


def test_t04_background_child_keeps_the_pipes(box: shoal.Sandbox) -> None:
    """The command's end is told at once, the child lives on, and what it writes later belongs to nobody."""
    start = time.monotonic()
    result = box.commands.run("(sleep 30.0417; echo late) & echo ok")
    assert time.monotonic() - start < 2
    assert (result.exit_code, result.stdout) == (0, "ok\n")
    found = box.commands.run("until pgrep -f '^sleep 30.0417'; do sleep 0.02; done", timeout=10)
    assert len(found.stdout.split()) == 1
    assert box.commands.run(["pkill", "-f", "^sleep 30.0417"]).exit_code == 0
    assert box.commands.run("sleep 0.2; echo next").stdout == "next\n"


@pytest.mark.parametrize(
    "command",
    [
        """setsid sh -c 'trap "" TERM; while :; do :; done' & wait""",
        """setsid setsid sh -c 'trap "" TERM INT HUP; while :; do :; done' </dev/null >/dev/null 2>&1 & sleep 60""",
        """python3 -c 'import os, time
for _ in range(3):
    if os.fork(): os._exit(0) if _ else None; time.sleep(60) if not _ else None
    os.setsid()
while True: pass'""",
    ],
    ids=["setsid", "detached", "double fork"],
)
def test_t05_a_timeout_ends_the_whole_tree(box: shoal.Sandbox, command: str) -> None:
    start = time.monotonic()
    result = box.commands.run(command, timeout=2)
    assert time.monotonic() - start < 4
    assert (result.limit, result.verdict, result.exit_code, result.signal) == ("timeout", "policy_timeout", None, 9)
    left = box.commands.run("ps -eo args | grep -c '[w]hile'", timeout=5).stdout.strip()
    assert left == "0"
    assert box.commands.run("echo next").stdout == "next\n"


def test_t06_output_is_kept_on_timeout(box: shoal.Sandbox) -> None:
    result = box.commands.run("echo A; echo B >&2; sleep 60", timeout=2)
    assert (result.stdout, result.stderr, result.limit, result.exit_code) == ("A\n", "B\n", "timeout", None)


def test_t06_silence(box: shoal.Sandbox) -> None:
    """A slow but talking command is told from one that hangs."""
    talking = box.commands.run("for i in 1 2 3 4; do echo $i; sleep 0.4; done", silence=1.5)
    assert (talking.exit_code, talking.limit) == (0, None)
    quiet = box.commands.run("echo x; sleep 30", silence=1)
    assert (quiet.stdout, quiet.limit, quiet.verdict) == ("x\n", "silence", "policy_timeout")
    assert 1 <= quiet.duration < 4


@pytest.mark.parametrize(
    ("command", "code", "out", "err"),
    [
        ("cat", 0, "", ""),
        ("python3 -c 'input()'", 1, "", "EOFError"),
        ("read x; echo $?", 0, "1\n", ""),
    ],
)
def test_t07_no_stdin(box: shoal.Sandbox, command: str, code: int, out: str, err: str) -> None:
    result = box.commands.run(command, timeout=2)
    assert (result.exit_code, result.stdout) == (code, out)
    assert err in result.stderr
    assert result.limit is None


def test_t07_stdin_is_fed_and_closed(box: shoal.Sandbox) -> None:
    """As a whole, in pieces while the command runs, more than any pipe holds, and to one that does not read it."""
    assert box.commands.run("cat", stdin=b"a\xffb").stdout_bytes == b"a\xffb"
    assert box.commands.run("cat | wc -c", stdin=b"x" * 3_000_000, timeout=30).stdout.strip() == "3000000"
    assert box.commands.run("exec <&-; echo deaf", stdin=b"x" * 3_000_000, timeout=30).stdout == "deaf\n"
    command = box.commands.run("read a; echo got $a; cat", background=True, timeout=30)
    command.send_stdin("one\n")
    command.send_stdin("two")
    command.close_stdin()
    assert command.wait().stdout == "got one\ntwo"


@pytest.mark.parametrize(
    ("command", "code", "out"),
    [
        ("cat <<EOF\ntext\nEOF", 0, "text\n"),
        ("echo x # comment", 0, "x\n"),
        ("echo 'open", 2, ""),
        ("echo x \\", 0, "x\n"),
        ("sleep 0 &", 0, ""),
        ('[[ "a b" =~ ^a\\ b$ ]] && echo ${UNSET:-"q r"} $((1<<3))', 0, "q r 8\n"),
    ],
    ids=["heredoc", "comment", "open quote", "backslash", "background", "bash"],
)
def test_t08_awkward_shell_text(box: shoal.Sandbox, command: str, code: int, out: str) -> None:
    result = box.commands.run(command, timeout=5)
    assert result.stdout.replace("x \\\n", "x\n") == out
    assert result.exit_code in ((code,) if code != 2 else (1, 2))
    if code == 2:
        assert "unexpected EOF" in result.stderr


def test_t09_strict_mode_ends_only_its_own_command(box: shoal.Sandbox) -> None:
    result = box.commands.run("set -euo pipefail; echo hi; false; echo never", timeout=5)
    assert (result.exit_code, result.stdout) == (1, "hi\n")
    assert box.commands.run("false; echo ${UNSET}back", timeout=5).stdout == "back\n"


def test_t10_a_command_may_print_anything(box: shoal.Sandbox) -> None:
    """Its end is not looked for in what it writes (B007)."""
    text = "".join(chr(number) for number in range(1, 128)) + "\nexit 0\n__END__ 0"
    box.files.write("text", text)
    result = box.commands.run("cat text; exit 5")
    assert (result.exit_code, result.stdout) == (5, text)
    assert box.commands.run("echo next").stdout == "next\n"


def test_several_at_once(box: shoal.Sandbox) -> None:
    """Each has its own streams, input and end."""
    commands = [box.commands.run(f"read x; echo {n} $x; exit {n}", background=True) for n in range(8)]
    for number, command in reversed(list(enumerate(commands))):
        command.send_stdin(f"to {number}\n")
    for number, command in enumerate(commands):
        result = command.wait()
        assert (result.exit_code, result.stdout) == (number, f"{number} to {number}\n")


@pytest.mark.parametrize("runs", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_t11_orphans_are_reaped(box: shoal.Sandbox, runs: int) -> None:
    before = _count(box, "sleep")
    for _ in range(runs):
        assert box.commands.run("(sleep 0.05 &) ; true").exit_code == 0
    deadline = time.monotonic() + 10
    while (states := box.commands.run("ps -eo stat,comm").stdout).count("sleep") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [line for line in states.splitlines() if line.startswith("Z")]
    assert _count(box, "sleep") == before == 0
    assert len(states.splitlines()) <= 3


@pytest.mark.root
def test_t19_environment() -> None:
    with shoal.Sandbox.create(env={"A": "1", "PATH": "/opt/x/bin:/usr/bin:/bin"}) as box:
        box.files.write("/opt/x/bin/tool", "#!/bin/sh\necho tool $A\n", mode=0o755)
        for command in ("tool", "sh -c tool", "bash -c tool", ["tool"], "tool | cat"):
            assert box.commands.run(command).stdout == "tool 1\n"
        assert b"".join(piece.data for piece in box.commands.run("tool", background=True)) == b"tool 1\n"
        assert box.commands.run("tool", env={"A": "2"}).stdout == "tool 2\n"
        assert box.commands.run("tool").stdout == "tool 1\n"
        assert box.commands.run("echo $HOME $USER").stdout == "/root root\n"


def test_t19_environment_of_another_user() -> None:
    with shoal.Sandbox.create(env={"A": "1"}) as box:
        assert box.commands.run("echo $HOME $USER $A", user="user").stdout == "/home/user user 1\n"


@pytest.mark.parametrize("cycles", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_t12_a_stubborn_sandbox_leaves_nothing(cycles: int) -> None:
    stubborn = """
    (trap '' TERM INT HUP; while :; do sleep 1; done) &
    sleep 100 & kill -STOP $!
    (while :; do sh -c 'sleep 0.01' & sleep 0.02; done) >/dev/null 2>&1 &
    mkdir -p /sys/fs/cgroup/x /tmp/m; mount -t tmpfs none /tmp/m; echo x > /dev/shm/x
    """
    with shoal.Sandbox.create() as warm:
        warm.commands.run("true")
    mounts, descriptors = Path("/proc/self/mountinfo").read_text(), len(os.listdir("/proc/self/fd"))
    threads = len(os.listdir("/proc/self/task"))
    for _ in range(cycles):
        box = shoal.Sandbox.create()
        box.commands.run(stubborn, timeout=10)
        start = time.monotonic()
        box.kill()
        assert time.monotonic() - start < 4
    time.sleep(0.5)
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 4
    assert len(os.listdir("/proc/self/task")) <= threads + 2


def test_a_model_cannot_switch_its_limits_off(box: shoal.Sandbox) -> None:
    """B010: a time limit that comes from a model is checked and not believed."""
    for wrong in (-1, 0, float("nan"), float("inf"), True, "5", 1e30):
        with pytest.raises(shoal.InvalidRequest, match="timeout"):
            box.commands.run("true", timeout=wrong)  # type: ignore[arg-type]
    for command, env, field in (
        ("a\0b", {}, "cmd"),
        ("\ud800", {}, "cmd"),
        ([], {}, "cmd"),
        ("true", {"A=B": "1"}, "env"),
        ("true", {"A": "\0"}, "env"),
    ):
        with pytest.raises(shoal.InvalidRequest, match=field):
            box.commands.run(command, env=env)
    with pytest.raises(shoal.InvalidRequest, match="stdin"):
        box.commands.run("true", stdin=5)  # type: ignore[call-overload]


def test_b007_a_command_may_print_anything(box: shoal.Sandbox) -> None:
    """T10: the end of a command is not looked for in what it writes."""
    text = "".join(chr(number) for number in range(1, 128)) + "\nexit 0\n__END__ 0"
    box.files.write("/tmp/text", text)
    result = box.commands.run("cat /tmp/text; exit 5")
    assert (result.exit_code, result.stdout) == (5, text)
    assert box.commands.run("echo next").stdout == "next\n"


_LETTERS = """python3 -c '
import os, random
data = random.Random({seed}).randbytes(1 << 20).hex().encode() * 10
view = memoryview(data)
while view:
    view = view[os.write({stream}, view[:{piece}]):]
' """


@pytest.mark.parametrize("piece", [1000, 65_536, 1 << 20])
def test_much_output_on_both_streams_comes_whole_and_in_order(box: shoal.Sandbox, piece: int) -> None:
    """20 MiB on each at once: what is moved and what is copied must not overtake each other."""
    out, err = hashlib.sha256(), hashlib.sha256()
    both = f"{_LETTERS.format(seed=1, stream=1, piece=piece)} & {_LETTERS.format(seed=2, stream=2, piece=piece)}; wait"
    result = box.commands.run(
        both,
        timeout=120,
        on_stdout=lambda text: out.update(text.encode()),
        on_stderr=lambda text: err.update(text.encode()),
    )
    assert result.exit_code == 0
    for seed, digest in ((1, out), (2, err)):
        whole = random.Random(seed).randbytes(1 << 20).hex().encode() * 10
        assert digest.hexdigest() == hashlib.sha256(whole).hexdigest()


def test_a_thief_of_output_stops_nothing(box: shoal.Sandbox) -> None:
    """A command's own pipe can be read by others inside: bytes that they take are gone, and all else goes on."""
    thief = "for i in 1 2 3 4; do dd if=/proc/self/fd/1 of=/dev/null bs=64k count=200 status=none & done;"
    result = box.commands.run(f"{thief} head -c 50000000 /dev/zero; kill $(jobs -p); exit 0", timeout=60)
    assert result.exit_code == 0
    assert 0 < result.stdout_total <= 50_000_000
    assert box.commands.run("echo still there").stdout == "still there\n"


def test_pages_of_a_file_that_is_truncated_meanwhile(box: shoal.Sandbox) -> None:
    """Output may be pages of a file, spliced into the pipe and gone from the file before they are read."""
    code = """
import os
size = 8 << 20
with open("/tmp/pages", "w+b") as file:
    for turn in range(20):
        os.pwrite(file.fileno(), b"x" * size, 0)
        at = 0
        while at < size:
            at += os.splice(file.fileno(), 1, size - at, offset_src=at)
            if at > size // 2:
                file.truncate(0)
                break
"""
    result = box.commands.run(["python3", "-c", code], timeout=60)
    assert result.exit_code == 0, result.stderr
    assert result.stdout_total >= 20 * (4 << 20)
    assert box.commands.run("echo still there").stdout == "still there\n"


def test_the_end_of_much_output_is_not_lost(box: shoal.Sandbox) -> None:
    """What is left in a pipe of 256 KiB when the command has ended."""
    for size in (200_000, 262_144, 1_048_576, 3_000_001):
        result = box.commands.run(f"head -c {size} /dev/zero", output_limit="8MiB")
        assert (len(result.stdout_bytes), result.stdout_total) == (size, size)
