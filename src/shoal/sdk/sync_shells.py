"""The blocking SDK. Generated from shells.py by scripts/generate_sync.py; do not edit."""

from __future__ import annotations

import signal as signals
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

from shoal.errors import CommandFailed, InvalidRequest, SessionClosed
from shoal.node.interface import CommandRequest, Node, ShellCommand, ShellEnd
from shoal.sdk.embedded import call
from shoal.sdk.requests import plain_env
from shoal.sdk.streams import TextStreams, Writer, close_stream, next_piece
from shoal.sdk.sync_commands import Command, Commands
from shoal.types import Result, Unclaimed, parse_size

LOGIN_SHELL: Final = ("/bin/sh", "-c", "if [ -x /bin/bash ]; then exec /bin/bash -l; else exec /bin/sh -l; fi")
"""What runs on a terminal where nothing else is asked for."""
_SIZE_MAX: Final = 65535


class Shell:
    """A session: one shell in which commands run one after the other, each with a result of its own.

    Directory, variables, functions, aliases, options, `$?`, open descriptors and background jobs stay. stdin of a
    command is empty. What its own programs wrote before it ended is in its result, and so is what background jobs wrote
    meanwhile; what these write between commands is in `unclaimed()`. There is no job control (`fg`): see `box.pty`.

    The session ends (`closed`) when its shell does: by `exit`, by `exec` of a program, by a signal, by `set -e` and a
    command that does not end with 0. Whatever did it has the shell's code as its result; the next call raises
    SessionClosed.

    Descriptors 10 to 12 are the shell's own, and so are the name `__shoal` and the trap of signal 64. Without bash (or
    with one before 5.1) it is /bin/sh, and a timeout ends the session.
    """

    def __init__(self, node: Node, sandbox: str, id: int, pid: int) -> None:
        self.id = id
        self.pid = pid
        """Of the shell, inside the sandbox."""
        self.closed = False
        """Whether a command has ended the session."""
        self._node = node
        self._sandbox = sandbox

    def run(
        self,
        cmd: str,
        *,
        timeout: float | None = None,
        silence: float | None = None,
        on_stdout: Writer | None = None,
        on_stderr: Writer | None = None,
        check: bool = False,
        output_limit: int | str = "1MiB",
    ) -> Result:
        """Runs text in the shell and returns when it has ended; calls at the same time run one after the other.

        A `timeout` (seconds in all) or `silence` (seconds without output) kills what the command started and leaves the
        rest of its text undone; shell, variables and earlier jobs stay. A shell that can't be got out of it within two
        seconds is ended, and the session with it. The rest is as for `commands.run`; `peak_memory` is not known (0).
        """
        request = ShellCommand(
            cmd=cmd, timeout=timeout, silence=silence, output_limit=parse_size(output_limit, "output_limit")
        )
        try:
            if on_stdout is None and on_stderr is None:
                end = call(self._node.run_in_shell(self._sandbox, self.id, request))
            else:
                end = self._stream(request, on_stdout, on_stderr)
        except SessionClosed:
            self.closed = True
            raise
        self.closed = end.closed
        if check and end.result.exit_code != 0:
            raise CommandFailed(end.result)
        return end.result

    def _stream(self, request: ShellCommand, on_stdout: Writer | None, on_stderr: Writer | None) -> ShellEnd:
        decoders = TextStreams(on_stdout, on_stderr)
        stream = self._node.stream_in_shell(self._sandbox, self.id, request)
        try:
            while not isinstance(piece := call(next_piece(stream)), ShellEnd):
                assert piece is not None
                decoders.write(piece)
            decoders.finish()
            return piece
        finally:
            call(close_stream(stream))

    def unclaimed(self) -> Unclaimed:
        """What background jobs wrote while no command ran, since the last call; 64 KiB of each stream at the most."""
        return call(self._node.unclaimed(self._sandbox, self.id))

    def close(self) -> None:
        """Ends the shell and everything it started, background jobs too. Calling it again is no error."""
        self.closed = True
        call(self._node.close_shell(self._sandbox, self.id))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Pty:
    """A program on a terminal of its own. Iterating gives its output as bytes; several handles and late readers are as
    with `Command`, on which it is built: `box.commands.connect(pty.id)` finds it again."""

    def __init__(self, command: Command) -> None:
        self.id = command.id
        self.pid = command.pid
        """Inside the sandbox."""
        self._command = command

    def send(self, data: str | bytes) -> None:
        """What is typed: "\\x03" is ^C, "\\x04" ^D, "\\x1a" ^Z. Waits while the terminal takes no more."""
        self._command.send_stdin(data)

    def resize(self, cols: int, rows: int) -> None:
        """The program in front gets SIGWINCH."""
        check_size(cols, rows)
        self._command.resize(cols, rows)

    def kill(self, signal: int = signals.SIGKILL) -> None:
        """SIGKILL goes to all that it started, any other signal to its process group. With its leader the terminal
        ends, and what is left in front of it gets SIGHUP."""
        self._command.kill(signal)

    def wait(self) -> Result:
        """Its end. What it wrote is `stdout`."""
        return self._command.wait()

    def __iter__(self) -> Iterator[bytes]:
        """To its end."""
        for piece in self._command:
            yield piece.data


class Ptys:
    """Makes terminals in one sandbox."""

    def __init__(self, node: Node, sandbox: str) -> None:
        self._commands = Commands(node, sandbox)

    def create(
        self,
        cmd: str | Sequence[str] | None = None,
        cols: int = 80,
        rows: int = 24,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | int | None = None,
        timeout: float | None = None,
        silence: float | None = None,
        output_limit: int | str = "1MiB",
    ) -> Pty:
        """Runs a command, by default a login shell, on a new terminal. TERM is xterm-256color unless `env` has another.

        `timeout`, `silence` and `output_limit` (of the result) are as for `commands.run`."""
        check_size(cols, rows)
        request = CommandRequest(
            cmd=LOGIN_SHELL if cmd is None else cmd,
            env=plain_env(env),
            cwd=cwd,
            user=user,
            timeout=timeout,
            silence=silence,
            output_limit=parse_size(output_limit, "output_limit"),
            terminal=(cols, rows),
            feed=True,
        )
        return Pty(self._commands.start(request))


def check_size(cols: object, rows: object) -> None:
    """InvalidRequest unless a terminal can have it."""
    for field, value in (("cols", cols), ("rows", rows)):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _SIZE_MAX:
            raise InvalidRequest(field, f"takes 1 to {_SIZE_MAX}, not {value!r}")
