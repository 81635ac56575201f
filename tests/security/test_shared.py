"""What sandboxes of one machine share (layers, /sys, accounts of the kernel) is no way from one to another."""

from __future__ import annotations

import ctypes
import mmap
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from shoal.sandbox.box import NamespaceBox

from .intruder import SMALL, host_available, node, python, still_works

pytestmark = pytest.mark.root

Pair = tuple[shoal.Sandbox, shoal.Sandbox]


@pytest.fixture
def siblings(shoal_home: Path) -> Iterator[Pair]:
    """Two of the same spawner, which share what a spawner keeps."""
    boxes = [shoal.Sandbox.create(profile=SMALL)]
    try:
        while len(boxes) < 2 or _shard(boxes[-1]) != _shard(boxes[0]):
            boxes.append(shoal.Sandbox.create(profile=SMALL))
        yield boxes[0], boxes[-1]
    finally:
        for box in boxes:
            box.kill()


def _shard(box: shoal.Sandbox) -> object:
    live = node()._find(box.id).box
    assert isinstance(live, NamespaceBox)
    return live._shard


def test_a_lease_holds_up_no_neighbour(siblings: Pair) -> None:
    """The file is every sandbox's, and whoever opens a file under a lease waits for 45 s."""
    code = """
    import fcntl
    fd = os.open("/sys/devices/system/cpu/online", os.O_RDONLY)
    answer([tried(fcntl.fcntl, fd, fcntl.F_SETLEASE, kind) for kind in (fcntl.F_WRLCK, fcntl.F_RDLCK)]
           + [tried(fcntl.fcntl, os.open("/sys/devices/system", os.O_RDONLY), fcntl.F_NOTIFY, 0x7fffffff)])
    """
    assert python(siblings[0], code) == ["EINVAL"] * 3
    start = time.monotonic()
    siblings[1].commands.run("cat /sys/devices/system/cpu/online; nproc", check=True, timeout=20)
    assert time.monotonic() - start < 15


def test_standard_input_is_nobody_elses(siblings: Pair) -> None:
    """Flags, locks and signal owners hang on an open file, and that of /dev/null was once given to all."""
    code = """
    import fcntl
    fcntl.fcntl(0, fcntl.F_SETFL, os.O_APPEND | os.O_NONBLOCK | os.O_ASYNC)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.flock(0, fcntl.LOCK_EX)
    if os.fork() == 0: os.close(1); os.close(2); time.sleep(20)
    answer("held")
    """
    look = """
    import fcntl
    answer([fcntl.fcntl(0, fcntl.F_GETFL) & (os.O_APPEND | os.O_NONBLOCK | os.O_ASYNC), fcntl.fcntl(0, fcntl.F_GETOWN),
            tried(fcntl.flock, 0, fcntl.LOCK_EX | fcntl.LOCK_NB)])
    """
    assert python(siblings[0], code) == "held"
    assert python(siblings[1], look) == [0, 0, "ok"]


def test_the_page_cache_of_layers_stays(siblings: Pair) -> None:
    """Thrown out by one, all others would have to read it from the disk again."""
    path = max(Path("/usr/bin").glob("*"), key=lambda entry: entry.stat().st_size if entry.is_file() else 0)
    path.read_bytes()
    assert _resident(path) > 0.9
    code = f"""
    import mmap
    fd = os.open("{path}", os.O_RDONLY)
    for _ in range(3):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as view:
            view[0], view[-1]
            for advice in (4, 20, 21): tried(view.madvise, advice)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    answer(call(451, fd, b"\\0" * 16, ctypes.create_string_buffer(64), 0))
    """
    assert python(siblings[0], code) == "ENOSYS", "cachestat tells what a neighbour has read"
    assert _resident(path) > 0.9


def _resident(path: Path) -> float:
    """The part of a file that is in memory."""
    size = path.stat().st_size
    found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    with path.open("rb") as file:
        address = ctypes.c_void_p(libc.mmap(None, ctypes.c_size_t(size), 1, 2, file.fileno(), ctypes.c_long(0)))
    assert libc.mincore(address, ctypes.c_size_t(size), found) == 0
    libc.munmap(address, ctypes.c_size_t(size))
    return sum(page & 1 for page in found) / len(found)


