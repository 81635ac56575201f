"""Sessions: what stays, what a command may do to its shell, and what its result is then."""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
import time
from collections.abc import Iterator

import pytest

import shoal
from shoal.types import MiB, Profile


@pytest.fixture
def shell(box: shoal.Sandbox) -> Iterator[shoal.Shell]:
    """A session in a fresh sandbox."""
    with box.shell() as session:
        yield session


def outcome(result: shoal.Result) -> tuple[int | None, str, str]:
    return result.exit_code, result.stdout, result.stderr


# What stays


def test_directory_variables_functions_aliases_and_options_stay(shell: shoal.Shell) -> None:
    shell.run("cd /tmp; x=5; export Y=6; f() { echo f$1; }; alias ll='echo LL'; set -f; declare -A m=([a]=1)")
    assert outcome(shell.run("pwd; echo $x ${m[a]}; f 1; ll; sh -c 'echo $Y'; echo *")) == (
        0, "/tmp\n5 1\nf1\nLL\n6\n*\n", "",
    )  # fmt: skip


def test_the_status_of_the_last_command_and_open_files_stay(shell: shoal.Shell) -> None:
    for code in (0, 1, 3, 255):
        assert shell.run(f"(exit {code})").exit_code == code
        assert shell.run("echo $?").stdout == f"{code}\n"
    shell.run("exec 3>log 5>&1; exec 2>errors")
    assert shell.run("echo to3 >&3; echo to5 >&5; echo to2 >&2; cat log errors").stdout == "to5\nto3\nto2\n"


def test_background_jobs_stay(shell: shoal.Shell) -> None:
    assert shell.run("sleep 30 & sleep 30 &").exit_code == 0
    assert shell.run("jobs -p | wc -l; kill %1 %2; wait %1; echo $?").stdout == "2\n143\n"


def test_two_sessions_know_nothing_of_each_other(box: shoal.Sandbox) -> None:
    with box.shell() as one, box.shell() as two:
        one.run("x=1; cd /tmp")
        assert two.run("echo [$x]; pwd").stdout == "[]\n/workspace\n"
        assert one.id != two.id


@pytest.mark.root
def test_another_user(box: shoal.Sandbox) -> None:
    with box.shell(env={"A": "b c"}, cwd="/tmp", user="user") as shell:
        assert shell.run("id -un; pwd; echo $A $HOME; id -Gn").stdout == "user\n/tmp\nb c /home/user\nuser\n"


def test_environment_and_directory(box: shoal.Sandbox) -> None:
    with box.shell(env={"A": "b c"}, cwd="/tmp") as shell:
        assert shell.run("pwd; echo $A $HOME").stdout == "/tmp\nb c /root\n"
    with pytest.raises(shoal.NotFound, match="cwd"):
        box.shell(cwd="/nowhere")
    with pytest.raises(shoal.InvalidRequest, match="user"):
        box.shell(user="nobody-of-that-name")


def test_a_startup_file_of_bash_is_read_and_its_programs_get_no_socket(box: shoal.Sandbox) -> None:
    box.files.write("/tmp/start", "fromstart=1\nreadlink /proc/self/fd/0 > /tmp/stdin\n")
    with box.shell(env={"BASH_ENV": "/tmp/start"}) as shell:
        assert shell.run("echo $fromstart $BASH_ENV; cat /tmp/stdin").stdout == "1 /tmp/start\n/dev/null\n"


# Awkward text

