from __future__ import annotations

import os
import random
from collections import Counter
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.sandbox.processors import Processors, as_mask

ONE = shoal.Profile(cpu=1, disk=16 << 20)


def test_sandboxes_are_spread_evenly() -> None:
    machine = Processors(range(8))
    on = Counter(number for _ in range(20) for number in machine.take(2))
    assert on == dict.fromkeys(range(8), 5)


def test_after_many_ends_in_any_order_they_still_are() -> None:
    machine, live = Processors(range(6)), []
    for seed in range(500):
        live.append(machine.take(1 + seed % 3))
        if len(live) > 12:
            machine.give(live.pop(random.Random(seed).randrange(len(live))))
    load = Counter(number for chosen in live for number in chosen)
    assert max(load.values()) - min(load.values()) <= 2
    for chosen in live:
        machine.give(chosen)
    assert set(machine._load.values()) == {0}


def test_who_has_all_needs_none_chosen() -> None:
    machine = Processors([0, 3, 5])
    assert machine.take(3) == machine.take(7) == ()
    assert set(machine.take(2)) <= {0, 3, 5}


def test_those_of_this_process_by_default() -> None:
    assert Processors().count == len(os.sched_getaffinity(0))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one processor only")
def test_live_sandboxes_are_spread_over_this_machine() -> None:
    count = 2 * len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        boxes = [stack.enter_context(shoal.Sandbox.create(profile=ONE)) for _ in range(count)]
        on = Counter(box.commands.run("taskset -cp $$ | sed 's/.*: //'").stdout.strip() for box in boxes)
        assert on == {str(number): 2 for number in os.sched_getaffinity(0)}
        boxes[0].kill()
        boxes[1].kill()
        again = [stack.enter_context(shoal.Sandbox.create(profile=ONE)) for _ in range(2)]
        on = Counter(box.commands.run("taskset -cp $$ | sed 's/.*: //'").stdout.strip() for box in boxes[2:] + again)
        assert on == {str(number): 2 for number in os.sched_getaffinity(0)}


@given(st.sets(st.integers(0, 300), min_size=1))
def test_masks_are_whole_words(chosen: set[int]) -> None:
    mask = as_mask(chosen)
    assert len(mask) % 8 == 0
    assert {number for number in range(len(mask) * 8) if mask[number // 8] >> number % 8 & 1} == chosen
