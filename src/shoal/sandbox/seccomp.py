"""The system-call filter of a sandbox: the table of `calls.py` as a program of classic BPF.

The program is a binary search over *ranges* of numbers with the same answer: some 300 steps, half of them rules on
arguments, of which a call passes ten. libseccomp has a leaf for every call; its tree is longer without any rule than
this is with all of them, and loading costs by length. When it is loaded the kernel finds out which calls are allowed
whatever their arguments, and never runs it for those.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import functools
import platform
import struct
from collections.abc import Collection, Mapping
from itertools import groupby
from typing import Final

from msgspec import Struct

from shoal.errors import InvalidRequest, Unsupported
from shoal.sandbox.calls import LATER_NUMBERS, RULES, Condition, Rule, answers

_ALLOW: Final = 0x7FFF0000
_NOTIFY: Final = 0x7FC00000
_KILL_PROCESS: Final = 0x80000000
_ERRNO: Final = 0x00050000

_LOAD, _AND, _GO, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in struct seccomp_data. Both architectures are little-endian: the lower half of an argument comes first."""
_TOKENS: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32: Final = 0x40000000
_SKIPPED: Final = 0xFFFFFFFF
"""The number that a tracer puts in place of a call that is not to happen."""
_LONGEST_JUMP: Final = 255

Step = tuple[int, int, int, int]
"""Code, how far to go if true and if false, operand."""
Program = list[Step]


class Response(Struct, frozen=True):
    """What becomes of an audited call once it is recorded."""

    number: int
    error: int | None
    """None: it goes on. Else its result, 0 for a pretended success."""


@functools.lru_cache(maxsize=64)
def compile_filter(audited: tuple[str, ...] = ()) -> bytes:
    """The filter as an array of `struct sock_filter`; calls that are `audited` ask the listener.

    Unsupported without libseccomp, or on an architecture for which there is no table."""
    by_answer = answers()
    leaves = {number: _leaf(name, by_answer[name], watched=name in audited) for name, number in _numbers().items()}
    return b"".join(struct.pack("=HBBI", *step) for step in _program(leaves))


def responses(audited: Collection[str]) -> dict[str, Response]:
    """What the listener says to each audited call. InvalidRequest for one that does not exist here."""
    known, by_answer = _numbers(), answers()
    errors = {"allowed": None, "refused": errno.EPERM, "absent": errno.ENOSYS, "pretended": 0}
    for name in audited:
        if name not in known:
            raise InvalidRequest("audit.syscalls", f"{name!r} is no system call of {platform.machine()} that is known")
    return {name: Response(known[name], errors[by_answer[name]]) for name in audited}


def _leaf(name: str, answer: str, *, watched: bool) -> Program:
    """What follows when the number is that of this call."""
    if watched:
        return _ruled(RULES.get(name, ()), _NOTIFY)
    match answer:
        case "allowed":
            return _ruled(RULES.get(name, ()), _ALLOW)
        case "refused":
            return _refusal(errno.EPERM)
        case "pretended":
            return _refusal(0)
        case _:
            return _refusal(errno.ENOSYS)


def _refusal(error: int) -> Program:
    return [(_RETURN, 0, 0, _ERRNO | error)]


def _ruled(rules: tuple[Rule, ...], otherwise: int) -> Program:
    program: Program = [(_RETURN, 0, 0, otherwise)]
    for rule in reversed(rules):
        program = _rule(rule, program)
    return program


def _rule(rule: Rule, after: Program) -> Program:
    """Refuses where all conditions hold, else goes on with `after`."""
    program = _refusal(rule.error)
    for condition in reversed(rule.conditions):
        program = _condition(condition, program)
    return [*program, *after]


def _condition(condition: Condition, program: Program) -> Program:
    """Goes on with `program` if it holds, else past its end."""
    test: Program = [(_LOAD, 0, 0, _ARGUMENTS + 8 * condition.argument)]
    if condition.mask != 0xFFFFFFFF:
        test.append((_AND, 0, 0, condition.mask))
    past = len(program)
    for left, value in zip(range(len(condition.values) - 1, -1, -1), condition.values, strict=True):
        if condition.others:
            test.append((_IF_EQUAL, left + past, 0, value))
        else:
            test.append((_IF_EQUAL, left, 0 if left else past, value))
    return test + program


def _program(leaves: Mapping[int, Program]) -> Program:
    token = _TOKENS[platform.machine()]
    head: Program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        # An `int 0x80` socketcall would pass every rule on families.
        (_IF_EQUAL, 1, 0, token),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
    ]
    end = max(leaves) + 1
    unknown = _refusal(errno.ENOSYS)
    numbered = ((number, leaves.get(number, unknown)) for number in range(end))
    ranges = [(next(run)[0], leaf) for leaf, run in groupby(numbered, key=lambda pair: pair[1])]
    ranges.append((end, unknown))
    foreign = [(_RETURN, 0, 0, _KILL_PROCESS)] if platform.machine() == "x86_64" else unknown
    ranges += [(_X32, foreign), (_SKIPPED, [(_RETURN, 0, 0, _ALLOW)])]
    return head + _search(ranges)


def _search(ranges: list[tuple[int, Program]]) -> Program:
    """Of (first number, what follows), ascending."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, above = _search(ranges[:middle]), _search(ranges[middle:])
    first = ranges[middle][0]
    if len(below) <= _LONGEST_JUMP:
        return [(_IF_AT_LEAST, len(below), 0, first), *below, *above]
    return [(_IF_AT_LEAST, 0, 1, first), (_GO, 0, 0, len(below)), *below, *above]


@functools.cache
def _numbers() -> dict[str, int]:
    """Of every call in the table that this architecture has. To find the library takes longer than a create."""
    if platform.machine() not in _TOKENS:
        raise Unsupported(f"no table of system calls for {platform.machine()}: there is one for {', '.join(_TOKENS)}")
    name = ctypes.util.find_library("seccomp") or "libseccomp.so.2"
    try:
        resolve = ctypes.CDLL(name).seccomp_syscall_resolve_name
    except OSError as error:
        raise Unsupported("libseccomp is missing: install libseccomp2 (Debian) or libseccomp (Fedora)") from error
    found = {call: resolve(call.encode()) for call in answers()}
    return LATER_NUMBERS | {call: number for call, number in found.items() if number >= 0}
