"""A process that uses Shoal may fork: sandboxes are its own and not its children's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import residue


def run(script: str, timeout: float = 60) -> tuple[str, str, int]:
    """Output, errors and pid of a Python of its own."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return out, err, process.pid


def test_a_child_that_outlives_its_parent_keeps_none_of_its_sandboxes() -> None:
    script = """
import os, time, shoal
box = shoal.Sandbox.create()
box.commands.run("sleep 600 & true")
child = os.fork()
if child == 0:
    os.close(1); os.close(2)
    time.sleep(600)
    os._exit(0)
print(child, flush=True)
os.kill(os.getpid(), 9)
"""
    out, err, pid = run(script)
    child = int(out)
    try:
        assert err == ""
        assert os.path.exists(f"/proc/{child}")
        assert not residue.settled(lambda: inits_of(pid))
        assert not residue.settled(lambda: residue.cgroups(pid))
    finally:
        os.kill(child, signal.SIGKILL)


def inits_of(pid: int) -> list[residue.Process]:
    """Sandboxes that the node of a dead process left: they came to us, since nobody else is their parent."""
    mine = {path.name for path in residue.cgroups(pid)}
    found = []
    for process in residue.sandbox_processes():
        try:
            with open(f"/proc/{process.pid}/cgroup") as file:
                text = file.read()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if any(name in text for name in mine):
            found.append(process)
    return found


def test_a_child_does_not_end_the_sandboxes_of_its_parent() -> None:
    script = """
import os, shoal
box = shoal.Sandbox.create()
for how in ("_exit", "exit"):
    child = os.fork()
    if child == 0:
        os._exit(0) if how == "_exit" else exit(0)
    os.waitpid(child, 0)
    print(box.commands.run("echo alive").stdout, end="")
"""
    out, err, _ = run(script)
    assert (out, err) == ("alive\nalive\n", "")


def test_a_child_may_have_sandboxes_of_its_own() -> None:
    script = """
import os, sys, shoal
box = shoal.Sandbox.create()
child = os.fork()
if child == 0:
    with shoal.Sandbox.create() as own:
        print(own.commands.run("echo child").stdout, end="", flush=True)
    exit(0)
os.waitpid(child, 0)
print(box.commands.run("echo parent").stdout, end="")
"""
    out, err, pid = run(script)
    assert (out, err) == ("child\nparent\n", "")
    assert not residue.settled(lambda: residue.cgroups(pid))


def test_a_pool_of_forked_workers() -> None:
    script = """
import multiprocessing, shoal
def work(number):
    with shoal.Sandbox.create() as box:
        return int(box.commands.run(f"echo $(({number} * 2))").stdout)
if __name__ == "__main__":
    shoal.Sandbox.create().kill()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(work, range(6)))
        pool.close()
        pool.join()
"""
    out, err, _ = run(script)
    assert (out, err) == ("[0, 2, 4, 6, 8, 10]\n", "")


def test_a_program_that_a_fork_starts_inherits_no_descriptor() -> None:
    script = """
import subprocess, shoal
with shoal.Sandbox.create() as box:
    box.commands.run("true")
    print(subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True).stdout)
"""
    out, err, _ = run(script)
    assert err == ""
    assert "socket:" not in out
    assert "pidfd" not in out


def test_ctrl_c_interrupts_a_call_and_ends_the_sandboxes() -> None:
    script = """
import time, shoal
box = shoal.Sandbox.create()
print("ready", flush=True)
try:
    box.commands.run("sleep 600")
except KeyboardInterrupt:
    for _ in range(50):
        count = box.commands.run("pgrep -c sleep").stdout.strip()
        if count == "0":
            break
        time.sleep(0.05)
    print(count)
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "0\n"
        assert process.wait(10) == 0
    assert not residue.settled(lambda: residue.cgroups(process.pid))
