from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.node.hunks import Effort, find_edits, write_hunks

LINES = st.lists(st.sampled_from([b"a\n", b"b\n", b"c\n", b"\n"]), max_size=30)


@given(LINES, LINES)
def test_edits_lead_from_one_to_the_other_and_are_few(a: list[bytes], b: list[bytes]) -> None:
    made: list[bytes] = []
    at = cost = 0
    for edit in find_edits(a, b, Effort(10**6)):
        assert edit.a_start >= at
        made += a[at : edit.a_start]
        assert len(made) == edit.b_start
        made += b[edit.b_start : edit.b_end]
        cost += edit.a_end - edit.a_start + edit.b_end - edit.b_start
        at = edit.a_end
    assert made + a[at:] == b
    assert cost == len(a) + len(b) - 2 * _longest_common(a, b)


def _longest_common(a: list[bytes], b: list[bytes]) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        before = row
        row = [0]
        for index, y in enumerate(b):
            row.append(before[index] + 1 if x == y else max(before[index + 1], row[-1]))
    return row[-1]


@pytest.mark.parametrize("seed", range(12))
def test_patch_applies_them(tmp_path: Path, seed: int) -> None:
    """With and without a newline at the end, with carriage returns, form feeds and bytes that are no text."""
    source = random.Random(seed)
    kinds = [b"one\n", b"two\r\n", b"\n", b"\x0cpage\n", b"\xff\xfe\n", b"- minus\n", b"+ plus\n", b"@@ at\n"]
    a = [source.choice(kinds) for _ in range(60)]
    b = [line for line in a if source.random() < 0.8]
    for _ in range(6):
        b.insert(source.randrange(len(b) + 1), source.choice(kinds))
    before, after = b"".join(a)[: -(seed % 2) or None], b"".join(b)[: -(seed // 2 % 2) or None]
    (tmp_path / "f").write_bytes(before)
    diff = b"--- a/f\n+++ b/f\n" + b"".join(write_hunks(before, after, Effort(10**6)))
    subprocess.run(["patch", "-p1", "--binary", "-s"], input=diff, cwd=tmp_path, check=True)
    assert (tmp_path / "f").read_bytes() == after


def test_what_takes_too_much_effort_is_one_hunk() -> None:
    """Of the lines between what is the same at both ends."""
    source = random.Random(1)
    a = [b"%d\n" % source.randrange(3) for _ in range(40_000)]
    b = [b"%d\n" % source.randrange(3) for _ in range(40_000)]
    effort = Effort(100_000)
    start = time.monotonic()
    assert len(find_edits([b"first\n", *a], [b"first\n", *b], effort)) == 1
    assert time.monotonic() - start < 10
    assert find_edits(a, [*a[:100], b"new\n", *a[100:]], Effort(1000)) != []


def test_equal_texts_have_none() -> None:
    assert list(write_hunks(b"a\nb", b"a\nb", Effort(10))) == []
    assert list(write_hunks(b"", b"", Effort(10))) == []
