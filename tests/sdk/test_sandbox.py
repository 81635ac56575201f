"""Every verb of the public API, blocking and async."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.errors import CommandFailed, FileExists, InvalidRequest, NotFound, SandboxGone


def test_the_first_lines_of_the_readme() -> None:
    with shoal.Sandbox.create() as box:
        result = box.commands.run("echo hi")
        box.files.write("/workspace/a.txt", "x")
        assert (result.stdout, result.exit_code, result.ok, result.verdict) == ("hi\n", 0, True, "ok")
        assert box.files.read("/workspace/a.txt") == "x"
        assert isinstance(box.capabilities, frozenset)
    with pytest.raises(SandboxGone) as caught:
        box.commands.run("true")
    assert (caught.value.reason, caught.value.sandbox) == ("killed", box.id)
    box.kill()


def test_an_exception_in_the_block_ends_it_too() -> None:
    with pytest.raises(ZeroDivisionError), shoal.Sandbox.create() as box:
        1 / 0  # noqa: B018
    assert box.id not in {info.id for info in shoal.Sandbox.list()}


def test_connecting_gives_the_same_sandbox(box: shoal.Sandbox) -> None:
    box.files.write("x", "shared")
    again = shoal.Sandbox.connect(box.id)
    assert again.files.read("x") == "shared"
    again.kill()
    with pytest.raises(SandboxGone):
        shoal.Sandbox.connect(box.id)


# Commands


def test_text_goes_to_a_shell_and_a_list_does_not(box: shoal.Sandbox) -> None:
    assert box.commands.run("echo $((1 + 1)) | tr 2 3").stdout == "3\n"
    assert box.commands.run(["echo", "$((1 + 1)) | tr 2 3"]).stdout == "$((1 + 1)) | tr 2 3\n"
    assert box.commands.run(["printf", "%s|", "a b", "", "*"]).stdout == "a b||*|"


def test_ends(box: shoal.Sandbox) -> None:
    assert box.commands.run("exit 137").exit_code == 137
    killed = box.commands.run("kill -9 $$")
    assert (killed.exit_code, killed.signal, killed.ok) == (None, 9, False)
    with pytest.raises(NotFound, match="cmd"):
        box.commands.run(["no-such-program"])
    assert box.commands.run("no-such-program").exit_code == 127
    with pytest.raises(CommandFailed):
        box.commands.run("false", check=True)


def test_standard_input(box: shoal.Sandbox) -> None:
    assert box.commands.run("cat").stdout == ""
    assert box.commands.run("cat", stdin="text \u2615").stdout == "text \u2615"
    big = bytes(range(256)) * 20_000
    assert box.commands.run("cat", stdin=big, output_limit="16MiB").stdout_bytes == big
    assert box.commands.run("head -c 3", stdin=big).stdout_bytes == big[:3]
    with pytest.raises(InvalidRequest, match="stdin"):
        box.commands.run("cat", stdin=5)  # type: ignore[call-overload]


def test_output_as_it_comes(box: shoal.Sandbox) -> None:
    out: list[tuple[float, str]] = []
    err: list[str] = []
    start = time.monotonic()
    result = box.commands.run(
        "echo one; sleep 0.6; echo two; echo three >&2",
        on_stdout=lambda text: out.append((time.monotonic() - start, text)),
        on_stderr=err.append,
    )
    assert "".join(text for _, text in out) == result.stdout == "one\ntwo\n"
    assert "".join(err) == result.stderr == "three\n"
    assert out[0][0] < 0.5 < out[-1][0]


def test_a_character_that_comes_in_pieces_is_whole(box: shoal.Sandbox) -> None:
    pieces: list[str] = []
    script = "printf '\\342'; sleep 0.1; printf '\\230'; sleep 0.1; printf '\\225\\377'"
    box.commands.run(script, on_stdout=pieces.append)
    assert "".join(pieces) == "\u2615\ufffd"


def test_a_writer_that_raises_ends_the_command(box: shoal.Sandbox) -> None:
    def refuse(_: str) -> None:
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        box.commands.run("echo x; sleep 60", on_stdout=refuse)
    assert box.commands.run("pgrep -c sleep").stdout == "0\n"


def test_in_the_background(box: shoal.Sandbox) -> None:
    running = box.commands.run("read a; echo got $a; read b; echo got $b", background=True)
    assert running.pid > 1
    assert box.commands.run(f"cat /proc/{running.pid}/comm").stdout == "bash\n"
    running.send_stdin("one\n")
    pieces = iter(running)
    assert next(pieces).data == b"got one\n"
    running.send_stdin(b"two\n")
    running.close_stdin()
    assert b"".join(piece.data for piece in pieces) == b"got two\n"
    first = running.wait()
    assert (first.exit_code, first.stdout) == (0, "got one\ngot two\n")
    assert running.wait() is first


def test_waiting_for_one_in_the_background_that_writes_more_than_a_pipe_holds(box: shoal.Sandbox) -> None:
    running = box.commands.run("head -c 5000000 /dev/zero; exit 3", background=True)
    result = running.wait()
    assert (result.exit_code, result.stdout_total) == (3, 5_000_000)
    with pytest.raises(CommandFailed):
        running.wait(check=True)


def test_signals(box: shoal.Sandbox) -> None:
    """To the process group, so the shell's `sleep` is hit too and the shell says so."""
    running = box.commands.run("trap 'echo usr1' USR1; echo ready; while :; do sleep 0.05; done", background=True)
    pieces = (piece.data for piece in running if piece.stream == 1)
    assert next(pieces) == b"ready\n"
    running.kill(10)
    assert next(pieces) == b"usr1\n"
    for signal in (0, 65, -9):
        with pytest.raises(InvalidRequest, match="signal"):
            running.kill(signal)
    running.kill()
    assert running.wait().signal == 9