AWKWARD = [
    ("cat <<EOF\nhi\nEOF", 0, "hi\n"),
    ("cat <<'EOF'\n$x \\\nEOF", 0, "$x \\\n"),
    ("echo x # comment", 0, "x\n"),
    ("echo 'open", 2, ""),
    ('echo "open', 2, ""),
    ("echo $(open", 2, ""),
    ("if true; then echo x", 2, ""),
    ("}", 2, ""),
    ("echo x \\", 0, "x \\\n"),
    ("sleep 0 &", 0, ""),
    ("", 0, ""),
    ("\n\n", 0, ""),
    ("# only", 0, ""),
    ("echo a\necho b\n(exit 4)", 4, "a\nb\n"),
    ("nosuchcommand", 127, ""),
    ("cat; read x; echo $?", 0, "1\n"),
    ("break; continue; echo on", 0, "on\n"),
    ("return 7", 7, ""),
    ("exec 2>/dev/null; nosuch; echo x", 0, "x\n"),
    ("(exit 9)", 9, ""),
    ("kill -9 $BASHPID & wait $!", 137, ""),
    ("unset BASH_VERSION HOME PATH; echo x", 0, "x\n"),
    ("IFS=0123456789; echo x", 0, "x\n"),
    ("set -u; echo ${x-no}; set +u", 0, "no\n"),
    ("set -- a b; echo $2", 0, "b\n"),
    ("shopt -s extglob nullglob failglob; set -C; echo x", 0, "x\n"),
    ("printf 'a\\377\\376\\0b'", 0, "a\ufffd\ufffd\0b"),
]


@pytest.mark.parametrize(("text", "code", "out"), AWKWARD)
def test_t08_awkward_text(shell: shoal.Shell, text: str, code: int, out: str) -> None:
    start = time.monotonic()
    result = shell.run(text, timeout=10)
    assert (result.exit_code, result.stdout, result.limit) == (code, out, None)
    assert outcome(shell.run("echo ok")) == (0, "ok\n", "")
    assert time.monotonic() - start < 4
    assert not shell.closed


BROKEN = "'\"`$(){}<>|&;\\ \nx#E*!"


@pytest.mark.parametrize("seed", range(4))
def test_broken_text_never_takes_ours_with_it(box: shoal.Sandbox, seed: int) -> None:
    """Whatever it means to bash, it has an end of its own, and the next command is whole."""
    luck = random.Random(seed)
    shell = box.shell(cwd="/tmp")
    for _ in range(100):
        text = ": " + "".join(luck.choice(BROKEN) for _ in range(luck.randrange(13)))
        result = shell.run(text, timeout=20)
        assert result.limit is None, text
        if shell.closed:  # an expansion that is none ends a bash that is not interactive
            shell = box.shell(cwd="/tmp")
        after = shell.run("exec 2>&1; echo ok", timeout=20)
        # A job of the broken text may only now have come to say what it does not find.
        assert (after.exit_code, "ok" in after.stdout.splitlines()) == (0, True), (text, after.stdout)
    shell.close()


def test_t08_all_of_it_in_one_session(shell: shoal.Shell) -> None:
    for text, code, out in (
        ("cat <<EOF\nhi\nEOF", 0, "hi\n"),
        ("echo x # comment", 0, "x\n"),
        ("echo 'open", 2, ""),
        ("echo x \\", 0, "x \\\n"),
        ("sleep 0.1 &", 0, ""),
    ):
        result = shell.run(text, timeout=2)
        assert (result.exit_code, result.stdout) == (code, out)
        assert ("unexpected EOF" in result.stderr) == (code == 2)
    assert outcome(shell.run("echo ok")) == (0, "ok\n", "")


def test_t09_strict_mode(shell: shoal.Shell) -> None:
    assert shell.run("set -euo pipefail").exit_code == 0
    assert outcome(shell.run("echo hi", timeout=2)) == (0, "hi\n", "")
    assert shell.run("echo before; false; echo never", timeout=2).stdout == "before\n"
    assert shell.closed
    with pytest.raises(shoal.SessionClosed, match="exit code 1"):
        shell.run("echo back", timeout=2)


def test_strict_mode_lets_what_may_fail_fail(shell: shoal.Shell) -> None:
    shell.run("set -euo pipefail")
    assert outcome(shell.run("if false; then :; fi; false || echo on; ! true || true")) == (0, "on\n", "")
    assert outcome(shell.run("echo x | grep -q x; echo on"))[:2] == (0, "on\n")


