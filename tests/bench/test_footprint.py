import os
import subprocess
import time

import pytest

from shoal.bench.footprint import footprint, remaining, surroundings


def test_a_process_that_stays_is_counted():
    with subprocess.Popen(["sleep", "60"]) as process:
        before = footprint(os.getpid())
        assert process.pid in {pid for pid, _ in before.processes}
        assert remaining(before, os.getpid())[0] >= 1
        process.kill()
    assert remaining(before, os.getpid()) == (0, 0)


def test_namespaces_of_this_process_are_not_its_childrens():
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not footprint(os.getpid()).namespaces
        process.kill()


def test_files_of_its_own_folder_count_and_of_the_shared_one_those_with_its_name(tmp_path):
    own, shared = tmp_path / "own", tmp_path / "shared"
    (own / "tree").mkdir(parents=True)
    shared.mkdir()
    before = surroundings(own, shared, 77)
    for path in (own / "tree" / "file", shared / "shoal-77-1", shared / "shoal-78-1"):
        path.touch()
    left = surroundings(own, shared, 77).files - before.files
    assert left == {str(own / "tree" / "file"), str(shared / "shoal-77-1")}


def test_an_open_descriptor_of_the_node_is_seen(tmp_path):
    before = surroundings(tmp_path, tmp_path, os.getpid())
    with (tmp_path / "file").open("w"):
        assert surroundings(tmp_path, tmp_path, os.getpid()).descriptors == before.descriptors + 1


@pytest.mark.root
def test_a_namespace_that_the_node_still_holds_is_counted():
    with subprocess.Popen(["unshare", "--uts", "sleep", "60"]) as process:
        while not (before := footprint(os.getpid())).namespaces:
            time.sleep(0.01)
        held = os.open(f"/proc/{process.pid}/ns/uts", os.O_RDONLY)
        process.kill()
    assert remaining(before, os.getpid()) == (0, 1)
    os.close(held)
    assert remaining(before, os.getpid()) == (0, 0)
