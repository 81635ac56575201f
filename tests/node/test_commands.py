from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.errors import CommandFailed, InvalidRequest
from shoal.node.commands import Kept, check, check_env
from shoal.node.interface import CommandRequest

# What is kept of a stream


@given(st.lists(st.binary(max_size=3000), max_size=40), st.integers(1024, 8192))
def test_within_the_limit_all_is_kept_and_past_it_head_and_tail(pieces: list[bytes], limit: int) -> None:
    kept, whole = Kept(limit), b"".join(pieces)
    for piece in pieces:
        kept.add(piece)
    value = kept.value()
    assert kept.total == len(whole)
    assert kept.truncated == (len(whole) > limit)
    if not kept.truncated:
        assert value == whole
        return
    assert len(value) <= limit
    head, mark, tail = split(value)
    assert whole.startswith(head)
    assert whole.endswith(tail)
    assert len(head) == limit // 2
    assert len(head) + len(tail) + int(mark) == len(whole)
    assert len(head) + len(tail) > limit - 128


def split(value: bytes) -> tuple[bytes, bytes, bytes]:
    """Head, number of missing bytes and tail."""
    at = value.rindex(b"\n[... ")
    head, rest = value[:at], value[at + 6 :]
    missing, _, tail = rest.partition(b" bytes left out ...]\n")
    return head, missing, tail


@given(st.lists(st.integers(1, 100_000), max_size=60), st.integers(1024, 4096))
def test_memory_is_bounded_whatever_comes(sizes: list[int], limit: int) -> None:
    kept = Kept(limit)
    for size in sizes:
        kept.add(bytes(size))
        assert len(kept._head) + sum(map(len, kept._tail)) + len(kept._small) <= 2 * limit + 2048


# Requests


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("cmd", {"cmd": ""}),
        ("cmd", {"cmd": []}),
        ("cmd", {"cmd": "a\0b"}),
        ("cmd", {"cmd": ["a", "b\0"]}),
        ("cmd", {"cmd": ["a", 5]}),
        ("cmd", {"cmd": ["a", b"b"]}),
        ("timeout", {"timeout": 0}),
        ("timeout", {"timeout": -1}),
        ("silence", {"silence": 0}),
        ("output_limit", {"output_limit": 10}),
        ("env", {"env": {"": "x"}}),
        ("env", {"env": {"A=B": "x"}}),
        ("env", {"env": {"A": "x\0"}}),
        ("env", {"env": {"A": 5}}),
        ("env", {"env": {5: "x"}}),
    ],
)
def test_a_wrong_request_names_the_field(field: str, arguments: dict[str, object]) -> None:
    request = CommandRequest(**{"cmd": "true", **arguments})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as caught:
        check(request)
    assert caught.value.field == field


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "5", True])
@pytest.mark.parametrize("field", ["timeout", "silence"])
def test_times_that_are_no_times(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(CommandRequest(cmd="true", **{field: value}))  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("env", ["A=B", 5, [("A", "B")]])
def test_an_environment_that_maps_nothing(env: object) -> None:
    with pytest.raises(InvalidRequest, match="env"):
        check_env(env)


# Clocks and ends


@pytest.mark.root
def test_a_timeout_ends_all_of_it_and_keeps_what_it_wrote(box: shoal.Sandbox) -> None:
    start = time.monotonic()
    result = box.commands.run("echo out; echo err >&2; setsid sleep 100 & sleep 100", timeout=0.5)
    assert time.monotonic() - start < 3
    assert (result.stdout, result.stderr) == ("out\n", "err\n")
    assert (result.exit_code, result.signal) == (None, 9)
    assert (result.limit, result.verdict) == ("timeout", "policy_timeout")
    assert box.commands.run("pgrep -c sleep").stdout == "0\n"


def test_silence_is_counted_from_the_last_output(box: shoal.Sandbox) -> None:
    talking = box.commands.run("for i in 1 2 3 4 5; do echo $i; sleep 0.3; done", silence=1)
    assert (talking.exit_code, talking.limit) == (0, None)
    start = time.monotonic()
    mute = box.commands.run("echo x; sleep 100", silence=0.5)
    assert time.monotonic() - start < 3
    assert (mute.stdout, mute.limit, mute.verdict) == ("x\n", "silence", "policy_timeout")


def test_one_that_ends_in_time_had_no_limit(box: shoal.Sandbox) -> None:
    result = box.commands.run("exit 7", timeout=30, silence=30)
    assert (result.exit_code, result.signal, result.limit, result.verdict) == (7, None, None, "ok")


def test_a_clock_that_strikes_at_the_end_does_not_turn_a_success_into_a_timeout(box: shoal.Sandbox) -> None:
    for _ in range(20):
        result = box.commands.run("sleep 0.1", timeout=0.103)
        assert (result.exit_code, result.limit) in ((0, None), (None, "timeout"))


def test_processor_time_and_memory_are_told(box: shoal.Sandbox) -> None:
    result = box.commands.run(["python3", "-c", "x = b'x' * (100 << 20)\nfor i in range(3000000): pass"])
    assert 0.02 < result.cpu_seconds < 10
    assert result.peak_memory > 100 << 20
    assert 0 < result.duration < 20
    assert box.commands.run("true").cpu_seconds < 0.2


def test_check(box: shoal.Sandbox) -> None:
    with pytest.raises(CommandFailed, match="exit code 3: because") as caught:
        box.commands.run("echo because >&2; exit 3", check=True)
    assert caught.value.result.exit_code == 3
    with pytest.raises(CommandFailed, match="signal 15"):
        box.commands.run("kill $$", check=True)


def test_output_limit(box: shoal.Sandbox) -> None:
    result = box.commands.run("seq 100000", output_limit="4KiB")
    assert (result.truncated, result.stdout_total) == (True, 588_895)
    assert len(result.stdout_bytes) <= 4096
    assert result.stdout.startswith("1\n2\n")
    assert result.stdout.endswith("99999\n100000\n")
    assert "bytes left out" in result.stdout


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("true", (0, 0, 0)),
        ("echo x > new", (1, 0, 0)),
        ("echo y >> old", (0, 1, 0)),
        ("echo after > old", (0, 1, 0)),
        ("rm old", (0, 0, 1)),
        ("rm /etc/issue", (0, 0, 1)),
        ("echo > /etc/motd", (1, 0, 0)),
        ("chmod 700 dir", (0, 1, 0)),
        ("mkdir -p dir/a; rmdir dir/a", (0, 0, 0)),
        ("echo x > new; echo y >> old; rm /etc/issue; echo back > /etc/hosts", (2, 1, 1)),
    ],
)
def test_changes_of_one_command(box: shoal.Sandbox, script: str, expected: tuple[int, int, int]) -> None:
    """Against what was there before it, not against the layers."""
    box.commands.run("echo before > old; mkdir dir; rm -f /etc/hosts /etc/motd", check=True)
    result = box.commands.run(script, changes=True)
    assert result.changes == dict(zip(("added", "changed", "removed"), expected, strict=True))
