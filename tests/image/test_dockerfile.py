"""Dockerfiles are read as Docker reads them, and what does not build here is refused with its line."""

from __future__ import annotations

import pytest

from shoal.errors import InvalidRequest, Unsupported
from shoal.image.dockerfile import assignments, expand, parse, split, words

VARIABLES = {"A": "1", "EMPTY": "", "DIR": "/opt/x"}


def test_instructions_flags_continuations_and_comments() -> None:
    text = """
# a comment
ARG VERSION=1
FROM debian:bookworm AS base
RUN apt-get update \\
    # in between
    && apt-get install -y git

copy --chown=app --from=base src/ /app/
LABEL a=b
cmd ["python3", "-m", "app"]
"""
    found = parse(text)
    assert [(each.line, each.keyword) for each in found] == [
        (3, "ARG"), (4, "FROM"), (5, "RUN"), (9, "COPY"), (10, "LABEL"), (11, "CMD"),
    ]  # fmt: skip
    assert found[2].text.split() == ["apt-get", "update", "&&", "apt-get", "install", "-y", "git"]
    assert (found[3].flags, found[3].text) == ({"chown": "app", "from": "base"}, "src/ /app/")
    assert found[5].list() == ["python3", "-m", "app"]


def test_heredocs_of_run() -> None:
    (_, run, env) = parse("FROM host\nRUN <<-'END'\n\techo $A\n  two\n\tEND\nENV X=1\n")
    assert run.script == "echo $A\n  two\n"
    assert env.keyword == "ENV"


def test_another_escape() -> None:
    (_, run) = parse("# escape=`\nFROM host\nRUN a `\n b\n")
    assert run.text.split() == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("RUN true", InvalidRequest, "no FROM"),
        ("RUN true\nFROM host", InvalidRequest, "line 1: RUN before"),
        ("FROM host\nONBUILD RUN x", Unsupported, "line 2: ONBUILD"),
        ("FROM host\nRUN --mount=type=cache,target=/x pip", Unsupported, "line 2: RUN --mount"),
        ("FROM host\nRUN <<X\necho", InvalidRequest, "X has no end"),
        ("FROM host\nRUN", InvalidRequest, "RUN of what"),
        ("", InvalidRequest, "no FROM"),
    ],
)
def test_what_does_not_build(text: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        parse(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$A", "1"), ("${A}b", "1b"), ("$Ab", ""), ("${EMPTY:-x$A}", "x1"), ("${A:-x}", "1"), ("${A:+y}", "y"),
        ("${EMPTY:+y}", ""), (r"\$A", "$A"), ("100%", "100%"), ("$", "$"),
    ],
)  # fmt: skip
def test_variables(text: str, value: str) -> None:
    assert expand(text, VARIABLES) == value


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a  b", ["a", "b"]), ("'a b' c", ["a b", "c"]), ('"a $A" \'$A\'', ["a 1", "$A"]), (r"a\ b", ["a b"]),
        ('x="1 2"y', ["x=1 2y"]), ('""', [""]), (r'"a\"b"', ['a"b']), ("$DIR/y", ["/opt/x/y"]), ("", []),
    ],
)  # fmt: skip
def test_words(text: str, found: list[str]) -> None:
    assert split(text, VARIABLES) == found


def test_a_quote_must_end() -> None:
    (_, copy) = parse("FROM host\nCOPY 'a b /x")
    with pytest.raises(InvalidRequest, match=r"line 2: .*quote"):
        words(copy, {})


def test_assignments_in_both_forms() -> None:
    (_, new, old, bad) = parse("FROM host\nENV A=\"x y\" B='$A' C=$A\nENV NAME some text $A\nENV A=1 B\n")
    assert assignments(new, VARIABLES) == [("A", "x y"), ("B", "$A"), ("C", "1")]
    assert assignments(old, VARIABLES) == [("NAME", "some text 1")]
    with pytest.raises(InvalidRequest, match="line 4"):
        assignments(bad, {})