def test_a_program_that_ignores_sigpipe_is_not_what_commands_get(box: shoal.Sandbox) -> None:
    """Python ignores SIGPIPE, and what it starts would too."""
    assert box.commands.run("yes | head -1; echo ${PIPESTATUS[0]}").stdout == "y\n141\n"


# Files


def test_files(box: shoal.Sandbox) -> None:
    files = box.files
    files.write("deep/down/f", "text \u2615")
    assert files.read("/workspace/deep/down/f") == "text \u2615"
    assert files.read("deep/down/f", format="bytes") == "text \u2615".encode()
    assert b"".join(files.read("deep/down/f", format="stream")) == "text \u2615".encode()
    files.append("deep/down/f", "+")
    files.append("fresh", b"\xff")
    assert files.read("deep/down/f").endswith("+")
    assert files.read("fresh") == "\ufffd"
    files.write_many({"m/1": "1", "m/2": b"2"})
    assert [info.name for info in files.list("m")] == ["1", "2"]
    files.rename("m/1", "m/3")
    assert not files.exists("m/1")
    files.make_dir("a/b/c", mode=0o700)
    files.make_dir("a/b/c")
    assert files.stat("a/b/c").kind == "directory"
    files.remove("a")
    files.remove("m/3")
    assert [info.name for info in files.list()] == ["deep", "fresh", "m"]
    with pytest.raises(NotFound):
        files.remove("a")
    with pytest.raises(FileExists):
        files.write("deep", "x")
    with pytest.raises(InvalidRequest, match="format"):
        files.read("fresh", format="json")  # type: ignore[call-overload]
    with pytest.raises(InvalidRequest, match="data"):
        files.write("x", 5)  # type: ignore[arg-type]


@pytest.mark.root
def test_a_mode_and_a_user(box: shoal.Sandbox) -> None:
    box.files.write("/tmp/f", "#!/bin/sh\necho run", mode=0o755, user="user")
    assert box.commands.run("/tmp/f; stat -c %u:%a /tmp/f").stdout == "run\n1000:755\n"


def test_a_stream_that_is_not_read_to_its_end_is_let_go(box: shoal.Sandbox) -> None:
    box.commands.run("truncate -s 1G big")
    for _ in range(5):
        stream = box.files.read("big", format="stream")
        assert len(next(stream)) > 0
        stream.close()  # type: ignore[attr-defined]
    assert box.commands.run("true").ok


def test_reading_while_writing_sees_one_or_the_other(box: shoal.Sandbox) -> None:
    box.files.write("f", "a" * 100_000)
    running = box.commands.run("while cat f | tr -d ab | grep -q .; do :; done; echo", background=True)
    for letter in "ba" * 10:
        box.files.write("f", letter * 100_000)
        assert set(box.files.read("f")) == {letter}
    running.kill()


# The async half

Async = Callable[[shoal.AsyncSandbox], Awaitable[Any]]


def in_async(use: Async) -> Any:
    async def main() -> Any:
        async with await shoal.AsyncSandbox.create() as box:
            return await use(box)

    return asyncio.run(main())


