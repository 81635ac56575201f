"""Background commands: found again by their id, read from any place, ended and fed from any handle."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import shoal
from shoal.node import retained
from shoal.types import MiB


def read(handle: shoal.Command) -> bytes:
    """What is left of its output."""
    return b"".join(piece.data for piece in handle)


def wait_until_written(box: shoal.Sandbox, id: int, count: int) -> shoal.CommandInfo:
    """Its entry in the list, when it has written so much."""
    end = time.monotonic() + 20
    while (found := next(info for info in box.commands.list() if info.id == id)).written < count:
        assert time.monotonic() < end, found
        time.sleep(0.02)
    return found


def test_list_names_what_runs_and_what_has_ended(box: shoal.Sandbox) -> None:
    assert box.commands.list() == []
    box.commands.run("true")
    box.commands.run("true", on_stdout=print)
    one = box.commands.run("echo out; echo err >&2; cat", background=True)
    two = box.commands.run(["sleep", "60"], background=True)
    first = wait_until_written(box, one.id, 8)
    second = box.commands.list()[1]
    assert (first.id, first.pid, first.cmd, first.running) == (one.id, one.pid, ("echo out; echo err >&2; cat",), True)
    assert (second.id, second.pid, second.cmd, second.written) == (two.id, two.pid, ("sleep", "60"), 0)
    assert abs(first.started - time.time()) < 20
    one.close_stdin()
    one.wait()
    two.kill()
    two.wait()
    assert [(info.id, info.running) for info in box.commands.list()] == [(one.id, False), (two.id, False)]


def test_connect_from_another_handle_and_thread(box: shoal.Sandbox) -> None:
    handle = box.commands.run("read a; echo got $a; read b; echo got $b; exit 3", background=True)

    def elsewhere() -> tuple[int, bytes, int | None]:
        other = shoal.Sandbox.connect(box.id).commands.connect(handle.id)
        other.send_stdin("one\n")
        other.send_stdin("two\n")
        other.close_stdin()
        return other.pid, read(other), other.wait().exit_code

    with ThreadPoolExecutor() as pool:
        assert pool.submit(elsewhere).result(20) == (handle.pid, b"got one\ngot two\n", 3)
    assert read(handle) == b"got one\ngot two\n"
    assert handle.wait().stdout == "got one\ngot two\n"


def test_connect_names_what_is_not_there(box: shoal.Sandbox) -> None:
    with pytest.raises(shoal.NotFound, match="no command 4711"):
        box.commands.connect(4711)
    handle = box.commands.run("echo abc", background=True)
    handle.wait()
    for offset in (-1, 5, 1 << 40):
        with pytest.raises(shoal.InvalidRequest, match="offset"):
            read(box.commands.connect(handle.id, offset))
    assert read(box.commands.connect(handle.id, 4)) == b""


def test_every_reader_has_a_place_of_its_own(box: shoal.Sandbox) -> None:
    script = "for i in $(seq 2000); do echo $i; done; echo last >&2"
    whole = b"".join(b"%d\n" % number for number in range(1, 2001)) + b"last\n"
    handle = box.commands.run(script, background=True)
    offsets = [0, 1, 100, 5000]
    with ThreadPoolExecutor() as pool:
        wait_until_written(box, handle.id, 5000)
        found = list(pool.map(lambda offset: read(box.commands.connect(handle.id, offset)), offsets))
    assert found == [whole[offset:] for offset in offsets]
    assert read(handle) == whole
    assert handle.offset == len(whole)


def test_reading_goes_on_where_it_was_left(box: shoal.Sandbox) -> None:
    handle = box.commands.run("printf abcdef; sleep 0.3; printf ghi >&2", background=True)
    for piece in handle:
        assert piece.data == b"abcdef"
        break
    again = box.commands.connect(handle.id, offset=handle.offset)
    assert [(piece.stream, piece.data) for piece in again] == [(2, b"ghi")]
    assert [(piece.stream, piece.data) for piece in box.commands.connect(handle.id, 4)] == [(1, b"ef"), (2, b"ghi")]


def test_a_late_wait_still_gets_the_result(box: shoal.Sandbox) -> None:
    handle = box.commands.run("echo out; echo err >&2; exit 7", background=True)
    assert handle.wait().exit_code == 7
    time.sleep(0.2)
    late = box.commands.connect(handle.id)
    result = late.wait()
    assert (result.exit_code, result.stdout, result.stderr) == (7, "out\n", "err\n")
    late.kill()
    late.send_stdin("lost")
    late.close_stdin()


def test_without_a_reader_nothing_hangs_and_what_fell_out_is_said(box: shoal.Sandbox) -> None:
    """20 MB that nobody reads: the command ends; what is left is the end of it, and asking for more is an error."""
    handle = box.commands.run("head -c 20000000 /dev/zero; printf end", background=True)
    result = handle.wait()  # who waits does not read
    assert (result.exit_code, result.stdout_total, result.truncated) == (0, 20_000_003, True)
    assert result.stdout.endswith("end")
    with pytest.raises(shoal.OutputLost) as caught:
        read(handle)
    assert caught.value.offset == 0
    available = caught.value.available
    assert 20_000_003 - available <= retained.KEEP
    kept = read(box.commands.connect(handle.id, available))
    assert len(kept) == 20_000_003 - available
    assert kept.endswith(b"\0end")
    assert box.commands.list()[0].available == available


def test_a_reader_that_goes_away_is_not_waited_for(box: shoal.Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retained, "PATIENCE", 1.0)
    handle = box.commands.run("head -c 20000000 /dev/zero; echo done > finished", background=True)
    first = next(iter(handle))
    assert first.data
    start = time.monotonic()
    while not box.files.exists("finished"):
        assert time.monotonic() - start < 20
        time.sleep(0.1)
    assert time.monotonic() - start > 0.3  # it was waited for
    with pytest.raises(shoal.OutputLost):
        read(handle)


def test_a_slow_reader_loses_nothing(box: shoal.Sandbox) -> None:
    """The command stands still meanwhile, and the node holds no more than its windows."""
    handle = box.commands.run("head -c 12000000 /dev/urandom | tee copy", background=True)
    wait_until_written(box, handle.id, MiB // 2)
    time.sleep(0.5)
    before = box.commands.list()[0].written
    assert before < 3 * MiB
    time.sleep(0.5)
    assert box.commands.list()[0].written == before
    data = read(handle)
    assert len(data) == 12_000_000
    assert data == box.files.read("copy", "bytes")


def test_a_reader_from_the_start_and_one_that_is_fast(box: shoal.Sandbox) -> None:
    handle = box.commands.run("seq 400000", background=True)
    other = box.commands.connect(handle.id)
    slow: list[bytes] = []

    def dawdle() -> None:
        for piece in other:
            slow.append(piece.data)
            time.sleep(0.01)

    thread = threading.Thread(target=dawdle)
    thread.start()
    fast = read(handle)
    thread.join()
    assert fast == b"".join(slow) == b"".join(b"%d\n" % number for number in range(1, 400_001))


def test_signals_and_ends_from_any_handle(box: shoal.Sandbox) -> None:
    handle = box.commands.run(
        "trap 'echo usr1; echo again' USR1; echo ready; while :; do sleep 0.05; done", background=True
    )
    other = box.commands.connect(handle.id)
    stream = iter(other)
    assert next(stream).data == b"ready\n"
    other.kill(10)
    seen = b""  # with the bash that says what ended its sleep
    while b"again\n" not in seen:
        seen += next(stream).data
    assert b"usr1\n" in seen
    other.kill()
    assert (handle.wait().signal, other.wait().signal) == (9, 9)


def test_fifty_at_once_and_waited_for_in_the_end(box: shoal.Sandbox) -> None:
    handles = [box.commands.run(f"echo {number}; exit {number}", background=True) for number in range(50)]
    time.sleep(0.5)
    assert [handle.wait().exit_code for handle in handles] == list(range(50))
    assert [read(handle) for handle in handles] == [b"%d\n" % number for number in range(50)]


def test_an_async_handle(box: shoal.Sandbox) -> None:
    async def work() -> tuple[list[bytes], int | None]:
        sandbox = await shoal.AsyncSandbox.connect(box.id)
        handle = await sandbox.commands.run("cat", background=True)
        other = await sandbox.commands.connect(handle.id)
        await other.send_stdin("x")
        await other.close_stdin()
        return [piece.data async for piece in handle], (await other.wait()).exit_code

    assert asyncio.run(work()) == ([b"x"], 0)


@pytest.mark.root
def test_without_bash_background_commands_and_streams_use_sh(box: shoal.Sandbox) -> None:
    box.commands.run(["rm", "/bin/bash"], check=True)
    assert read(box.commands.run("echo $0", background=True)) == b"/bin/sh\n"
    pieces: list[str] = []
    box.commands.run("echo $0", on_stdout=pieces.append)
    assert pieces == ["/bin/sh\n"]
    with pytest.raises(shoal.NotFound, match="cmd"):
        box.commands.run(["/no/such"], background=True)


@pytest.mark.root
def test_t19_the_same_environment_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """create, call, background, session, terminal and login shell; nothing of the node's own anywhere."""
    monkeypatch.setenv("SECRET_OF_THE_NODE", "zzz-secret-zzz")
    path = "/opt/x/bin:/usr/local/bin:/usr/bin:/bin"
    with shoal.Sandbox.create(env={"A": "1", "PATH": path}) as box:
        box.files.write("/opt/x/bin/tool", "#!/bin/sh\necho tool $A\n", mode=0o755)

        def everywhere(command: str, **more: dict[str, str]) -> list[str]:
            with box.shell(**more) as shell:
                session = shell.run(command).stdout
            terminal = box.pty.create(command, **more).wait().stdout.replace("\r", "")
            login = box.commands.run(["bash", "-lc", command], **more).stdout
            background = read(box.commands.run(command, background=True, **more)).decode()
            return [box.commands.run(command, **more).stdout, background, session, terminal, login]

        assert everywhere("tool; echo $HOME $USER") == ["tool 1\n/root root\n"] * 5
        assert everywhere("tool", env={"A": "2"}) == ["tool 2\n"] * 5
        assert everywhere("tool") == ["tool 1\n"] * 5
        look = "cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -c 'zzz-sec[r]et'"
        assert everywhere(look) == ["0\n"] * 5
        for user in ("user", "1000"):
            who = "id -un; id -gn; id -G; echo $HOME $A"
            with box.shell(user=user) as shell:
                in_session = shell.run(who).stdout
            on_terminal = box.pty.create(who, user=user).wait().stdout.replace("\r", "")
            assert in_session == on_terminal == box.commands.run(who, user=user).stdout
            assert in_session.startswith("user\nuser\n")
            assert in_session.endswith("/home/user 1\n")
