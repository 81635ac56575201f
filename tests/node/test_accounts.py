"""The sandbox's own /etc/passwd may hold anything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InvalidRequest
from shoal.node.accounts import Account, find_account
from shoal.sandbox.slots import IDS

PASSWD = b"""root:x:0:0:root:/root:/bin/bash
user:x:1000:1000:,,,:/home/user:/bin/zsh
bare:x:7:8:::
"""
GROUP = b"root:x:0:\nstaff:x:50:user,bare\nuser:x:1000:\nwheel:x:10:other,user\n"


def test_by_name_and_by_number() -> None:
    expected = Account("user", 1000, 1000, "/home/user", "/bin/zsh", (1000, 50, 10))
    assert find_account("user", PASSWD, GROUP) == expected
    assert find_account(1000, PASSWD, GROUP) == expected
    assert find_account("1000", PASSWD, GROUP) == expected


def test_what_an_entry_leaves_out() -> None:
    assert find_account("bare", PASSWD, GROUP) == Account("bare", 7, 8, "/", "/bin/sh", (8, 50))


def test_a_number_without_an_entry_is_taken_as_it_is() -> None:
    assert find_account(4321, PASSWD, GROUP) == Account("4321", 4321, 4321, "/", "/bin/sh")


def test_the_environment_of_an_account() -> None:
    account = find_account("user", PASSWD, GROUP)
    expected = {"HOME": "/home/user", "USER": "user", "LOGNAME": "user", "SHELL": "/bin/zsh"}
    assert account.environment() == expected


@pytest.mark.parametrize("user", ["nobody-here", "", "-1", "1.5", "user ", "us\ner", "\u0661"])
def test_a_name_without_an_entry_is_the_callers_mistake(user: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        find_account(user, PASSWD, GROUP)
    assert caught.value.field == "user"


@pytest.mark.parametrize("user", [IDS, str(IDS), 1 << 32, "9" * 5000])
def test_an_id_that_the_sandbox_does_not_have_is_the_callers_mistake(user: str | int) -> None:
    with pytest.raises(InvalidRequest, match="outside of the sandbox's ids") as caught:
        find_account(user, PASSWD, GROUP)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "line",
    [
        b"evil:x:99999999999:0::/:/bin/sh",
        b"evil:x:-1:0::/:/bin/sh",
        b"evil:x:0x0:0::/:/bin/sh",
        b"evil:x:4294967295:0::/:/bin/sh",
        b"evil:x:\xd9\xa0:0::/:/bin/sh",
        b"evil:x::0::/:/bin/sh",
        b"evil:x:0:0::/",
        b"evil:x:0:0::/:/bin/sh:more",
        b"evil:x:0:0::/\0:/bin/sh",
        b"evil",
        b"",
    ],
)
def test_a_line_that_makes_no_sense_is_none(line: bytes) -> None:
    with pytest.raises(InvalidRequest):
        find_account("evil", line + b"\n" + PASSWD, GROUP)
    assert find_account("user", line + b"\n" + PASSWD, GROUP).uid == 1000


def test_the_first_entry_of_a_name_counts() -> None:
    assert find_account("twice", b"twice:x:1:1::/a:/b\ntwice:x:2:2::/a:/b\n", b"").uid == 1


def test_groups_are_as_many_as_the_kernel_is_asked_to_take() -> None:
    group = b"".join(b"g%d:x:%d:user\n" % (number, number) for number in range(2000, 4000))
    groups = find_account("user", PASSWD, group).groups
    assert len(groups) == 64
    assert groups[0] == 1000


def test_a_file_without_end_is_read_to_a_bound() -> None:
    late = b"x\n" * 200_000 + b"late:x:1:1::/:/bin/sh\n"
    with pytest.raises(InvalidRequest):
        find_account("late", late, b"")


@given(st.sampled_from(["user", "root", "x", 0, 1000]), st.binary(max_size=400), st.binary(max_size=400))
def test_any_bytes_give_an_account_or_a_typed_error(user: str | int, passwd: bytes, group: bytes) -> None:
    try:
        account = find_account(user, passwd, group)
    except InvalidRequest:
        return
    assert 0 <= account.uid < IDS
    assert 0 <= account.gid < IDS
    assert all(0 <= gid < IDS for gid in account.groups)
    assert "\0" not in account.home + account.shell + account.name


lines = st.lists(st.sampled_from([b"user", b"x", b"0", b"1000", b"", b"/", b"a,user", b"\xff", b"\0"]), max_size=9).map(
    b":".join
)


@given(st.lists(lines, max_size=6).map(b"\n".join), st.lists(lines, max_size=6).map(b"\n".join))
def test_lines_that_are_nearly_right(passwd: bytes, group: bytes) -> None:
    test_any_bytes_give_an_account_or_a_typed_error.hypothesis.inner_test("user", passwd, group)
