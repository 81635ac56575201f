"""What a session's shell is sent for one command, and the line it says when that has ended.

The shell reads this text from a socket that is its stdin, so it runs each command in itself: directory, variables,
functions, options and jobs stay. While a command runs its stdin is /dev/null, and the socket a descriptor that no
program inherits. The text of a command is quoted as a whole, so that nothing in it is taken for ours: not a quote, a
here-document or a backslash that is left open, nor a comment or `&` at its end. What we send is not traced (`set -xv`).
"""

from __future__ import annotations

import re
import shlex
from typing import Final, NamedTuple

INTERRUPT: Final = 64
"""SIGRTMAX. On it bash leaves the command, however deep in functions, and goes on with what we sent after it."""

# A trap can `return` from the innermost function or sourced file only; DEBUG makes it return again from where that led.
_LEAVE: Final = r"\builtin return 0 2>/dev/null||:"
_ON_INTERRUPT: Final = rf"\builtin set -T;\builtin trap {shlex.quote(_LEAVE)} DEBUG;{_LEAVE}"
_AFTER_INTERRUPT: Final = r"\builtin trap - DEBUG;\builtin set +T;"
_TRACING: Final = "xv"


class State(NamedTuple):
    """Of the shell, between two commands."""

    code: int = 0
    """`$?`."""
    flags: str = ""
    """`$-`."""
    interrupted: bool = False


class End(NamedTuple):
    """What the shell said."""

    code: int
    flags: str


class Sh:
    """A POSIX shell, dash for one: a command whose time is up ends the session, since it can't be left."""

    def command(self, text: str, mark: str, state: State) -> str:
        """`mark` says of which command the shell will tell the begin (alone) and the end (with code and flags)."""
        begin = rf"{{ \printf '\n%s\n' {mark} >&0;}} 2>/dev/null;"
        return f"{begin}command eval {shlex.quote(_restored(state, 'set') + text)} </dev/null\n{self._end(mark)}"

    @staticmethod
    def _end(mark: str) -> str:
        return rf"{{ \printf '\n%s %s %s\n' {mark} " r""""$?" "$-" >&0||exit 125;set +xv;} 2>/dev/null""" "\n"


class Bash:
    """Bash of 5.1 or later. Sourcing makes a place that the trap can return from.

    Under `set -e` a command whose last status is not 0 ends the shell, also where the failure itself was excused
    (`false && true`): it is `eval` that fails then."""

    def command(self, text: str, mark: str, state: State) -> str:
        """The text goes by a variable, unset before it runs: exported (`set -a`) it would be in every program's."""
        whole = _restored(state, r"\builtin set") + text
        reset = _AFTER_INTERRUPT if state.interrupted else ""
        begin = rf"{{ {reset}\builtin printf '\n%s\n' {mark} >&0;}} 2>/dev/null"
        run = r"""\builtin . /dev/stdin <<<'\builtin eval "\builtin unset -v __shoal;$__shoal" </dev/null'"""
        end = rf"{{ \builtin printf '\n%s %s %s\n' {mark} " r""""$?" "$-" >&0||\builtin exit 125;"""
        return f"__shoal={shlex.quote(whole)}\n{begin};{run};{end}\\builtin set +xv;}} 2>/dev/null\n"


Dialect = Sh | Bash


def argv(shell: str) -> list[str]:
    """To be started as. Bash is told to read no files of its own, as the shell of a single command."""
    return [shell, "--norc", "--noprofile", "-s"] if shell.endswith("bash") else [shell, "-s"]


def greeting(mark: str) -> str:
    """The first line for any shell. It answers with its version, if it is bash."""
    prepare = rf"\builtin shopt -s expand_aliases;\builtin trap {shlex.quote(_ON_INTERRUPT)} {INTERRUPT};"
    answer = f'printf "%s 0 v%s\\n" {mark} "${{BASH_VERSION-}}" >&0'
    return f'{{ [ -z "${{BASH_VERSION-}}" ]||{{ {prepare}}};}} 2>/dev/null;{answer}\n'


def dialect(version: str) -> Dialect:
    """By the answer to the greeting. Before 5.1 bash would write the sourced line to a file in /tmp."""
    found = re.match(r"v(\d+)\.(\d+)", version)
    return Bash() if found and (int(found[1]), int(found[2])) >= (5, 1) else Sh()


def parse_end(words: list[str]) -> End | None:
    """None for what our text does not say."""
    if len(words) != 2 or not words[0].isascii() or not words[0].isdigit() or int(words[0][:4]) > 255:
        return None
    return End(int(words[0][:4]), words[1])


def _restored(state: State, builtin: str) -> str:
    """What a command finds as its predecessor left it. On its first line, so that its lines keep their numbers."""
    tracing = "".join(flag for flag in _TRACING if flag in state.flags)
    parts = [f"{builtin} -{tracing}"] if tracing else []
    if state.code:
        parts.append(f"(exit {state.code})&&:")  # under `set -e` too: the left side of && may fail
    return f"{{ {';'.join(parts)};}} 2>/dev/null;" if parts else ""