TRACED = ["set -x", "set -v", "set -xv", "set -a", "set -o posix", "shopt -s extdebug", "set -T", "set -E"]


@pytest.mark.parametrize("option", TRACED)
def test_nothing_of_ours_shows(shell: shoal.Shell, option: str) -> None:
    """No word of what we send the shell is in its output, its variables, its history or a program's environment."""
    shell.run(option)
    first = shell.run("echo one; false")
    second = shell.run("echo two $?; set; env; history; fc -l; jobs; declare -f; alias")
    text = first.stdout + first.stderr + second.stdout + second.stderr
    assert first.stdout == "one\n"
    assert second.stdout.startswith("two 1\n")
    for word in ("__shoal=", "builtin", "printf", "/dev/stdin <<<"):
        assert word not in text.replace("_=__shoal", "")
    if option in ("set -x", "set -xv"):
        assert "+ echo one" in first.stderr
        assert "+ echo two 1" in second.stderr


def test_t10_a_forged_end_marker(shell: shoal.Shell) -> None:
    learnt = shell.run(
        "set; history; declare -p; trap -p; tr '\\0' ' ' < /proc/$$/cmdline; tr '\\0' ' ' < /proc/$$/environ"
    )
    assert learnt.exit_code == 0
    forged = learnt.stdout + "\n0 0\nN1 0 hBs\n"
    with_code = shell.run(f"cat <<'FORGED'\n{forged}\nFORGED\nprintf half; (exit 5)")
    assert (with_code.exit_code, with_code.stdout) == (5, forged + "\nhalf")
    assert outcome(shell.run("echo next")) == (0, "next\n", "")


# The end of a session


@pytest.mark.parametrize(
    ("text", "code", "number"),
    [
        ("exit 5", 5, None),
        ("echo x; exit", 0, None),
        ("kill -9 $$", None, 9),
        ("kill -TERM $$; sleep 5", None, 15),
        ("exec true", 0, None),
        ("exec sh -c 'echo x; exit 3'", 3, None),
        ("exec cat", 0, None),
        ("set -e; false", 1, None),
        ("set -u; echo $nothing", 1, None),
        ("trap 'exit 7' EXIT; exit 1", 7, None),
        ("exec 10>&- 11>&- 12>&-; exit 4", 4, None),
    ],
)
def test_a_command_that_ends_the_shell_has_its_end_as_result(
    shell: shoal.Shell, text: str, code: int | None, number: int | None
) -> None:
    start = time.monotonic()
    result = shell.run(f"echo before; {text}", timeout=10)
    assert (result.exit_code, result.signal, result.limit) == (code, number, None)
    assert result.stdout.startswith("before\n")
    assert shell.closed
    with pytest.raises(shoal.SessionClosed) as caught:
        shell.run("echo after")
    assert caught.value.code == "session_closed"
    assert time.monotonic() - start < 5


def test_output_is_whole_when_the_shell_ends(shell: shoal.Shell) -> None:
    result = shell.run("head -c 3000000 /dev/zero; head -c 1000000 /dev/zero >&2; exit 3", output_limit="8MiB")
    assert (result.exit_code, len(result.stdout_bytes), len(result.stderr_bytes)) == (3, 3_000_000, 1_000_000)


def test_a_shell_that_dies_between_commands(shell: shoal.Shell) -> None:
    shell.run("(sleep 0.3; kill -9 $$) &")
    time.sleep(1)
    with pytest.raises(shoal.SessionClosed, match="signal 9"):
        shell.run("echo never")
    assert shell.closed


@pytest.mark.root
def test_close_ends_all_of_it(box: shoal.Sandbox) -> None:
    shell = box.shell()
    shell.run("sleep 61 & disown; (sleep 62 &)")
    shell.close()
    shell.close()
    assert shell.closed
    assert box.commands.run("pgrep -x sleep").stdout == ""
    with pytest.raises(shoal.SessionClosed, match="it was closed"):
        shell.run("true")