def test_async_commands() -> None:
    async def use(box: shoal.AsyncSandbox) -> None:
        assert (await box.commands.run("echo hi")).stdout == "hi\n"
        pieces: list[str] = []
        await box.commands.run("echo x", on_stdout=pieces.append)
        assert pieces == ["x\n"]
        running = await box.commands.run("cat", background=True)
        await running.send_stdin("abc")
        await running.close_stdin()
        assert b"".join([piece.data async for piece in running]) == b"abc"
        assert (await running.wait()).exit_code == 0
        sleeping = await box.commands.run("sleep 60", background=True)
        await sleeping.kill()
        assert (await sleeping.wait()).signal == 9

    in_async(use)


def test_async_files(tmp_path: Path) -> None:
    async def use(box: shoal.AsyncSandbox) -> None:
        files = box.files
        await files.write_many({"d/a": "1", "d/b": b"2"})
        await files.append("d/a", "+")
        stream = await files.read("d/a", format="stream")
        assert b"".join([piece async for piece in stream]) == b"1+"
        assert await files.read("d/b", format="bytes") == b"2"
        await files.rename("d/b", "d/c")
        await files.make_dir("d/e")
        assert [info.name for info in await files.list("d")] == ["a", "c", "e"]
        assert (await files.stat("d/a")).size == 2
        assert not await files.exists("d/b")
        await files.download("d", tmp_path / "d")
        await files.upload(tmp_path / "d", "again")
        assert await files.read("again/a") == "1+"
        await files.remove("d")
        assert {change.path for change in await box.changes()} >= {"/workspace/again/a"}

    in_async(use)


def test_async_sandboxes() -> None:
    async def use(box: shoal.AsyncSandbox) -> None:
        assert (await box.info()).id == box.id
        assert (await (await shoal.AsyncSandbox.connect(box.id)).commands.run("true")).ok
        other = await shoal.AsyncSandbox.create(metadata={"test": "async"})
        assert [info.id for info in await shoal.AsyncSandbox.list({"test": "async"})] == [other.id]
        assert await shoal.AsyncSandbox.kill_all({"test": "async"}) == 1
        await other.kill()

    in_async(use)


def test_both_halves_see_the_same_sandboxes(box: shoal.Sandbox) -> None:
    async def main() -> str:
        same = await shoal.AsyncSandbox.connect(box.id)
        return (await same.commands.run("echo both")).stdout

    assert asyncio.run(main()) == "both\n"


def test_a_cancelled_call_kills_what_it_ran() -> None:
    async def use(box: shoal.AsyncSandbox) -> None:
        task = asyncio.create_task(box.commands.run("setsid sleep 60 & sleep 60"))
        await asyncio.sleep(0.4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(50):
            if (await box.commands.run("pgrep -c sleep")).stdout == "0\n":
                return
            await asyncio.sleep(0.1)
        pytest.fail("it goes on")

    in_async(use)


def test_a_create_that_is_cancelled_leaves_no_sandbox() -> None:
    async def main() -> None:
        for delay in [number / 2000 for number in range(24)]:
            task = asyncio.create_task(shoal.AsyncSandbox.create(metadata={"test": "cancelled"}))
            await asyncio.sleep(delay)
            task.cancel()
            (made,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(made, shoal.AsyncSandbox):  # it was ready before it was cancelled
                await made.kill()
        await asyncio.sleep(0.3)
        left = await shoal.AsyncSandbox.list({"test": "cancelled"})
        assert left == []

    asyncio.run(main())


def test_a_start_that_is_cancelled_leaves_no_command() -> None:
    async def use(box: shoal.AsyncSandbox) -> None:
        for delay in [number / 5000 for number in range(24)]:
            task = asyncio.create_task(box.commands.run(["sleep", "60"], background=True))
            await asyncio.sleep(delay)
            if task.cancel():
                await asyncio.gather(task, return_exceptions=True)
            else:
                await (await task).kill()
        for _ in range(50):
            if (await box.commands.run("pgrep -c sleep")).stdout == "0\n":
                return
            await asyncio.sleep(0.1)
        pytest.fail("one goes on")

    in_async(use)


def test_many_at_once() -> None:
    async def one(number: int) -> str:
        async with await shoal.AsyncSandbox.create() as box:
            return (await box.commands.run(["echo", str(number)])).stdout

    async def main() -> list[str]:
        return await asyncio.gather(*map(one, range(24)))

    assert asyncio.run(main()) == [f"{number}\n" for number in range(24)]
