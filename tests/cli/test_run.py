"""`shoal run` behaves as the command itself would here: its streams, its signals, its exit code."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shlex
import signal
import subprocess
import time

import pytest

import residue
from shoal.errors import InvalidRequest, NotFound, Unsupported
from shoal.image.interpreter import Interpreters

from .command import PATIENCE, SHOAL, complaint, shoal, started


def run_sh(script: str, *options: str, input: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return shoal("run", *options, "--", "sh", "-c", script, input=input)


# Streams


def test_streams_stay_apart_and_keep_every_byte() -> None:
    outcome = run_sh(r"printf 'a\377\0\r\n'; printf 'b\376' >&2; exit 7")
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (7, b"a\xff\0\r\n", b"b\xfe")


def test_much_output_comes_whole() -> None:
    outcome = run_sh("head -c 20000000 /dev/zero; head -c 3000000 /dev/zero >&2")
    assert (outcome.returncode, len(outcome.stdout), len(outcome.stderr)) == (0, 20_000_000, 3_000_000)


def test_stdin_goes_in_and_comes_out() -> None:
    data = random.Random(1).randbytes(5_000_000)
    outcome = shoal("run", "--", "cat", input=data)
    assert (outcome.returncode, outcome.stderr) == (0, b"")
    assert hashlib.sha256(outcome.stdout).digest() == hashlib.sha256(data).digest()


def test_stdin_arrives_while_it_is_written() -> None:
    with started("run", "--", "cat") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in (b"one\n", b"two\n"):
            process.stdin.write(line)
            process.stdin.flush()
            assert process.stdout.readline() == line
        process.stdin.close()
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize("script", ["true", "head -c 10 >/dev/null", "exec <&-; sleep 0.2"])
def test_stdin_need_not_be_read(script: str) -> None:
    outcome = run_sh(script, input=bytes(5_000_000))
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, b"", b"")


def test_stdin_may_come_after_the_end() -> None:
    with started("run", "--", "echo", "done") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.read() == b"done\n"
        process.stdin.close()
        assert process.stderr is not None
        assert (process.wait(PATIENCE), process.stderr.read()) == (0, b"")


def test_without_stdin_the_command_reads_its_end() -> None:
    outcome = subprocess.run(
        [*SHOAL, "run", "wc", "-c"], stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE
    )
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, b"0\n", b"")


@pytest.mark.parametrize(
    ("closed", "out", "err"),
    [("<&-", b"0\n", b"b\n"), (">&-", b"", b"b\n"), ("2>&-", b"0\n", b""), ("<&- >&- 2>&-", b"", b"")],
)
def test_streams_may_be_closed(closed: str, out: bytes, err: bytes) -> None:
    line = f"exec {shlex.join(SHOAL)} run -- sh -c 'wc -c; echo b >&2; exit 5' {closed}"
    outcome = subprocess.run(["sh", "-c", line], input=b"", capture_output=True, timeout=PATIENCE)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (5, out, err)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_full_disk_behind_stdout_is_one_line(options: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        outcome = subprocess.run(
            [*SHOAL, "run", *options, "echo", "x"], stdout=full, stderr=subprocess.PIPE, timeout=PATIENCE
        )
    assert outcome.returncode == 4
    assert outcome.stderr.decode().startswith("shoal: ")
    assert len(outcome.stderr.splitlines()) == 1


def test_it_ends_when_nobody_reads() -> None:
    with started("run", "--", "yes") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"y\n"
        process.stdout.close()
        assert process.stderr is not None
        assert (process.wait(PATIENCE), process.stderr.read()) == (141, b"")


# Exit codes and signals


@pytest.mark.parametrize("code", [0, 1, 77, 255])
def test_it_exits_as_the_command_does(code: int) -> None:
    assert run_sh(f"exit {code}").returncode == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
def test_a_death_by_signal_shows_as_in_a_shell(number: signal.Signals) -> None:
    outcome = run_sh(f"kill -{number} $$")
    assert (outcome.returncode, outcome.stderr) == (128 + number, b"")


def ready(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_signals_reach_the_command(number: signal.Signals) -> None:
    with started("run", "--", "sh", "-c", "echo ready; exec sleep 60") as process:
        ready(process)
        process.send_signal(number)
        assert process.wait(PATIENCE) == 128 + number
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert not residue.cgroups(process.pid)


def test_a_command_decides_itself_about_ctrl_c() -> None:
    with started(
        "run", "--", "sh", "-c", "trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.05; done"
    ) as process:
        ready(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 9
        assert process.stdout is not None
        assert process.stdout.read() == b"caught\n"


def test_at_the_third_ctrl_c_it_is_killed() -> None:
    script = "trap 'echo ready' INT; echo ready; while :; do sleep 0.05; done"
    with started("run", "--", "sh", "-c", script) as process:
        for _ in range(3):
            ready(process)
            process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 128 + signal.SIGKILL


def test_ctrl_c_while_the_sandbox_is_made() -> None:
    with started("run", "--", "sleep", "60") as process:
        assert residue.settled(lambda: not residue.sandbox_processes(process.pid), PATIENCE) is False
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert not residue.cgroups(process.pid)


def test_all_goes_when_it_is_killed() -> None:
    with started("run", "--", "sh", "-c", "sleep 60 & echo ready; wait") as process:
        ready(process)
        process.kill()
        process.wait(PATIENCE)
        pid = process.pid
        assert not residue.settled(lambda: residue.cgroups(pid))


# Options


def test_json_is_one_document_and_nothing_else() -> None:
    outcome = run_sh(r"printf 'a\377'; echo b >&2; exit 3", "--json")
    assert (outcome.returncode, outcome.stderr) == (3, b"")
    result = json.loads(outcome.stdout)
    assert (result["exit_code"], result["signal"], result["verdict"]) == (3, None, "ok")
    assert (result["stdout"], result["stderr"], result["stdout_total"]) == ("a\ufffd", "b\n", 2)


def test_json_tells_of_a_time_limit() -> None:
    outcome = shoal("run", "--json", "--timeout", "0.3", "--", "sleep", "60")
    assert (outcome.returncode, outcome.stderr) == (137, b"")
    result = json.loads(outcome.stdout)
    assert (result["signal"], result["limit"], result["verdict"]) == (9, "timeout", "policy_timeout")


def test_a_time_limit_kills_and_says_so() -> None:
    begin = time.monotonic()
    outcome = run_sh("echo begun; sleep 60 & wait", "--timeout", "0.5")
    assert time.monotonic() - begin < 30
    assert (outcome.returncode, outcome.stdout) == (137, b"begun\n")
    assert outcome.stderr == b"shoal: the command was at its limit: timeout\n"


def test_an_interpreter_by_its_version() -> None:
    try:
        Interpreters(os.environ).find("3.8")
    except (InvalidRequest, NotFound, Unsupported) as error:
        pytest.skip(str(error))
    outcome = shoal("run", "--python", "3.8", "--", "python3", "-c", "import sys; print(sys.version_info[:2])")
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, b"(3, 8)\n", b"")


@pytest.mark.root
@pytest.mark.parametrize(("user", "uid"), [("1000", b"1000"), ("nobody", b"65534"), ("root", b"0")])
def test_users(user: str, uid: bytes) -> None:
    assert shoal("run", "--user", user, "--", "id", "-u").stdout.strip() == uid


def test_there_is_no_network_unless_asked_for() -> None:
    script = "import socket; socket.create_connection(('1.1.1.1', 80), 5)"
    outcome = shoal("run", "--", "python3", "-c", script)
    assert outcome.returncode == 1
    assert b"OSError" in outcome.stderr


def test_what_is_not_allowed_is_refused() -> None:
    script = "import urllib.request; urllib.request.urlopen('http://elsewhere.invalid/', timeout=10)"
    outcome = shoal("run", "--network", "allow=index.invalid", "--", "python3", "-c", script)
    assert outcome.returncode == 1
    assert b"Error" in outcome.stderr


@pytest.mark.parametrize("dashes", [(), ("--",)])
def test_what_follows_the_command_is_its_own(dashes: tuple[str, ...]) -> None:
    outcome = shoal("run", *dashes, "echo", "--json", "--profile", "x", "--help", "--", "-n")
    assert (outcome.returncode, outcome.stdout) == (0, b"--json --profile x --help -- -n\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--profile", "huge", "true"), "small, basic, large"),
        (("--layer", "no-such-layer", "true"), "shoal env ls"),
        (("--layer", "/etc", "true"), "/etc"),
        (("--layer", "0123456789ab", "true"), "0123456789ab"),
        (("--workspace", "no-such-layer", "true"), "workspace"),
        (("--image", "ubuntu", "true"), "ubuntu"),
        (("--tier", "cloud", "true"), "namespace"),
        (("--python", "3.97", "true"), "3.97"),
        (("--user", "no-such-user", "true"), "no-such-user"),
        (("--network", "everything", "true"), "allow=HOST,HOST"),
        (("--network", "allow=", "true"), "names no host"),
        (("--network", "allow=http://x/", "true"), "http://x/"),
        (("--network", "open", "true"), "open"),
        (("--timeout", "0", "true"), "--timeout"),
        (("--timeout", "nan", "true"), "--timeout"),
        (("--timeout", "soon", "true"), "--timeout"),
        (("--colour", "true"), "--colour"),
        ((), "CMD"),
        (("--",), "CMD"),
        (("",), "cmd"),
        (("no-such-program",), "cmd"),
        (("/etc/passwd",), "cmd"),
    ],
)  # fmt: skip
def test_misuse_is_one_line_and_exits_with_2(arguments: tuple[str, ...], told: str) -> None:
    outcome = shoal("run", *arguments)
    assert outcome.returncode == 2
    assert told in complaint(outcome)
