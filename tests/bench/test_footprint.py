import os
import subprocess

from shoal.bench.footprint import footprint, remaining, surroundings


def test_a_process_that_stays_is_counted():
    with subprocess.Popen(["sleep", "60"]) as process:
        before = footprint(os.getpid())
        assert process.pid in {pid for pid, _ in before.processes}
        assert remaining(before)[0] >= 1
        process.kill()
    assert remaining(before) == (0, 0)


def test_namespaces_of_this_process_are_not_its_childrens():
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not footprint(os.getpid()).namespaces
        process.kill()


def test_files_and_directories_are_listed_but_lock_files_are_not(tmp_path):
    before = surroundings([tmp_path], os.getpid())
    (tmp_path / "slots").mkdir()
    (tmp_path / "slots" / "0").touch()
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").touch()
    left = surroundings([tmp_path], os.getpid()).files - before.files
    assert left == {str(tmp_path / name) for name in ("tree", "tree/file")}
