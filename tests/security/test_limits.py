"""Limits that the kernel holds, and what is charged to whom: measured on the host."""

from __future__ import annotations

import re
import textwrap
import time
from pathlib import Path

import pytest

import shoal
from shoal.types import MiB, Profile

from .intruder import SMALL, USERS, host_available, host_pids, python, still_works

pytestmark = pytest.mark.root

WRITABLE = ("/tmp", "/dev/shm", "/var/tmp", "/workspace", "/usr/local/lib", "/run/lock")
ROOM = 48 * MiB
"""What the machine's other load may move meanwhile."""


def _free(box: shoal.Sandbox) -> None:
    box.commands.run("rm -rf /tmp/* /dev/shm/* /var/tmp/* /workspace/* /usr/local/lib/fill* /run/lock/*")


@pytest.mark.parametrize("user", USERS)
def test_disk_is_full_everywhere_at_once(small: shoal.Sandbox, user: str) -> None:
    """T15: each writable place is in the one account; then there is room again."""
    before = host_available()
    code = f"""
    found, total = {{}}, 0
    for place in {WRITABLE!r}:
        try:
            with open(place + "/fill", "wb", buffering=0) as file:
                while True: total += file.write(bytes(1 << 20))
        except OSError as error: found[place] = errno.errorcode[error.errno]
    answer([found, total])
    """
    found, total = python(small, code, user)
    assert set(found.values()) <= {"ENOSPC", "EDQUOT", "EACCES"}
    assert "ENOSPC" in found.values()
    assert total <= SMALL.disk
    assert before - host_available() < SMALL.disk + ROOM
    still_fails = small.commands.run("head -c 1000000 /dev/zero > /tmp/more")
    assert still_fails.exit_code != 0
    _free(small)
    small.commands.run("head -c 1000000 /dev/zero > /tmp/more", check=True)
    still_works(small)


def test_inodes_run_out_on_every_writable_mount(small: shoal.Sandbox) -> None:
    mounts = [
        line.split()[1] for line in small.commands.run("cat /proc/self/mounts").stdout.splitlines() if "ro," not in line
    ]
    code = f"""
    found = {{}}
    for place in {mounts!r} + ["/tmp", "/workspace"]:
        folder, made = place.rstrip("/") + "/inodes", 0
        how = tried(os.mkdir, folder)
        if how == "ok" or how == "EEXIST":
            try:
                while made < 6000:
                    os.mkdir(f"{{folder}}/{{made}}"); made += 1
                how = "ok"
            except OSError as error: how = errno.errorcode[error.errno]
            for number in range(made): os.rmdir(f"{{folder}}/{{number}}")
        found[place] = how, made
    answer(found)
    """
    found = python(small, code)
    assert {"/", "/dev/shm", "/usr"} <= found.keys()
    endless = {place: how for place, how in found.items() if how[0] == "ok"}
    assert endless == {}
    assert max(made for _, made in found.values()) <= SMALL.inodes
    still_works(small)


def test_message_queues_are_bounded(small: shoal.Sandbox) -> None:
    code = """
    library = ctypes.CDLL("librt.so.1", use_errno=True)
    for name, value in (("queues_max", 1 << 20), ("msg_max", 1 << 16), ("msgsize_max", 1 << 24)):
        tried(lambda: open(f"/proc/sys/fs/mqueue/{name}", "w").write(str(value)))
    made = 0
    while made < 5000 and library.mq_open(f"/q{made}".encode(), os.O_CREAT | os.O_RDWR, 0o600, None) != -1:
        made += 1
    answer([made, errno.errorcode.get(ctypes.get_errno())])
    """
    made, how = python(small, code)
    assert made < 2000
    assert how in ("ENOSPC", "EMFILE", "ENOMEM")


@pytest.mark.parametrize(
    "hoard",
    [
        "held.append(b'x' * (1 << 20))",
        "held.append(os.memfd_create('m')); os.write(held[-1], bytes(1 << 20))",
        "segment = _libc.shmget(0, 1 << 20, 0o1600); a = _libc.shmat(segment, None, 0); ctypes.memset(a, 1, 1 << 20)",
        "a, b = socket.socketpair(); held.append((a, b)); a.setblocking(False); a.send(bytes(1 << 17))",
    ],
    ids=["heap", "memfd", "shm", "unix sockets"],
)
def test_memory_of_every_kind_is_charged(small: shoal.Sandbox, hoard: str) -> None:
    before = host_available()
    code = f"""
    held = []
    _libc.shmat.restype = ctypes.c_void_p; _libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    _libc.shmget.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]
    ctypes.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    for _ in range(1 << 11):
        try: {hoard}
        except OSError: break
    time.sleep(0.5)
    """
    handle = small.commands.run(["python3", "-c", _prelude() + textwrap.dedent(code)], background=True, timeout=20)
    lowest = before
    result = None
    deadline = time.monotonic() + 20
    while result is None and time.monotonic() < deadline:
        lowest = min(lowest, host_available())
        if len(host_pids(small)) == 1:
            result = handle.wait()
        time.sleep(0.02)
    assert before - lowest < SMALL.memory + SMALL.disk + 4 * MiB + 2 * ROOM
    still_works(small)


def _prelude() -> str:
    return "import ctypes, os, socket, time\n_libc = ctypes.CDLL(None, use_errno=True)\n"


