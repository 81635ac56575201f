"""What all commands have in common: help, misuse, errors in one line, exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal import errors
from shoal.cli.main import exit_code, explain
from shoal.types import Result

from .command import complaint, shoal

COMMANDS = ("run", "shell", "rollouts", "doctor", "env")


def test_help_names_all_commands() -> None:
    outcome = shoal("--help")
    assert (outcome.returncode, outcome.stderr) == (0, b"")
    words = outcome.stdout.decode().split()
    assert all(command in words for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command: str) -> None:
    outcome = shoal(command, "--help")
    assert (outcome.returncode, outcome.stderr) == (0, b"")
    assert f"shoal {command}".encode() in outcome.stdout


@pytest.mark.parametrize("arguments", [(), ("env",)])
def test_no_command_is_misuse_and_shows_the_help(arguments: tuple[str, ...]) -> None:
    outcome = shoal(*arguments)
    assert outcome.returncode == 2
    assert b"--help" in outcome.stdout + outcome.stderr
    assert b"Traceback" not in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "way"),
    [
        (("rnu",), "`shoal --help`"),
        (("--colour",), "`shoal --help`"),
        (("env", "bulid"), "`shoal env --help`"),
        (("env", "build"), "`shoal env build --help`"),
        (("rollouts", "--tasks", "pypi"), "`shoal rollouts --help`"),
        (("doctor", "a-path"), "`shoal doctor --help`"),
    ],
)
def test_misuse_is_one_line_with_the_way_to_the_help(arguments: tuple[str, ...], way: str) -> None:
    outcome = shoal(*arguments)
    assert outcome.returncode == 2
    assert complaint(outcome).endswith(f"; see {way}")


def test_a_home_that_cannot_be_made_is_one_line() -> None:
    outcome = shoal("env", "ls", env={"SHOAL_HOME": "/dev/null/home", "PATH": "/usr/bin:/bin"})
    assert outcome.returncode == 4
    assert "/dev/null" in complaint(outcome)


ERRORS = [
    (errors.InvalidRequest("field", "is wrong"), 2),
    (errors.NotFound("x"), 2),
    (errors.PermissionDenied("x"), 2),
    (errors.FileExists("x"), 2),
    (errors.Unsupported("x"), 2),
    (errors.CapacityError("no room", 2.5), 3),
    (errors.PlatformError("x"), 4),
    (errors.SetupFailed("step 1, mount()", 13), 4),
    (errors.DigestMismatch("layer", "a", "b"), 4),
    (errors.StorageFull("x"), 4),
    (errors.SandboxGone("sb-1", "lost"), 4),
    (errors.BuildFailed("x", "log"), 4),
    (errors.LimitExceeded("file", 1), 4),
    (errors.Interrupted("x"), 4),
    (errors.OutputLost(0, 1), 4),
    (errors.SessionClosed("x"), 4),
    (errors.CommandFailed(Result(exit_code=1)), 4),
]


@pytest.mark.parametrize(("error", "code"), ERRORS, ids=lambda value: type(value).__name__)
def test_exit_codes(error: errors.ShoalError, code: int) -> None:
    assert exit_code(error) == code


def test_every_error_has_its_exit_code() -> None:
    def below(kind: type[errors.ShoalError]) -> set[type[errors.ShoalError]]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    assert {type(error) for error, _ in ERRORS} == below(errors.ShoalError) - {errors.ShoalError}


def test_an_error_is_told_in_one_line() -> None:
    assert explain(errors.PlatformError("one\n  two")) == "one two"


def test_no_room_says_when_to_try_again() -> None:
    assert explain(errors.CapacityError("no room", 2.5)) == "no room; try again in 2.5 s"


def test_a_failed_build_says_where_its_log_is(shoal_home: Path) -> None:
    head, _, file = explain(errors.BuildFailed("package x does not build", "all\nof it")).rpartition(" ")
    assert head == "package x does not build; the whole log is in"
    assert Path(file).is_relative_to(shoal_home)
    assert Path(file).read_text() == "all\nof it"
