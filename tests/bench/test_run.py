import os
import signal
import time

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from shoal.bench.memory import descendants
from shoal.bench.process import RowProcess
from shoal.bench.rows import find
from shoal.bench.run import measure
from shoal.cli.bench import bench
from shoal.errors import PlatformError


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    """A data folder of the test's own, to see what is left in it."""
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    return tmp_path


def run_command(*arguments):
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, arguments)


def test_json_has_the_machine_and_the_rows():
    result = run_command("--quick", "--json", "--only", "python_floor", "--only", "exec")
    assert result.exit_code == 0, result.output
    document = msgspec.json.decode(result.stdout)
    assert {"machine", "rows"} <= set(document)
    assert document["machine"]["cores"] >= 1
    assert set(document["rows"]) == {"python_floor", "exec"}
    for row in document["rows"].values():
        assert {"n", "min", "p50", "p99", "unit", "command"} <= set(row)
        assert 0 < row["min"] <= row["p50"] <= row["p99"]
        assert row["n"] == 5
    assert set(document["ratios"]) == {"exec/python_floor"}


def test_a_missing_peer_is_absent_with_a_reason_and_the_others_go_on(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    report = measure([find("python_floor"), find("bwrap_oneshot")], quick=True)
    assert set(report.rows) == {"python_floor"}
    assert "apt install bubblewrap" in report.absent["bwrap_oneshot"]


def test_nothing_is_left_in_the_data_folder(data):
    measure([find("python_floor")], quick=True)
    assert list(data.iterdir()) == []


def test_an_interrupted_run_ends_its_workers_and_leaves_nothing(data):
    def interrupt(progress):
        if progress.doing == "measuring":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure([find("python_floor")], quick=True, tell=interrupt)
    assert descendants(os.getpid()) == []
    assert list(data.iterdir()) == []


def test_a_worker_that_dies_is_an_error_with_its_name(data):
    with RowProcess("python_floor", data / "row", many=1, cycles=1) as worker:
        worker.wait_ready()
        (pid,) = descendants(os.getpid())
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
        with pytest.raises(PlatformError, match="python_floor"):
            worker.measure()


def test_a_worker_ends_with_its_run(data):
    with RowProcess("python_floor", data / "row", many=1, cycles=1) as worker:
        worker.wait_ready()
    assert descendants(os.getpid()) == []


def test_misuse_is_refused():
    assert "goes without --json" in str(run_command("--json", "--markdown").exception)
    assert "no row 'nothing'" in str(run_command("--only", "nothing").exception)