@pytest.mark.parametrize("kind", ["tcp", "udp"])
def test_buffers_of_the_loopback_are_bounded(small: shoal.Sandbox, kind: str) -> None:
    """They are an account of the machine (tcp_mem, udp_mem); the sandbox pays only where the kernel is told to."""
    before = _socket_pages(kind)
    code = """
    held, server = [], socket.create_server(("127.0.0.1", 0), backlog=1000)
    for _ in range(450):
        try:
            if KIND == "tcp":
                a = socket.create_connection(server.getsockname())
                b = server.accept()[0]
            else:
                a, b = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
                b.bind(("127.0.0.1", 0))
                a.connect(b.getsockname())
            held += [a, b]
            a.setblocking(False)
            for _ in range(1000 if KIND == "tcp" else 20): a.send(bytes(32768))
        except OSError: pass
    open("/tmp/full", "w").close()
    time.sleep(10)
    """.replace("KIND", repr(kind))
    handle = small.commands.run(["python3", "-c", _prelude() + textwrap.dedent(code)], background=True, timeout=15)
    deadline = time.monotonic() + 12
    while not _is_full(small) and time.monotonic() < deadline:
        time.sleep(0.05)
    grown = (_socket_pages(kind) - before) * 4096
    handle.kill()
    handle.wait()
    assert grown < SMALL.memory


def _is_full(box: shoal.Sandbox) -> bool:
    """With version 2 the buffers are memory like any other, and whoever looks may be killed for the lack of it."""
    try:
        return box.files.exists("/tmp/full")
    except shoal.Interrupted:
        return False


def _socket_pages(kind: str) -> int:
    """Pages that sockets of that kind hold on the whole machine."""
    line = next(
        line for line in Path("/proc/net/protocols").read_text().splitlines() if line.startswith(kind.upper() + " ")
    )
    return int(line.split()[3])


def test_connections_make_no_entries_that_nobody_pays_for(small: shoal.Sandbox) -> None:
    """Loopback UDP once made 262,144 entries of conntrack, 63 MiB of the kernel's."""
    code = """
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for port in range(1024, 21024):
        tried(sender.sendto, b"x", ("127.0.0.1", port)); tried(sender.sendto, b"x", ("10.0.2.15", port))
    count = "/proc/sys/net/netfilter/nf_conntrack_count"
    answer(int(open(count).read()) if os.path.exists(count) else 0)
    """
    before = _conntrack_slab()
    inside = python(small, code)
    assert inside < 100
    assert _conntrack_slab() - before < 1000


def _conntrack_slab() -> int:
    match = re.search(r"^nf_conntrack\s+(\d+)", Path("/proc/slabinfo").read_text(), re.MULTILINE)
    return int(match[1]) if match else 0


def test_processes_are_limited(small: shoal.Sandbox) -> None:
    code = """
    made = 0
    try:
        while made < 500:
            if os.fork() == 0: time.sleep(20); os._exit(0)
            made += 1
    except OSError as error:
        answer([made, errno.errorcode[error.errno]])
        time.sleep(1)
        os.kill(-1, 9)
    """
    prelude = _prelude() + "import errno\ndef answer(value): print(value, flush=True)\n"
    program = prelude + textwrap.dedent(code)
    handle = small.commands.run(["python3", "-c", program], background=True, timeout=20)
    deadline = time.monotonic() + 15
    while len(host_pids(small)) < SMALL.processes and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    assert len(host_pids(small)) <= SMALL.processes + 1
    handle.kill()
    assert "EAGAIN" in handle.wait().stdout
    still_works(small)


def test_cpu_quota(small: shoal.Sandbox) -> None:
    with shoal.Sandbox.create(profile=shoal.Profile(cpu=0.25, memory=64 * MiB, disk=16 * MiB, processes=32)) as box:
        result = box.commands.run("for i in 1 2 3; do (while :; do :; done) & done; wait", timeout=2)
        assert result.limit == "timeout"
        assert result.cpu_seconds < 0.25 * 2 + 0.5


def test_open_files_cannot_be_raised(small: shoal.Sandbox) -> None:
    limits = python(small, "answer(resource.getrlimit(resource.RLIMIT_NOFILE))")
    assert limits == [SMALL.open_files, SMALL.open_files]
    assert small.commands.run("ulimit -n 100000").exit_code != 0


def test_an_upper_on_disk_is_as_bounded() -> None:
    """The host's disk gives no more than the profile's bytes and inodes, /dev/shm included, and none of it stays."""
    profile = Profile(cpu=2, memory=128 * MiB, disk=32 * MiB, processes=32, inodes=2048, upper="disk")
    with shoal.Sandbox.create(profile=profile) as box:
        code = f"""
        total = 0
        for place in {WRITABLE!r}:
            try:
                with open(place + "/fill", "wb", buffering=0) as file:
                    while total < (64 << 20): total += file.write(bytes(1 << 20))
            except OSError as error: assert error.errno == errno.ENOSPC, (place, error)
        for place in {WRITABLE!r}: os.path.exists(place + "/fill") and os.remove(place + "/fill")
        made = 0
        try:
            os.mkdir("/tmp/many")
            while made < 6000: os.mknod(f"/tmp/many/{{made}}"); made += 1
        except OSError as error: assert error.errno == errno.ENOSPC, error
        answer([total, made])
        """
        total, made = python(box, code)
        assert total <= profile.disk
        assert made <= profile.inodes
        assert box.commands.run("rm -r /tmp/many; echo x > /tmp/x").exit_code == 0
