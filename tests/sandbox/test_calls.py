"""The table of system calls: whole, without a call that is in two places, and with rules only where they can hold."""

from __future__ import annotations

import ctypes
from collections import Counter

import pytest

from shoal.sandbox.calls import GROUPS, LATER_NUMBERS, RULES, answers

TOKENS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def library_names(token: int) -> dict[str, int]:
    """Every call of an architecture that the installed libseccomp knows."""
    name_of = ctypes.CDLL("libseccomp.so.2").seccomp_syscall_resolve_num_arch
    name_of.restype = ctypes.c_char_p
    names = ((name_of(ctypes.c_uint32(token), number), number) for number in range(1024))
    return {name.decode(): number for name, number in names if name is not None}


@pytest.mark.parametrize("architecture", TOKENS)
def test_every_call_of_the_library_has_a_place(architecture: str) -> None:
    known = library_names(TOKENS[architecture])
    assert len(known) > 300
    assert known.keys() - answers().keys() == set()


def test_no_call_has_two_places() -> None:
    counts = Counter(name for group in GROUPS for name in group.names)
    assert [name for name, count in counts.items() if count > 1] == []


def test_every_group_says_why() -> None:
    assert all(len(group.reason) >= 10 and group.names for group in GROUPS)


def test_rules_are_on_calls_that_are_allowed_else() -> None:
    assert {answers()[name] for name in RULES} == {"allowed"}


@pytest.mark.parametrize("architecture", TOKENS)
def test_numbers_of_later_calls_are_those_of_the_library(architecture: str) -> None:
    known = library_names(TOKENS[architecture])
    assert {name: known[name] for name in LATER_NUMBERS if name in known}.items() <= LATER_NUMBERS.items()
    assert set(LATER_NUMBERS) <= answers().keys()
