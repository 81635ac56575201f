import io

from rich.console import Console

from shoal.bench.figures import Figures
from shoal.bench.marks import MARKS
from shoal.bench.report import bound, markdown, number, tables
from shoal.bench.run import Report

REPORT = Report(
    machine={"cpu": "Some CPU", "cores": 2, "memory": 24 << 30},
    rows={
        "exec": Figures(n=9, min=0.5, p50=0.75, p99=6, unit="ms", command="box.commands.run(['true'])"),
        "idle": Figures(n=3, min=0.4, p50=0.4, p99=0.4, unit="MiB", command="many", parts={"percpu": 0.1}),
    },
    ratios={"exec/python_floor": 1.5},
    absent={"bwrap_oneshot": "bwrap is not installed [here]"},
)


def shown(report):
    out = io.StringIO()
    Console(width=160, file=out).print(tables(report))
    return out.getvalue()


def test_the_table_has_rows_marks_ratios_and_what_is_absent():
    text = shown(REPORT)
    assert "memory 24 GiB" in text
    for line in ("exec p50 ≤ 1.2 ms ≤ 0.8 ms 0.75 aim", "exec p99 ≤ 5 ms ≤ 2 ms 6 missed", "exec/python_floor 1.5"):
        assert any(" ".join(found.split()) == line for found in text.splitlines())
    assert "bwrap_oneshot is absent: bwrap is not installed [here]" in text
    assert "quick" not in text


def test_markdown_has_the_same_and_the_commands():
    text = markdown(REPORT)
    assert "| `exec` | true in a live sandbox | 9 | 0.5 | 0.75 | 6 | ms |" in text
    assert "| idle p50 | ≤ 0.6 MiB | ≤ 0.45 MiB | 0.4 | aim |" in text
    assert "- `idle`: `many` (percpu 0.1)" in text


def test_numbers_have_three_digits_and_no_exponent():
    assert [number(value) for value in (0.0012345, 1.0, 1234.5, 98765)] == ["0.00123", "1", "1,230", "98,800"]


def test_a_bound_says_which_side_is_good():
    sides = {bound(mark, mark.least)[0] for mark in MARKS}
    assert sides == {"≥", "≤"}
