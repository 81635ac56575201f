from collections import Counter
from itertools import groupby

import pytest

from shoal.bench.rows import ROWS, choose, interleave
from shoal.bench.worker import jobs
from shoal.errors import InvalidRequest


def test_every_row_has_a_job_and_a_name_of_its_own():
    assert [row.name for row in ROWS] == list(jobs())


def test_groups_are_not_torn_apart():
    groups = [group for group, _ in groupby(ROWS, lambda row: row.group)]
    assert len(groups) == len(set(groups))


def test_peers_come_when_asked_for():
    names = {row.name for row in choose()}
    assert "oneshot" in names
    assert "bwrap_oneshot" not in names
    assert "bwrap_oneshot" in {row.name for row in choose(peers=True)}


def test_only_names_rows_and_also_peers():
    assert [row.name for row in choose(["bwrap_oneshot", "exec"])] == ["bwrap_oneshot", "exec"]


def test_an_unknown_row_is_named_with_those_there_are():
    with pytest.raises(InvalidRequest, match=r"no row 'twoshot'.*oneshot_16") as error:
        choose(["twoshot"])
    assert error.value.field == "only"


def test_turns_alternate():
    assert interleave([("a", 3), ("b", 3)]) == ["a", "b", "a", "b", "a", "b"]


def test_rare_ones_are_spread_over_the_whole():
    turns = interleave([("often", 9), ("rare", 3)])
    assert Counter(turns) == {"often": 9, "rare": 3}
    assert [turns.index("rare"), len(turns) - 1 - turns[::-1].index("rare")] == [2, 10]
