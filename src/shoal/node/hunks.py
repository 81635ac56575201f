"""The lines in which two texts differ, as hunks of a unified diff. The texts are hostile, so the effort is bounded."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

_CONTEXT: Final = 3
_DISTANCE_MAX: Final = 1000
"""Lines removed and added, beyond which two texts are called different as a whole."""
_NO_NEWLINE: Final = b"\\ No newline at end of file\n"


class Edit(NamedTuple):
    """Lines [a_start, a_end) of one text are [b_start, b_end) of the other."""

    a_start: int
    a_end: int
    b_start: int
    b_end: int


class Effort:
    """Steps that may still be taken. The worst case of every such algorithm is quadratic."""

    def __init__(self, steps: int) -> None:
        self.left = steps


def write_hunks(a: bytes, b: bytes, effort: Effort) -> Iterator[bytes]:
    """From `@@` to `@@`; nothing if they are equal. What takes too much effort is one hunk of all old and new lines."""
    a_lines, b_lines = _split(a), _split(b)
    for group in _grouped(find_edits(a_lines, b_lines, effort)):
        yield from _write_hunk(a_lines, b_lines, group)


def _split(text: bytes) -> list[bytes]:
    """At newlines only: a carriage return or form feed is part of its line."""
    lines = text.split(b"\n")
    last = lines.pop()
    return [line + b"\n" for line in lines] + ([last] if last else [])


def find_edits(a: Sequence[bytes], b: Sequence[bytes], effort: Effort) -> list[Edit]:
    """In order, none touching the next."""
    start, a_end, b_end = 0, len(a), len(b)
    while start < min(a_end, b_end) and a[start] == b[start]:
        start += 1
    while min(a_end, b_end) > start and a[a_end - 1] == b[b_end - 1]:
        a_end, b_end = a_end - 1, b_end - 1
    if start == a_end == b_end:
        return []
    numbers: dict[bytes, int] = {}
    left, right = (
        [numbers.setdefault(line, len(numbers)) for line in lines] for lines in (a[start:a_end], b[start:b_end])
    )
    found = _shortest(left, right, effort)
    if found is None:
        return [Edit(start, a_end, start, b_end)]
    return [Edit(*(position + start for position in edit)) for edit in found]


def _shortest(a: Sequence[int], b: Sequence[int], effort: Effort) -> list[Edit] | None:
    """Myers' greedy algorithm (1986). None if the texts are too different, or the effort is used up.

    The n-th row has how far into `a` one gets with n lines removed or added, for each difference of positions -n..n in
    steps of two: the i-th of it comes from the i-th of the row before by an added line, or from the one before that by
    a removed one."""
    rows: list[array[int]] = []
    for distance in range(min(len(a) + len(b), _DISTANCE_MAX) + 1):
        row = array("i")
        for index in range(distance + 1):
            x = begin = _furthest(rows[-1], index, distance) if rows else 0
            y = x - (2 * index - distance)
            while x < len(a) and y < len(b) and a[x] == b[y]:
                x, y = x + 1, y + 1
            row.append(x)
            effort.left -= 1 + x - begin
            if x >= len(a) and y >= len(b):
                return _merge(_walk_back(rows, index))
        rows.append(row)
        if effort.left < 0:
            break
    return None


def _is_added(row: array[int], index: int, distance: int) -> bool:
    """Whether the line that leads from `row`, the one before, to `index` is an added one."""
    return index == 0 or (index != distance and row[index - 1] < row[index])


def _furthest(row: array[int], index: int, distance: int) -> int:
    return row[index] if _is_added(row, index, distance) else row[index - 1] + 1


def _walk_back(rows: Sequence[array[int]], index: int) -> list[Edit]:
    """Single lines, the first one first."""
    edits = []
    for distance in range(len(rows), 0, -1):
        row = rows[distance - 1]
        added = _is_added(row, index, distance)
        index = index if added else index - 1
        x = row[index]
        y = x - (2 * index - (distance - 1))
        edits.append(Edit(x, x, y, y + 1) if added else Edit(x, x + 1, y, y))
    return edits[::-1]


def _merge(edits: Sequence[Edit]) -> list[Edit]:
    merged: list[Edit] = []
    for edit in edits:
        if merged and (merged[-1].a_end, merged[-1].b_end) == (edit.a_start, edit.b_start):
            merged[-1] = Edit(merged[-1].a_start, edit.a_end, merged[-1].b_start, edit.b_end)
        else:
            merged.append(edit)
    return merged


def _grouped(edits: Sequence[Edit]) -> Iterator[list[Edit]]:
    """Those whose context would overlap, together."""
    group: list[Edit] = []
    for edit in edits:
        if group and edit.a_start - group[-1].a_end > 2 * _CONTEXT:
            yield group
            group = []
        group.append(edit)
    if group:
        yield group


def _write_hunk(a: Sequence[bytes], b: Sequence[bytes], group: Sequence[Edit]) -> Iterator[bytes]:
    before = min(_CONTEXT, group[0].a_start)
    after = min(_CONTEXT, len(a) - group[-1].a_end)
    a_start, a_end = group[0].a_start - before, group[-1].a_end + after
    b_start, b_end = group[0].b_start - before, group[-1].b_end + after
    yield b"@@ -%s +%s @@\n" % (_range(a_start, a_end), _range(b_start, b_end))
    at = a_start
    for edit in group:
        yield from (_line(b" ", line) for line in a[at : edit.a_start])
        yield from (_line(b"-", line) for line in a[edit.a_start : edit.a_end])
        yield from (_line(b"+", line) for line in b[edit.b_start : edit.b_end])
        at = edit.a_end
    yield from (_line(b" ", line) for line in a[at:a_end])


def _range(start: int, end: int) -> bytes:
    """Lines count from 1; of none, the one before is named."""
    count = end - start
    if count == 1:
        return b"%d" % (start + 1)
    return b"%d,%d" % (start + 1 if count else start, count)


def _line(sign: bytes, line: bytes) -> bytes:
    return sign + line if line.endswith(b"\n") else sign + line + b"\n" + _NO_NEWLINE