def test_a_session_ends_with_its_sandbox() -> None:
    box = shoal.Sandbox.create()
    shell = box.shell()
    threading.Timer(0.5, box.kill).start()
    with pytest.raises(shoal.SandboxGone):
        shell.run("sleep 30")
    with pytest.raises(shoal.SandboxGone):
        shell.run("true")


# Limits

HANGING = [
    "sleep 60; echo never\necho neither",
    "f() { g() { sleep 60; echo 1; }; g; echo 2; }; f; echo 3\necho 4",
    "while :; do :; done",
    "f() { while :; do sleep 0.01; done; }; f; echo never",
    "sleep 60 & wait; echo never",
    "y=$(sleep 60); echo never",
    "(trap '' TERM INT; sleep 60; echo never); echo never",
    "sleep 60 | cat; echo never",
    "read x < <(sleep 60); echo never",
    "set -e; f() { sleep 60; }; f; echo never",
    "eval 'eval \"sleep 60; echo never\"'; echo never",
    "trap 'echo int' INT TERM; trap '' HUP; sleep 60; echo never",
    "setsid sh -c 'trap \"\" TERM; while :; do sleep 0.1; done'; echo never",
    "until false; do :; done; echo never",
]


@pytest.mark.root
@pytest.mark.parametrize("text", HANGING)
def test_a_timeout_ends_the_command_and_not_the_session(box: shoal.Sandbox, shell: shoal.Shell, text: str) -> None:
    shell.run("x=5; sleep 77 &")
    start = time.monotonic()
    result = shell.run(f"echo begun; {text}", timeout=1)
    assert (result.stdout, result.exit_code, result.signal) == ("begun\n", None, 9)
    assert (result.limit, result.verdict) == ("timeout", "policy_timeout")
    assert time.monotonic() - start < 4
    assert not shell.closed
    again = shell.run("echo $x; f() { echo in f; }; f; jobs -r | grep -c 'sleep 77'")
    assert (again.exit_code, again.stdout) == (0, "5\nin f\n1\n")
    assert box.commands.run("pgrep -fc 'sleep 60|while'").stdout in ("0\n", "1\n")  # the shell of this command


@pytest.mark.root
def test_a_shell_that_cannot_be_left_is_ended(shell: shoal.Shell) -> None:
    start = time.monotonic()
    result = shell.run("trap '' 64; while :; do :; done", timeout=0.5)
    assert (result.limit, result.signal) == ("timeout", 9)
    assert time.monotonic() - start < 6
    assert shell.closed
    with pytest.raises(shoal.SessionClosed, match="could not be left"):
        shell.run("true")


def test_silence(shell: shoal.Shell) -> None:
    talking = shell.run("for i in 1 2 3 4; do echo $i; sleep 0.3; done", silence=1)
    assert (talking.exit_code, talking.limit) == (0, None)
    quiet = shell.run("echo x; sleep 60", silence=0.7)
    assert (quiet.stdout, quiet.limit, quiet.verdict) == ("x\n", "silence", "policy_timeout")
    assert shell.run("echo on").stdout == "on\n"


def test_output_is_kept_within_the_limit_and_counted(shell: shoal.Shell) -> None:
    result = shell.run("seq 100000; echo err >&2", output_limit="4KiB")
    assert (result.truncated, result.stdout_total, result.stderr) == (True, 588_895, "err\n")
    assert len(result.stdout_bytes) <= 4096
    assert outcome(shell.run("echo next")) == (0, "next\n", "")


def test_check_and_wrong_arguments(shell: shoal.Shell) -> None:
    with pytest.raises(shoal.CommandFailed, match="exit code 3: because"):
        shell.run("echo because >&2; (exit 3)", check=True)
    for arguments, field in (
        ({"cmd": ["ls"]}, "cmd"),
        ({"cmd": "a\0b"}, "cmd"),
        ({"cmd": "true", "timeout": 0}, "timeout"),
        ({"cmd": "true", "silence": -1}, "silence"),
        ({"cmd": "true", "output_limit": 5}, "output_limit"),
    ):
        with pytest.raises(shoal.InvalidRequest) as caught:
            shell.run(**arguments)  # type: ignore[arg-type]
        assert caught.value.field == field


