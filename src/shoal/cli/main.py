"""`shoal`: the commands, and what every one of them does with errors. Exit codes: 2 misuse, 3 capacity, 4 platform."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import typer

from shoal.cli.bench import bench
from shoal.cli.doctor import doctor
from shoal.cli.env import env
from shoal.cli.image import image
from shoal.cli.rollouts import rollouts
from shoal.cli.run import run, shell
from shoal.errors import (
    BuildFailed,
    CapacityError,
    FileExists,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    ShoalError,
    Unsupported,
)

if TYPE_CHECKING:
    from pathlib import Path

# Newer typers bring a click of their own, older ones use the real one: found through a class that both export.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

MISUSE, CAPACITY, PLATFORM = 2, 3, 4
INTERRUPTED, PIPE_CLOSED = 130, 141
"""As a shell tells SIGINT and SIGPIPE."""


def application() -> typer.Typer:
    """All commands."""
    app = typer.Typer(
        help="Elastic sandboxes for agentic reinforcement learning.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.command(context_settings={"allow_interspersed_args": False})(run)  # what follows CMD is CMD's
    app.command()(shell)
    app.command()(rollouts)
    app.command()(doctor)
    app.command()(bench)
    app.add_typer(image(), name="image", help="Images, and the layers in this machine's store.")
    app.add_typer(env(), name="env", help="Environments of Python packages.")
    return app


def main() -> None:
    """The entry point. Ends the process with the code that fits."""
    open_missing_streams()
    try:
        code = application()(standalone_mode=False)
        sys.stdout.flush()
    except typer.Exit as stop:
        code = stop.exit_code
    except _UsageError as error:
        if str(error):  # else it was no command at all, and the help is printed
            print(f"shoal: {explain_misuse(error)}", file=sys.stderr)
        code = MISUSE
    except ShoalError as error:
        print(f"shoal: {explain(error)}", file=sys.stderr)
        code = exit_code(error)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except (BrokenPipeError, SystemExit):  # click leaves by itself when nobody reads its output any more
        code = PIPE_CLOSED
        discard_output()
    except OSError as error:
        print(f"shoal: {error}", file=sys.stderr)
        code = PLATFORM
        discard_output()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is left to do is to clean up
    sys.exit(code if isinstance(code, int) else 0)


def open_missing_streams() -> None:
    """A stream that we were started without is /dev/null: whatever were opened next would take its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(fd, mode))


def discard_output() -> None:
    """What is still in stdout's buffer can't be written, and Python would try again at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def explain_misuse(error: Exception) -> str:
    """One line that ends with the way to the help."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "shoal"
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    return f"{message.rstrip('.')}; see `{command} --help`"


def explain(error: ShoalError) -> str:
    """One line. The log of a build goes to a file that the line names."""
    text = " ".join(str(error).split())
    if isinstance(error, CapacityError):
        return f"{text}; try again in {error.retry_after:g} s"
    if isinstance(error, BuildFailed):
        return f"{text}; the whole log is in {keep_log(error.log)}"
    return text


def keep_log(log: str) -> Path:
    from shoal.config import data_dir

    folder = data_dir() / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"build-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**6:06d}.log"
    path.write_text(log)
    return path


def exit_code(error: ShoalError) -> int:
    if isinstance(error, (InvalidRequest, NotFound, PermissionDenied, FileExists, Unsupported)):
        return MISUSE
    return CAPACITY if isinstance(error, CapacityError) else PLATFORM
