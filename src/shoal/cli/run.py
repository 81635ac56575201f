"""`shoal run` and `shoal shell`: one command in a new sandbox, with this process's streams or its terminal."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.errors import InvalidRequest, ShoalError

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from shoal.node.interface import CommandRequest
    from shoal.sdk import AsyncCommand, AsyncSandbox
    from shoal.types import NetworkPolicy, Result

    NewBox = AbstractAsyncContextManager[AsyncSandbox]

Image = Annotated[str, typer.Option(help="The base to start from.")]
LayerKeys = Annotated[list[str] | None, typer.Option("--layer", help="A layer on top of it; may be repeated.")]
Workspace = Annotated[str | None, typer.Option(help="A layer that holds /workspace.")]
ProfileName = Annotated[str, typer.Option(help="small, basic or large.")]
Network = Annotated[str | None, typer.Option(help="allow=HOST,HOST or pypi; left out: no network.")]
TierName = Annotated[str, typer.Option(help="namespace; or fake, which isolates nothing.")]
Python = Annotated[str | None, typer.Option(help="An interpreter of this machine, as 3.11.")]
User = Annotated[str, typer.Option(help="By name or number.")]
Seconds = Annotated[float | None, typer.Option(min=0.001, help="Seconds until all of it is killed.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]


def run(
    command: Annotated[list[str], typer.Argument(help="The program and its arguments, after --.", metavar="CMD ...")],
    image: Image = "host",
    layer: LayerKeys = None,
    workspace: Workspace = None,
    profile: ProfileName = "basic",
    network: Network = None,
    tier: TierName = "namespace",
    python: Python = None,
    user: User = "root",
    timeout: Seconds = None,
    json: Json = False,
) -> None:
    """Run a command in a fresh sandbox, as if it ran here: its streams, its Ctrl-C, its exit code."""
    import uvloop

    box = new_box(image, layer, workspace, profile, network, tier, python, user)
    code = uvloop.run(_run(box, command, timeout, as_json=json))
    raise typer.Exit(code)


def shell(
    image: Image = "host",
    layer: LayerKeys = None,
    workspace: Workspace = None,
    profile: ProfileName = "basic",
    network: Network = None,
    tier: TierName = "namespace",
    python: Python = None,
    user: User = "root",
) -> None:
    """An interactive terminal in a fresh sandbox."""
    import uvloop

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidRequest("shell", "needs a terminal; use `shoal run -- sh -c '...'`")
    box = new_box(image, layer, workspace, profile, network, tier, python, user)
    raise typer.Exit(uvloop.run(_shell(box)))


@asynccontextmanager
async def new_box(
    image: str,
    layers: list[str] | None,
    workspace: str | None,
    profile: str,
    network: str | None,
    tier: str,
    python: str | None,
    user: str,
) -> AsyncIterator[AsyncSandbox]:
    from shoal.sdk import AsyncSandbox

    keys = [*(layers or ()), *([f"python:{python}"] if python else [])]
    box = await AsyncSandbox.create(
        image=image,
        layers=keys,
        workspace=workspace,
        profile=profile,
        network=parse_network(network),
        tier=tier,
        user=user,
        ttl=None,
    )
    async with box:
        yield box


def parse_network(text: str | None) -> str | NetworkPolicy | None:
    """The value of --network: a preset, or allow=HOST,HOST."""
    from shoal.types import NetworkPolicy

    if text in (None, "pypi", "open"):
        return text
    if not text.startswith("allow="):
        raise InvalidRequest("network", f"takes pypi or allow=HOST,HOST, not {text!r}")
    hosts = tuple(filter(None, text.removeprefix("allow=").split(",")))
    if not hosts:
        raise InvalidRequest("network", "allow= names no host")
    return NetworkPolicy(allow=hosts)


def shell_code(result: Result) -> int:
    """The exit code that a shell would show."""
    return result.exit_code if result.exit_code is not None else 128 + (result.signal or 0)


# Running with our streams


async def _run(new: NewBox, command: list[str], timeout: float | None, *, as_json: bool) -> int:
    from shoal.node.interface import CommandRequest

    async with new as box:
        request = CommandRequest(cmd=command, timeout=timeout, feed=True, hold=True)
        running = await box.commands.start(request)
        _forward_signals(running)
        _feed_stdin(running)
        if not as_json:
            await _copy_output(running)
        result = await running.wait()
    if as_json:
        _print_json(result)
    elif result.limit:
        print(f"shoal: the command was at its limit: {result.limit}", file=sys.stderr)
    return shell_code(result)


def _print_json(result: Result) -> None:
    import msgspec

    document = msgspec.to_builtins(result)
    for stream in ("stdout", "stderr"):
        del document[f"{stream}_bytes"]
        document[stream] = getattr(result, stream)
    sys.stdout.write(msgspec.json.encode(document).decode() + "\n")


def _forward_signals(running: AsyncCommand) -> None:
    """Ctrl-C and termination reach the command as they would here; at the third it is killed."""
    seen = 0

    async def forward(number: int) -> None:
        nonlocal seen
        seen += 1
        await running.kill(number if seen < 3 else signal.SIGKILL)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        _on_signal(number, forward)


def _on_signal(number: int, react: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    """Calls `react` for each signal of that number. It may fail because the command has ended."""
    loop = asyncio.get_running_loop()
    tasks = set()

    async def attempt() -> None:
        with suppress(ShoalError):
            await react(number)

    def start() -> None:
        task = loop.create_task(attempt())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_signal_handler(number, start)


def _feed_stdin(running: AsyncCommand) -> None:
    """From a thread that may block for ever in read and is left behind at the end."""
    loop = asyncio.get_running_loop()

    def call(work: Coroutine[Any, Any, None]) -> None:
        try:
            asyncio.run_coroutine_threadsafe(work, loop).result()
        finally:
            work.close()  # if the loop has ended it never began

    def feed() -> None:
        with suppress(ShoalError, RuntimeError, CancelledError):  # the command, or the loop, has ended
            with suppress(OSError):  # our stdin cannot be read
                while data := os.read(0, 65536):
                    call(running.send_stdin(data))
            call(running.close_stdin())

    threading.Thread(target=feed, daemon=True).start()


async def _copy_output(running: AsyncCommand) -> None:
    async for piece in running:
        stream = sys.stdout.buffer if piece.stream == 1 else sys.stderr.buffer
        stream.write(piece.data)
        stream.flush()


# Running on our terminal


async def _shell(new: NewBox) -> int:
    async with new as box:
        running = await box.commands.start(_shell_request())
        with _raw_terminal():
            _follow_size(running)
            _hang_up(running)
            _feed_stdin(running)
            await _copy_output(running)
        return shell_code(await running.wait())


def _shell_request() -> CommandRequest:
    from shoal.node.interface import CommandRequest
    from shoal.sdk.shells import LOGIN_SHELL

    size = shutil.get_terminal_size()
    return CommandRequest(cmd=LOGIN_SHELL, terminal=(size.columns, size.lines), feed=True, hold=True)


@contextmanager
def _raw_terminal() -> Iterator[None]:
    before = termios.tcgetattr(0)
    tty.setraw(0)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def _follow_size(running: AsyncCommand) -> None:
    async def resize(_: int) -> None:
        size = os.get_terminal_size(0)
        await running.resize(size.columns, size.lines)

    _on_signal(signal.SIGWINCH, resize)


def _hang_up(running: AsyncCommand) -> None:
    """What would end us ends the shell instead, so that the terminal is restored."""

    async def hang_up(_: int) -> None:
        await running.kill(signal.SIGHUP)
        await asyncio.sleep(1)  # bash may look at it only when the next key is hit
        await running.kill(signal.SIGKILL)

    for number in (signal.SIGTERM, signal.SIGHUP):
        _on_signal(number, hang_up)
