from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.sandbox.plan import KEPT, OPERATIONS, Plan

SETUP = Path(__file__).parents[2] / "init" / "setup.c"


def plan(name: str, *arguments: object) -> Plan:
    made = Plan()
    made.add(name, *arguments)  # type: ignore[arg-type]
    return made


def test_each_argument_has_its_form_on_the_wire() -> None:
    code = [name for name, _ in OPERATIONS].index("mkdir")
    number = struct.Struct("<q").pack
    expected = bytes([code]) + number(1) + struct.pack("<I", 2) + b"up\0" + number(0o755)
    assert plan("mkdir", 1, "up", 0o755).wire() == expected


def test_lists_of_texts_and_of_numbers() -> None:
    code = [name for name, _ in OPERATIONS].index("overlay")
    wire = plan("overlay", 1, 2, 3, 0, 5, ["userxattr"], [7, KEPT]).wire()
    texts = struct.pack("<I", 1) + struct.pack("<I", 9) + b"userxattr\0"
    assert wire == bytes([code]) + struct.pack("<5q", 1, 2, 3, 0, 5) + texts + struct.pack("<3q", 2, 7, KEPT)


def test_unsigned_64_bit_masks_fit() -> None:
    assert plan("capabilities", (1 << 64) - 1).wire()[1:] == b"\xff" * 8


def test_text_that_is_not_utf8_comes_out_as_the_bytes_it_was() -> None:
    assert b"a\xff" in plan("write", 1, "/a\udcff", b"\0\xfe").wire()


def test_the_table_is_in_the_order_of_the_one_in_c() -> None:
    (table,) = re.findall(r"operations\[\]\)\(struct setup \*\) = \{(.*?)\}", SETUP.read_text(), re.DOTALL)
    assert re.findall(r"op_(\w+)", table) == [name for name, _ in OPERATIONS]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("pivot", ()),
        ("pivot", (1, 2)),
        ("pivot", ("root",)),
        ("hostname", (5,)),
        ("mount", (1, "tmpfs", 0, "size=1")),
        ("commands", (1, 2, 3, "4")),
    ],
)
def test_wrong_arguments_are_a_mistake_of_the_caller(name: str, arguments: tuple[object, ...]) -> None:
    with pytest.raises(TypeError):
        plan(name, *arguments)


def test_an_unknown_operation_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(KeyError):
        plan("format_disk")


def test_nothing_of_a_refused_operation_goes_out() -> None:
    made = plan("identity")
    before = made.wire()
    with pytest.raises(TypeError):
        made.add("mkdir", 1, "up", "rwx")
    assert (made.wire(), len(made.steps)) == (before, 1)


def test_a_plan_is_text_a_step_a_line() -> None:
    made = plan("mount", 1, "tmpfs", 6, ["size=1m"])
    made.add("seccomp", 1, b"x" * 4096)
    assert str(made) == "step 0, mount(1, 'tmpfs', 6, ['size=1m'])\nstep 1, seccomp(1, <4096 bytes>)"


def test_a_step_that_is_not_there_is_described_all_the_same() -> None:
    assert Plan().describe(7) == "step 7"


def test_extending_joins_steps_and_bytes() -> None:
    first, second = plan("identity"), plan("hostname", "box")
    expected = first.wire() + second.wire()
    first.extend(second)
    assert first.wire() == expected
    assert [name for name, _ in first.steps] == ["identity", "hostname"]


ARGUMENTS = {
    "i": st.integers(-(1 << 63), (1 << 64) - 1),
    "s": st.text(st.characters(exclude_categories=["Cs"])) | st.binary(max_size=100),
    "l": st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=9), max_size=4),
    "n": st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=4),
}


def size(kind: str, value: object) -> int:
    match kind, value:
        case "s", str() | bytes():
            return 5 + len(value.encode() if isinstance(value, str) else value)
        case "l", [*items]:
            return 4 + sum(size("s", item) for item in items)
        case "n", [*items]:
            return 8 + 8 * len(items)
    return 8


@given(st.data())
def test_every_operation_takes_what_its_types_say(data: st.DataObject) -> None:
    name, types = data.draw(st.sampled_from(OPERATIONS))
    arguments = [data.draw(ARGUMENTS[kind]) for kind in types]
    wire = plan(name, *arguments).wire()
    assert len(wire) == 1 + sum(map(size, types, arguments))
