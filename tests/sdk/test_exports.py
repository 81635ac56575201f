"""The public surface is what is listed, and what is listed is documented and typed."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import shoal
from shoal import errors

INTERFACE = ("Sandbox", "AsyncSandbox", "Command", "AsyncCommand", "Shell", "AsyncShell", "Pty", "AsyncPty")


def test_all_is_sorted_and_complete() -> None:
    assert shoal.__all__ == sorted(shoal.__all__)
    for name in shoal.__all__:
        assert getattr(shoal, name) is not None
    public = {name for name, value in vars(shoal).items() if not name.startswith("_") and name in shoal.__all__}
    assert public <= set(shoal.__all__)


def test_nothing_else_is_there_by_accident() -> None:
    known = {*shoal.__all__, "annotations", "import_module", "TYPE_CHECKING", "Any"}
    others = {name for name, value in vars(shoal).items() if not name.startswith("_") and name not in known}
    assert {name for name in others if not isinstance(vars(shoal)[name], ModuleType)} == set()


ERRORS = {
    name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__
}


def test_every_error_is_public_and_has_a_code_of_its_own() -> None:
    assert set(ERRORS) <= set(shoal.__all__)
    assert all(issubclass(kind, shoal.ShoalError) for kind in ERRORS.values())
    assert len({kind.code for kind in ERRORS.values()}) == len(ERRORS)


def test_the_tree_of_errors_is_drawn_as_it_is() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__)
    assert sorted([*drawn, "ShoalError"]) == sorted(ERRORS)


@pytest.mark.parametrize("name", INTERFACE)
def test_public_methods_are_documented_or_speak_for_themselves(name: str) -> None:
    plain = {"info", "exists", "close_stdin"}
    for method, value in inspect.getmembers(getattr(shoal, name), inspect.isfunction):
        if not method.startswith("_") and method not in plain:
            assert value.__doc__, f"{name}.{method}"


def test_a_name_of_a_later_version_says_so_and_any_other_is_an_attribute_error() -> None:
    with pytest.raises(shoal.Unsupported, match="Pool"):
        _ = shoal.Pool
    with pytest.raises(AttributeError):
        _ = shoal.Swimming
    assert not hasattr(shoal, "Swimming")


def test_later_verbs_say_so(box: shoal.Sandbox) -> None:
    for owner, name in ((box, "pause"), (box, "fork"), (box, "run_code")):
        with pytest.raises(shoal.Unsupported, match=name):
            getattr(owner, name)
        with pytest.raises(AttributeError):
            getattr(owner, name + "_not")


def test_it_is_marked_as_typed() -> None:
    assert (Path(shoal.__file__).parent / "py.typed").exists()
    assert "shoal" in sys.modules
