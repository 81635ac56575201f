import subprocess
import sys
from contextlib import contextmanager

import pytest

from shoal.bench import bulk
from shoal.bench.job import Place
from shoal.sdk import embedded


@pytest.fixture(autouse=True)
def own_node(shoal_home):
    """Ended with the test: others here want a process without children."""
    yield
    embedded.close()


@contextmanager
def small(monkeypatch, tmp_path, name):
    """The job of a row with a hundredth of its bytes."""
    monkeypatch.setattr(bulk, "_OUTPUT", 2_000_000)
    monkeypatch.setattr(bulk, "_FILE", 1 << 20)
    monkeypatch.setattr(bulk, "_WRITER", "head -c 2000000 /dev/zero")
    with getattr(bulk, name)(Place(tmp_path, many=1, cycles=1)) as job:
        yield job


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("socket_copy", set()),
        ("output_200m", {"bytes"}),
        ("upload_64m", {"upload", "write_alone"}),
        ("download_64m", {"bytes", "download"}),
    ],
)
def test_a_rate_and_those_of_other_ways(monkeypatch, tmp_path, name, parts):
    with small(monkeypatch, tmp_path, name) as job:
        sample = job.once()
    assert sample.value > 0
    assert set(sample.parts) == parts
    assert all(rate > 0 for rate in sample.parts.values())


def test_bytes_that_do_not_come_are_no_rate(monkeypatch, tmp_path):
    with small(monkeypatch, tmp_path, "output_200m") as job:
        monkeypatch.setattr(bulk, "_WRITER", "head -c 1999999 /dev/zero")
        with pytest.raises(RuntimeError, match="1999999 bytes came"):
            job.once()


def test_the_node_stays_small_while_much_passes(tmp_path):
    """In full: 200 MB out, 64 MiB in and out twice."""
    with bulk.bulk_memory(Place(tmp_path, many=1, cycles=1)) as job:
        assert job.once().value <= 64


def test_growth_is_seen():
    """In a child: the largest size of this process may be that of an earlier test."""
    code = (
        "from shoal.bench import bulk; before = bulk._peak(); held = bytearray(200 << 20); print(bulk._peak() - before)"
    )
    grown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert float(grown) >= 190