@pytest.mark.root
def test_what_it_used_is_told(shell: shoal.Shell) -> None:
    busy = shell.run("i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; sleep 0.2")
    assert 0.05 < busy.cpu_seconds < 20
    assert 0.2 < busy.duration < 20
    assert shell.run("true").cpu_seconds < 0.05


@pytest.mark.root
def test_running_out_of_memory_is_told() -> None:
    tight = Profile(cpu=2, memory=64 * MiB, disk=32 * MiB, processes=128)
    with shoal.Sandbox.create(profile=tight) as box, box.shell() as shell:
        hungry = "python3 -c 'x = bytearray(1 << 30); x[::4096] = b\"x\" * len(x[::4096])'"
        killed = shell.run(hungry, timeout=60)
        assert (killed.exit_code, killed.limit, killed.verdict) == (137, "memory", "policy_oom")
        assert killed.oom_kills >= 1
        after = shell.run("(exit 137)")
        assert (after.exit_code, after.limit, after.oom_kills) == (137, None, 0)


# Much, binary, at the same time


def test_huge_commands(shell: shoal.Shell) -> None:
    text = "y" * (2 << 20)
    result = shell.run(f"x='{text}'; echo ${{#x}}", timeout=60)
    assert outcome(result) == (0, f"{2 << 20}\n", "")
    many = "\n".join(f"a{number}={number}" for number in range(20_000)) + "\necho $a19999"
    assert outcome(shell.run(many, timeout=60)) == (0, "19999\n", "")
    shell.run("set -a")
    assert outcome(shell.run(f": {text}\nenv | wc -c", timeout=60))[0] == 0


def test_much_output_on_both_streams_is_whole(shell: shoal.Shell) -> None:
    script = "head -c 5000000 /dev/urandom | tee copy; head -c 2000000 /dev/urandom | tee copy2 >&2"
    result = shell.run(script, output_limit="8MiB")
    assert (result.stdout_total, result.stderr_total) == (5_000_000, 2_000_000)
    sums = shell.run("sha256sum < copy; sha256sum < copy2").stdout.split()
    found = [hashlib.sha256(data).hexdigest() for data in (result.stdout_bytes, result.stderr_bytes)]
    assert found == sums[::2]


def test_output_that_a_command_wrote_last_is_its_own(shell: shoal.Shell) -> None:
    for number in range(200):
        result = shell.run(f"printf %s {number}; printf %s e{number} >&2")
        assert outcome(result) == (0, str(number), f"e{number}")


def test_output_as_it_comes(shell: shoal.Shell) -> None:
    out: list[tuple[float, str]] = []
    err: list[str] = []
    result = shell.run(
        "echo a; sleep 0.5; echo b >&2; sleep 0.5; printf ☕; (exit 3)",
        on_stdout=lambda text: out.append((time.monotonic(), text)),
        on_stderr=err.append,
    )
    assert result.exit_code == 3
    assert [text for _, text in out] == ["a\n", "☕"]
    assert out[1][0] - out[0][0] > 0.5
    assert err == ["b\n"]
    got: list[int] = []
    result = shell.run("head -c 20000000 /dev/zero", on_stdout=lambda text: got.append(len(text)))
    assert (sum(got), result.stdout_total, result.truncated) == (20_000_000, 20_000_000, True)
    assert shell.run("echo on").stdout == "on\n"


def test_a_callback_that_fails_ends_its_command(shell: shoal.Shell) -> None:
    def refuse(_: str) -> None:
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        shell.run("yes", on_stdout=refuse)
    assert shell.run("echo on", timeout=10).stdout == "on\n"


