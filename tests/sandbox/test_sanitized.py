"""The helper built with ASan and UBSan does real work, and neither has anything to say."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

INIT = Path(__file__).parents[2] / "init"
# Compiled in, since the helper is started with an empty environment. At its exit it frees nothing, on purpose.
OPTIONS = 'const char *__asan_default_options(void) { return "detect_leaks=0:use_sigaltstack=0"; }\n'
FLAGS = ("-std=gnu11", "-O1", "-g", "-w", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined",
         "-static-libasan", "-static-libubsan")  # fmt: skip

WORK = """
import os, sys, tempfile
from pathlib import Path
from shoal import errors
from shoal.sandbox import spawner
spawner.binary = lambda: Path(sys.argv[1])
import shoal

def refused(error, call):
    try:
        call()
    except error:
        return
    raise AssertionError("not refused")

def commands(box):
    run = box.commands.run
    assert run("echo out; echo err >&2; exit 3").exit_code == 3
    assert run("cat", stdin=bytes(range(256)) * 4000).stdout_total == 1024000
    assert run("yes | head -c 3000000", output_limit=4096).truncated
    assert run("sleep 60 & setsid sleep 60 & wait", timeout=0.3).limit == "timeout"
    assert run(["sh", "-c", "kill -SEGV $$"]).signal == 11
    assert run(["env"], env={"A" * 1000: "b" * 100000}).exit_code == 0
    for _ in range(30):
        run("true & sleep 0 & exec sleep 0")
    refused(errors.NotFound, lambda: run(["no-such-program"]))
    refused(errors.PermissionDenied, lambda: run(["/etc/passwd"]))
    refused(errors.NotFound, lambda: run("true", cwd="/no/such/folder"))
    handles = [run("cat; exit 5", background=True) for _ in range(8)]
    for handle in handles:
        handle.send_stdin("x" * 200000)
        handle.close_stdin()
    assert [handle.wait().exit_code for handle in handles] == [5] * 8
    handle = run("sleep 60", background=True)
    handle.kill(15)
    assert handle.wait().signal == 15
    run("exec 3<>/dev/null; kill -STOP 1; kill -KILL 1; echo $$")

def sessions(box):
    with box.shell() as shell:
        shell.run("sleep 61 &")
        for number in range(20):
            assert shell.run(f"echo {number}; (exit {number})").exit_code == number
        assert shell.run("head -c 3000000 /dev/zero; head -c 3000000 /dev/zero >&2").stderr_total == 3000000
        assert shell.run(": " + "x" * 300000).exit_code == 0
        assert shell.run("echo x; sleep 60", timeout=0.3).stdout == "x\\n"
        assert shell.run("printf %1000s >&10; jobs -r | wc -l").exit_code is not None
        refused(ValueError, lambda: shell.run("yes", on_stdout=lambda text: int("no number")))
        assert shell.run("exit 5").exit_code == 5
        refused(errors.SessionClosed, lambda: shell.run("true"))
    pty = box.pty.create("stty raw; head -c 300000 > /dev/null; stty size")
    pty.resize(90, 30)
    pty.send("y" * 300000)
    assert pty.wait().exit_code == 0

def files(box):
    files = box.files
    for size in (0, 1, 65536, 5000000):
        files.write("/workspace/deep/er/file", os.urandom(size))
        assert len(files.read("/workspace/deep/er/file", "bytes")) == size
    files.append("/workspace/log", "one")
    files.append("/workspace/log", "two")
    assert files.read("/workspace/log") == "onetwo"
    files.write("/workspace/" + "n" * 255, "")
    refused(errors.ShoalError, lambda: files.write("/workspace/" + "n" * 256, ""))
    files.make_dir("/workspace/a/b/c")
    files.rename("/workspace/a/b", "/workspace/moved")
    files.remove("/workspace/a")
    refused(errors.NotFound, lambda: files.read("/workspace/a"))
    box.commands.run("ln -s loop loop; mkfifo pipe; mkdir many; cd many; touch $(seq 3000)")
    refused(errors.ShoalError, lambda: files.read("/workspace/loop"))
    assert len(files.list("/workspace/many")) == 3000
    assert files.stat("/workspace/pipe").kind == "fifo"
    files.remove("/workspace/many")
    assert box.changes()

def trees(box):
    script = "mkdir -p t/a/b; cd t; echo x > f; ln f a/h; ln -s f l; mkfifo p; truncate -s 1G hole; echo end >> hole"
    names = "; touch -d 1969-01-01T00:00:00.5 f; touch $(printf 'n%.0s' $(seq 255)) 'a b'; seq 100000 > a/b/many"
    with tempfile.TemporaryDirectory() as folder, box.files.watch("/workspace", recursive=True) as watch:
        box.commands.run(script + names, check=True)
        for number in range(3):
            box.files.download("/workspace/t", folder + "/t")
            box.files.upload(folder + "/t", "/workspace/u", owners=number == 2)
        box.files.upload(folder + "/t/hole", "/workspace/u/hole")
        refused(errors.FileExists, lambda: box.files.upload(folder + "/t", "/workspace/t/f"))
        box.commands.run("mv t v; mv v/a /tmp/a; mv /tmp/a a; rm -r v u a; touch end", check=True)
        assert any(event.path.endswith("/end") for event in watch)
        box.files.remove("/workspace")
        refused(errors.NotFound, lambda: [event for event in watch])
    box.commands.run(["mkdir", "/workspace"], cwd="/", check=True)

for _ in range(3):
    with shoal.Sandbox.create() as box:
        commands(box)
        sessions(box)
        files(box)
        trees(box)
with shoal.Sandbox.create(network="pypi", user=1000) as box:
    commands(box)
print("done")
"""


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc, whose sanitizers can be linked statically")
    folder = tmp_path_factory.mktemp("sanitized")
    (folder / "options.c").write_text(OPTIONS)
    sources = [*INIT.glob("*.c"), folder / "options.c"]
    built = subprocess.run([compiler, *FLAGS, "-o", folder / "init", *sources], capture_output=True, text=True)
    if built.returncode != 0:
        pytest.skip(f"no sanitizers here: {built.stderr[-500:]}")
    return folder / "init"


@pytest.mark.slow
@pytest.mark.root
def test_real_work_shows_no_error(sanitized: Path) -> None:
    outcome = subprocess.run([sys.executable, "-c", WORK, sanitized], capture_output=True, text=True, timeout=240)
    said = outcome.stderr
    assert "ERROR: AddressSanitizer" not in said, said
    assert "runtime error" not in said, said
    assert (outcome.returncode, outcome.stdout) == (0, "done\n"), said
