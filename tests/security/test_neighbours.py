"""Two sandboxes side by side: neither sees, reaches or starves the other."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from shoal.node.interface import CommandRequest

from .intruder import SMALL, host_ids, host_pids, init_pid, python, within

pytestmark = pytest.mark.root

PLACES = """
    PLACES = ("/tmp", "/dev/shm", "/dev/mqueue", "/var/tmp", "/run", "/workspace")
"""
Pair = tuple[shoal.Sandbox, shoal.Sandbox]


@pytest.fixture
def pair(shoal_home: object) -> Iterator[Pair]:
    with shoal.Sandbox.create(profile=SMALL) as first, shoal.Sandbox.create(profile=SMALL) as second:
        yield first, second


def test_ids_and_owners_are_their_own(pair: Pair) -> None:
    """Kernel accounts (pipes, watches, descriptors in flight) hang on uids."""
    spans = []
    for box in pair:
        box.commands.run("sleep 20", user="user", background=True)
        box.commands.run("sleep 20", background=True)
        uids = {uid for pid in host_pids(box) for uid in host_ids(pid)}
        base = min(uids)
        assert uids == {base, base + 1000}
        assert min(host_ids(init_pid(box), "Gid")) == base
        assert Path(f"/proc/{init_pid(box)}/uid_map").read_text().split() == ["0", str(base), "65536"]
        spans.append(base)
    assert abs(spans[0] - spans[1]) >= 65_536
    assert min(spans) > 1 << 20


def test_all_namespaces_are_their_own(pair: Pair) -> None:
    for kind in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
        links = {Path(f"/proc/{pid}/ns/{kind}").readlink() for pid in (init_pid(pair[0]), init_pid(pair[1]), "self")}
        assert len(links) == 3, kind


def test_nothing_of_one_is_seen_by_the_other(pair: Pair) -> None:
    first, second = pair
    leave = (
        PLACES
        + """
    if os.fork() == 0:
        os.setsid()
        abstract = socket.socket(socket.AF_UNIX); abstract.bind("\\0neighbour"); abstract.listen()
        tcp = socket.create_server(("0.0.0.0", 4242))
        for place in PLACES:
            open(place + "/neighbour", "w").close()
        call(29, 4242, 4096, 0o1666); call(68, 4242, 0o1666); call(64, 4242, 1, 0o1666)
        open("/tmp/ready", "w").close()
        time.sleep(30)
    while not os.path.exists("/tmp/ready"): time.sleep(0.01)
    answer("left")
    """
    )
    look = (
        PLACES
        + """
    def tcp(address):
        with socket.create_connection((address, 4242), timeout=2): pass
    def abstract():
        with socket.socket(socket.AF_UNIX) as s: s.connect("\\0neighbour")
    answer({
        "files": [place for place in PLACES if os.path.exists(place + "/neighbour")],
        "processes": len(list(filter(str.isdigit, os.listdir("/proc")))),
        "shm": call(29, 4242, 4096, 0), "msg": call(68, 4242, 0), "sem": call(64, 4242, 1, 0),
        "tcp": tried(tcp, "127.0.0.1"), "own address": tried(tcp, "10.0.2.15"), "abstract": tried(abstract),
        "unix": [line.split()[-1] for line in open("/proc/net/unix") if "neighbour" in line],
    })
    """
    )
    python(first, leave)
    seen_by_itself = python(first, look)
    assert seen_by_itself["tcp"] == seen_by_itself["abstract"] == seen_by_itself["shm"] == "ok"
    assert python(second, look) == {
        "files": [], "processes": 2, "shm": "ENOENT", "msg": "ENOENT", "sem": "ENOENT", "tcp": "ECONNREFUSED",
        "own address": "ECONNREFUSED", "abstract": "ECONNREFUSED", "unix": [],
    }  # fmt: skip


def test_one_cannot_signal_the_other(pair: Pair) -> None:
    first, second = pair
    handle = second.commands.run("sleep 30", background=True)
    targets = [handle.pid, *host_pids(second), os.getpid()]
    code = f"""
    answer([tried(os.kill, pid, 9) for pid in {targets!r} if not os.path.exists(f"/proc/{{pid}}")])
    """
    assert "ok" not in python(first, code)
    assert second.commands.run(["/bin/true"]).exit_code == 0
    assert host_pids(second)


def test_one_cannot_take_all_terminals(pair: Pair) -> None:
    """kernel.pty.max is an account of the whole machine."""
    first, second = pair
    code = """
    held = []
    try:
        while len(held) < 900: held.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
    except OSError: pass
    if os.fork() == 0: time.sleep(20)
    answer(len(held))
    """
    assert python(first, code) < 512
    handle = second.commands.start(CommandRequest(cmd="tty", terminal=(80, 24), timeout=10))
    assert b"/dev/pts/" in b"".join(piece.data for piece in handle)


def test_one_cannot_starve_the_other_of_kernel_accounts(pair: Pair) -> None:
    """Instances of inotify, buffers of pipes, descriptors in flight: each takes what it gets and holds it."""
    first, second = pair
    hold = """
    import fcntl
    inotify = []
    while call(294, 0) == "ok" and len(inotify) < 900: inotify.append(1)
    pipes, grown = [], 0
    try:
        for _ in range(40):
            pipes.append(os.pipe()); grown += fcntl.fcntl(pipes[-1][1], 1031, 1 << 20)
    except OSError: pass
    answer([len(inotify), grown])
    """
    program = hold.replace("answer(", "if os.fork() == 0: time.sleep(20)\n    answer(")
    taken = python(first, program)
    assert python(second, hold) == taken
    # And the host's own root, whom a shared owner would have starved as well.
    descriptor = ctypes.CDLL(None).inotify_init()
    assert descriptor >= 0
    os.close(descriptor)


def test_a_fork_bomb_does_not_slow_a_neighbour_to_a_stop(pair: Pair) -> None:
    first, second = pair
    bomb = first.commands.run(":(){ :|:& };:; sleep 30", background=True, timeout=4)
    for _ in range(5):
        within(5, lambda: second.commands.run(["/bin/true"], timeout=5, check=True))
    bomb.wait()
    within(5, first.kill)
