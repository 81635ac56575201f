from shoal.bench.figures import Figures
from shoal.bench.marks import MARKS, judge, ratios
from shoal.bench.rows import ROWS


def row(p50, p99=0.0, unit="ms"):
    return Figures(n=1, min=p50, p50=p50, p99=p99 or p50, unit=unit, command="")


def outcomes(**rows):
    """By row and figure; of two marks about the same, the one that could be judged."""
    found = sorted(judge(rows), key=lambda each: each.outcome != "not measured")
    return {(each.mark.row, each.mark.figure): each.outcome for each in found}


def test_marks_are_about_rows_that_there_are():
    names = {row.name for row in ROWS}
    assert {mark.row for mark in MARKS} <= names
    assert {mark.relative_to for mark in MARKS} - {None} <= names


def test_aims_are_harder_than_marks():
    for mark in MARKS:
        assert mark.aim >= mark.least if mark.higher else mark.aim <= mark.least


def test_lower_is_better():
    found = outcomes(exec=row(1.0, 6.0))
    assert found["exec", "p50"] == "met"
    assert found["exec", "p99"] == "missed"


def test_higher_is_better_for_rates():
    assert outcomes(oneshot_16=row(399))["oneshot_16", "p50"] == "missed"
    assert outcomes(oneshot_16=row(400))["oneshot_16", "p50"] == "met"
    assert outcomes(oneshot_16=row(701))["oneshot_16", "p50"] == "aim"


def test_a_relative_mark_needs_both_rows():
    assert outcomes(oneshot=row(2))["oneshot", "p50"] == "not measured"
    assert outcomes(oneshot=row(2), bwrap_oneshot=row(3))["oneshot", "p50"] == "met"
    assert outcomes(oneshot=row(1.5), bwrap_oneshot=row(3))["oneshot", "p50"] == "aim"
    assert outcomes(oneshot=row(4), bwrap_oneshot=row(3))["oneshot", "p50"] == "missed"


def test_nothing_may_be_left_over():
    assert outcomes(leftovers=row(0))["leftovers", "p99"] == "aim"
    assert outcomes(leftovers=row(1))["leftovers", "p99"] == "missed"


def test_ratios_are_of_rows_that_were_measured():
    assert ratios({"oneshot": row(2), "bwrap_oneshot": row(4)}) == {"oneshot/bwrap_oneshot": 0.5}


def test_a_rate_can_be_a_share_of_another_one():
    assert outcomes(output_200m=row(59), socket_copy=row(100))["output_200m", "p50"] == "missed"
    assert outcomes(output_200m=row(60), socket_copy=row(100))["output_200m", "p50"] == "met"


def test_a_neighbour_is_judged_by_its_worst():
    assert outcomes(neighbour=row(5, 1001))["neighbour", "p99"] == "missed"
    assert outcomes(neighbour=row(5, 999))["neighbour", "p99"] == "met"