@pytest.mark.parametrize("user", ["root", "user"])
def test_numbers_of_the_whole_machine_are_not_taken(siblings: Pair, user: str) -> None:
    """aio contexts, the memory for the code of filters, huge pages, flow labels: each is one pool for all."""
    code = """
    import mmap
    context = ctypes.c_ulong(0)
    program = struct.pack("HBBI", 6, 0, 0, 0xffff)
    kept = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", 1, ctypes.addressof(kept))
    answer({
        "aio": call(206, 1, ctypes.byref(context)),
        "socket filter": tried(socket.socket().setsockopt, 1, 26, header),
        "reuseport filter": tried(socket.socket(2, 2).setsockopt, 1, 51, header),
        "flow label": tried(socket.socket(10, 2).setsockopt, 41, 32, b"\\0" * 32),
        "seccomp filter": call(317, 1, 0, header),
        "by prctl": call(157, 22, 2, header, 0, 0),
        "huge pages": tried(mmap.mmap, -1, 1 << 21, flags=0x40022),
        "huge file": call(319, b"huge", 4),
        "huge segment": call(29, 77, 1 << 21, 0o4600 | 0o1000),
        "secret memory": call(447, 0),
    })
    """
    aio = int(Path("/proc/sys/fs/aio-nr").read_text())
    found = python(siblings[0], code, user)
    assert found == {
        "aio": "ENOSYS", "socket filter": "ENOPROTOOPT", "flow label": "ENOPROTOOPT",
        "reuseport filter": "ENOPROTOOPT", "seccomp filter": "EINVAL",
        "by prctl": "EINVAL", "huge pages": "ENOMEM", "huge file": "ENOSYS", "huge segment": "EPERM",
        "secret memory": "ENOSYS",
    }  # fmt: skip
    assert int(Path("/proc/sys/fs/aio-nr").read_text()) <= aio


HOARDS = {
    "areas": """
        l.mmap.restype = ctypes.c_void_p
        for n in range(60000): l.mmap(None, 4096, n % 2, 0x22, -1, 0)""",
    "page tables": """
        area = mmap.mmap(-1, 1 << 40, flags=0x4022)
        for at in range(0, 1 << 40, 1 << 21): area[at] = 1""",
    "timers": """
        while l.syscall(222, 1, None, ctypes.byref(ctypes.c_int())) == 0: pass""",
    "locks": """
        fd = os.open(f"/tmp/l{os.getpid()}", os.O_RDWR | os.O_CREAT)
        for n in range(60000): fcntl.lockf(fd, fcntl.LOCK_EX, 1, 2 * n)""",
    "names that are not there": """
        for n in range(100000): os.path.exists(f"/usr/{os.getpid()}-{n}" + "x" * 200)""",
    "messages": """
        text = ctypes.create_string_buffer(8100); text[0] = 1
        while (queue := l.msgget(0, 0o1600)) >= 0:
            while l.msgsnd(queue, text, 8000, 0o4000) == 0: pass""",
    "events": """
        os.makedirs("/dev/shm/w", exist_ok=True)
        while (fd := l.inotify_init1(0)) > 0:
            l.inotify_add_watch(fd, b"/dev/shm/w", 0xfff)
            for n in range(99): open(f"/dev/shm/w/{n:0200}", "w").close()""",
    "rulesets": """
        while (fd := l.syscall(444, struct.pack("Q", 1), 8, 0)) > 0:
            for path in ("/usr", "/etc", "/tmp"):
                l.syscall(445, fd, 1, struct.pack("=Qi", 1, os.open(path, os.O_PATH)), 0)""",
    "group memberships": """
        for s in [socket.socket(2, 2) for _ in range(900)]:
            for n in range(20): s.setsockopt(0, 35, bytes((239, 1, 1, n)) + socket.inet_aton("127.0.0.1"))""",
}


@pytest.mark.parametrize("hoard", HOARDS)
def test_kernel_memory_of_every_kind_is_bounded(hoard: str) -> None:
    """Sixty processes that take what they can get; the host may miss what the sandbox's profile allows, and no more."""
    code = """
import ctypes, fcntl, mmap, os, socket, struct, time
l = ctypes.CDLL(None, use_errno=True)
def take():
    try:
        pass"""
    code += textwrap.indent(textwrap.dedent(HOARDS[hoard]), " " * 8)
    code += """
    except OSError: pass
    time.sleep(9)
    os._exit(0)
for _ in range(50):
    try:
        if os.fork() == 0: take()
    except OSError: break
time.sleep(9)
"""
    with shoal.Sandbox.create(profile=SMALL) as box:
        box.commands.run(["python3", "-c", "pass"])
        before, least = host_available(), host_available()
        running = box.commands.run(["python3", "-S", "-c", code], background=True)
        for _ in range(12):
            time.sleep(0.3)
            least = min(least, host_available())
        running.kill()
        running.wait()
        allowed = SMALL.memory + SMALL.disk
        assert before - least < allowed + (400 << 20), "with what others of this machine take meanwhile"
        _recovers(box)


def _recovers(box: shoal.Sandbox) -> None:
    """What it hoarded is freed while its next commands wait for memory: its own loss, and not for long."""
    end = time.monotonic() + 60
    while True:
        try:
            still_works(box)
        except (AssertionError, shoal.ShoalError):  # once it may have room, and the next moment not yet
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
        else:
            return
