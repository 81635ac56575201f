import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.bench.figures import Sample, percentile, summarise


def test_percentiles_lie_between_neighbours():
    assert percentile([4, 1, 3, 2], 0.5) == 2.5
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile(list(range(101)), 0.99) == 99
    assert percentile([7], 0.99) == 7


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_is_within_the_values(values, share):
    slack = 1e-6
    assert min(values) - slack <= percentile(values, share) <= max(values) + slack


def test_a_row_has_all_its_figures():
    samples = [Sample(value, {"a": value / 2}) for value in (3.0, 1.0, 2.0)]
    row = summarise(samples, "ms", "true")
    assert (row.n, row.min, row.p50, row.unit, row.command) == (3, 1, 2, "ms", "true")
    assert row.p99 == pytest.approx(2.98)
    assert row.parts == {"a": 1}


def test_parts_may_be_missing_from_some_samples():
    assert summarise([Sample(1), Sample(2, {"a": 5})], "ms", "").parts == {"a": 5}


def test_figures_keep_four_digits():
    assert summarise([Sample(1234.5678)], "ms", "").p50 == 1235
    assert summarise([Sample(0.00012345678)], "ms", "").p50 == 0.0001235
