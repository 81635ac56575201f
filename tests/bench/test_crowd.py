import time

import pytest

import shoal
from shoal.bench import crowd
from shoal.bench.job import Place
from shoal.sdk import embedded


@pytest.fixture(autouse=True)
def own_node(shoal_home):
    """Ended with the test: others here want a process without children."""
    yield
    embedded.close()


def test_what_lives_and_what_is_dead_but_not_reaped_is_counted(box: shoal.Sandbox) -> None:
    assert crowd._count(box) == {"processes": 0, "zombies": 0}
    with_a_zombie = box.commands.run("sleep 0 & exec sleep 60", background=True)
    deadline = time.monotonic() + 10
    while (found := crowd._count(box)) != {"processes": 2, "zombies": 1} and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found == {"processes": 2, "zombies": 1}
    with_a_zombie.kill()


def test_children_that_outlive_their_command_are_reaped(tmp_path) -> None:
    with crowd.reap(Place(tmp_path, many=1, cycles=50)) as job:
        sample = job.once()
    assert sample.value == 0
    assert sample.parts == {"processes": 0, "zombies": 0}


def test_a_hostile_neighbour_is_one_and_ends_with_the_row(tmp_path) -> None:
    with crowd.neighbour(Place(tmp_path, many=1, cycles=1)) as job:
        hostile = [box for box in shoal.Sandbox.list() if box.profile.memory == shoal.types.PROFILES["small"].memory]
        assert len(hostile) == 1
        assert 0 < job.once().value < 5000
    assert hostile[0].id not in {box.id for box in shoal.Sandbox.list()}