def test_background_output_belongs_to_no_command(shell: shoal.Shell) -> None:
    shell.run("(sleep 0.4; echo late; echo lateerr >&2; sleep 0.4) & echo started")
    time.sleep(1)
    assert outcome(shell.run("echo mine")) == (0, "mine\n", "")
    between = shell.unclaimed()
    assert (between.stdout_bytes, between.stderr_bytes) == (b"late\n", b"lateerr\n")
    assert shell.unclaimed().stdout_total == 0


def test_a_job_that_talks_without_end_hinders_nothing(shell: shoal.Shell) -> None:
    shell.run("yes >&2 & echo $!")
    time.sleep(1)
    assert shell.run("echo mine", timeout=10).stdout == "mine\n"
    between = shell.unclaimed()
    assert between.stderr_total > len(between.stderr_bytes)
    assert len(between.stderr_bytes) <= 64 << 10
    assert shell.run("kill %1; echo on", timeout=10).stdout == "on\n"


def test_calls_at_the_same_time_take_turns(box: shoal.Sandbox) -> None:
    async def work() -> list[str]:
        sandbox = await shoal.AsyncSandbox.connect(box.id)
        async with await sandbox.shell() as shell:
            await shell.run("n=0")
            step = "m=$n; sleep 0.01; n=$((m+1)); echo $n"
            return [result.stdout for result in await asyncio.gather(*(shell.run(step) for _ in range(20)))]

    assert sorted(map(int, asyncio.run(work()))) == list(range(1, 21))


def test_who_gives_up_ends_the_command(box: shoal.Sandbox) -> None:
    async def work() -> str:
        sandbox = await shoal.AsyncSandbox.connect(box.id)
        async with await sandbox.shell() as shell:
            await shell.run("x=here")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(shell.run("sleep 60; echo never"), 0.5)
            return (await shell.run("echo $x", timeout=10)).stdout

    start = time.monotonic()
    assert asyncio.run(work()) == "here\n"
    assert time.monotonic() - start < 8


def test_many_commands(shell: shoal.Shell) -> None:
    start = time.monotonic()
    for _ in range(200):
        assert shell.run("i=$((i+1))").exit_code == 0
    assert shell.run("echo $i").stdout == "200\n"
    assert time.monotonic() - start < 20


# Where there is no bash


@pytest.fixture
def plain(box: shoal.Sandbox) -> Iterator[shoal.Shell]:
    box.commands.run(["rm", "/bin/bash"], check=True)
    with box.shell() as session:
        yield session


@pytest.mark.root
def test_without_bash_it_is_sh(plain: shoal.Shell) -> None:
    plain.run("cd /tmp; x=5; f() { echo f$1; }; alias ll='echo LL'; exec 3>log")
    assert outcome(plain.run("pwd; echo $x; f 1; ll; echo 3 >&3; cat log")) == (0, "/tmp\n5\nf1\nLL\n3\n", "")
    for text, code, out in (
        ("cat <<EOF\nhi\nEOF", 0, "hi\n"),
        ("echo x # comment", 0, "x\n"),
        ("echo 'open", 2, ""),
        ("f( ; (", 2, ""),
        ("sleep 0.1 &", 0, ""),
        ("(exit 3)", 3, ""),
        ("echo $?", 0, "3\n"),
        ("cat; readlink /proc/self/fd/0", 0, "/dev/null\n"),
        ("set -x; true", 0, ""),
    ):
        result = plain.run(text, timeout=5)
        assert (result.exit_code, result.stdout) == (code, out)
    assert "printf" not in plain.run("echo x; false").stderr
    assert plain.run("exit 4").exit_code == 4
    assert plain.closed


@pytest.mark.root
def test_without_bash_a_timeout_ends_the_session(plain: shoal.Shell) -> None:
    result = plain.run("echo x; sleep 60", timeout=0.5)
    assert (result.stdout, result.limit, result.signal) == ("x\n", "timeout", 9)
    assert plain.closed
    with pytest.raises(shoal.SessionClosed):
        plain.run("true")
