"""File operations against a hostile tree: what comes is the sandbox's own content, or a typed error, and in bounds."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import residue
import shoal
from shoal.errors import Interrupted, LimitExceeded, ShoalError
from shoal.types import MiB

from .intruder import SMALL, compiled, host_pids, init_pid, node, python, still_works, within

pytestmark = pytest.mark.root


def _outcome(action: Callable[[], object]) -> object:
    try:
        return action()
    except ShoalError as error:
        return error


def _resident() -> int:
    """Most bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


SWAP = """
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
#include <sys/stat.h>
int main(int argc, char **argv) {
    for (int n = 0; n < 6; n++) if (fork() == 0) for (;;) {
        char name[64]; snprintf(name, sizeof name, "/w/.%d", n);
        switch (n) {
            case 0: case 1: { int fd = open(name, O_CREAT | O_WRONLY, 0666); write(fd, "inside", 6); close(fd); break; }
            case 2: symlink(argv[1], name); break;
            case 3: symlink("/w", name); break;
            case 4: symlink("/proc/self/root/etc/hostname", name); break;
            case 5: mkfifo(name, 0666); break;
        }
        rename(name, "/w/f");
    }
    setsid();
    return 0;
}
"""


@pytest.mark.parametrize("rounds", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_swapped_links_never_lead_to_the_host(small: shoal.Sandbox, tmp_path: Path, rounds: int) -> None:
    """T18: a path that is in turn a file, a link to a canary of the host, a link to a folder, a FIFO."""
    canary = tmp_path / "canary"
    canary.write_text("canary")
    tmp_path.chmod(0o777)
    canary.chmod(0o666)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "f").write_text("uploaded")
    # The same path exists inside, so that a write through the link has somewhere to go there.
    small.commands.run(f"mkdir -p /w {tmp_path}; echo inside > {canary}", check=True)
    small.commands.run([compiled(small, SWAP), str(canary)], timeout=5)
    for number in range(rounds):
        read = _outcome(lambda: small.files.read("/w/f"))
        assert isinstance(read, ShoalError) or "canary" not in str(read)
        _outcome(lambda number=number: small.files.write("/w/f", f"written {number}"))  # type: ignore[misc]
        if number % 50 == 0:
            _outcome(lambda: small.files.list("/w", depth=3))
            _outcome(small.changes)
            diff = _outcome(small.diff)
            assert isinstance(diff, ShoalError) or "+canary" not in str(diff)
            _outcome(lambda: small.files.download("/w", tmp_path / "copy"))
            _outcome(lambda: small.files.upload(tmp_path / "source", "/w/f"))
            _outcome(lambda: small.files.upload(tmp_path / "source", "/w"))
            assert canary.read_text() == "canary"
    assert canary.read_text() == "canary"
    copied = [path for path in (tmp_path / "copy").rglob("*") if not path.is_symlink() and path.is_file()]
    assert all("canary" not in path.read_text() for path in copied)


@pytest.mark.parametrize(
    "path", ["/proc/self/root/etc/hostname", "/proc/1/root/etc/hostname", "/proc/self/cwd/../etc/hostname"]
)
def test_magic_links_stay_inside(small: shoal.Sandbox, path: str) -> None:
    small.files.write("/etc/hostname", "mine")
    found = _outcome(lambda: small.files.read(path))
    assert found == "mine" or isinstance(found, ShoalError)


def test_what_its_process_may_show_of_itself(small: shoal.Sandbox) -> None:
    """A file operation runs as a copy of init: a link to /proc/self must not make it tell of itself."""
    for name in ("mem", "environ", "maps", "auxv", "fd/0", "fd/3", "exe", "fd", "map_files"):
        for path in (f"/proc/self/{name}", f"/proc/1/{name}", f"/proc/thread-self/{name}"):
            small.commands.run(f"ln -sfn {path} /tmp/link", check=True)
            for found in (
                _outcome(lambda: small.files.read("/tmp/link")),
                _outcome(lambda: small.files.list("/tmp/link")),
            ):
                assert isinstance(found, ShoalError) or not found, f"{path}: {str(found)[:80]!r}"


def test_writing_through_links_to_its_own_process(small: shoal.Sandbox) -> None:
    for name in ("mem", "oom_score_adj", "comm", "exe", "fd/1", "attr/current", "uid_map", "coredump_filter"):
        small.commands.run(f"ln -sfn /proc/self/{name} /tmp/link", check=True)
        within(10, lambda: _outcome(lambda: small.files.append("/tmp/link", "1000")))
        within(10, lambda: _outcome(lambda: small.files.write("/tmp/link", "1000")))
    still_works(small)


def test_its_process_cannot_be_traced(small: shoal.Sandbox, tmp_path: Path) -> None:
    """Each one that lives long enough to be found is tried."""
    source = """
    #include <fcntl.h>
    #include <stdio.h>
    #include <stdlib.h>
    #include <sys/ptrace.h>
    #include <sys/uio.h>
    #include <unistd.h>
    int main() {
        long tried = 0, got = 0;
        if (fork()) return 0;
        setsid();
        for (int round = 0; round < 3000000 && access("/tmp/stop", F_OK); round++)
            for (int pid = getpid() + 1, end = pid + 400; pid < end; pid++) {
                char path[64]; snprintf(path, sizeof path, "/proc/%d/comm", pid);
                int fd = open(path, O_RDONLY); char name[32] = ""; if (fd < 0) continue;
                read(fd, name, 31); close(fd);
                if (name[0] != 's' || name[1] != 'h' || name[2] != 'o') continue;
                tried++;
                char byte; struct iovec mine = {&byte, 1}, theirs = {(void *)0x400000, 1};
                snprintf(path, sizeof path, "/proc/%d/fd/1", pid);
                if (!ptrace(PTRACE_SEIZE, pid, 0, 0) || open(path, O_RDWR) >= 0) got++;
                if (process_vm_readv(pid, &mine, 1, &theirs, 1, 0) > 0) got++;
            }
        FILE *out = fopen("/tmp/result", "w"); fprintf(out, "%ld %ld", tried, got); fclose(out);
    }
    """
    program = compiled(small, source)
    small.commands.run("head -c 40000000 /dev/zero > /tmp/big", check=True)
    small.commands.run([program], timeout=10)
    # Nothing but file operations while it looks: a command is a copy of init before it becomes its program, which may
    # well be traced, and a look at the name can come in between.
    for _ in range(8):
        small.files.read("/tmp/big", format="bytes")
    small.files.write("/tmp/stop", "")
    within(10, lambda: _wait_for(small, "/tmp/result"))
    tried, got = map(int, small.files.read("/tmp/result").split())
    assert tried > 0
    assert got == 0


def _wait_for(box: shoal.Sandbox, path: str) -> None:
    while not box.files.exists(path) or not box.files.stat(path).size:
        time.sleep(0.02)


@pytest.mark.parametrize("kind", ["fifo", "socket", "directory", "device", "loop", "dangling", "unreadable parent"])
def test_odd_files_are_typed_errors_and_no_waiting(small: shoal.Sandbox, kind: str) -> None:
    make = {
        "fifo": "mkfifo /tmp/x", "directory": "mkdir /tmp/x", "device": "ln -s /dev/tty /tmp/x",
        "loop": "ln -s x /tmp/x",
        "socket": """python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("/tmp/x")'""",
        "dangling": "ln -s /tmp/nowhere/at/all /tmp/x", "unreadable parent": "touch /tmp/y; ln -s /tmp/y/x /tmp/x",
    }[kind]  # fmt: skip
    small.commands.run(make, check=True)
    read: list[object] = []
    within(10, lambda: read.append(_outcome(lambda: small.files.read("/tmp/x"))))
    within(10, lambda: _outcome(lambda: small.files.append("/tmp/x", "y")))
    within(10, lambda: _outcome(lambda: small.files.write("/tmp/x", "y")))
    assert isinstance(read[0], ShoalError)
    assert not isinstance(read[0], shoal.PlatformError)
    still_works(small)


def test_a_hole_of_a_terabyte_costs_nothing(small: shoal.Sandbox, tmp_path: Path) -> None:
    before = _resident()
    small.commands.run(
        "truncate -s 1T /tmp/hole; ln -sf /tmp/hole /etc/passwd; ln -sf /tmp/hole /etc/group",
        check=True,
    )
    with pytest.raises(LimitExceeded):
        small.files.read("/tmp/hole", limit="8MiB")
    with pytest.raises(LimitExceeded):
        small.files.download("/tmp/hole", tmp_path / "hole", limit="8MiB")
    assert not any(path.stat().st_size for path in tmp_path.iterdir())
    assert isinstance(_outcome(lambda: small.commands.run("id", user="user")), shoal.InvalidRequest)
    assert small.commands.run(["/bin/true"], user=1000).exit_code == 0
    assert small.files.stat("/tmp/hole").size == 1 << 40
    assert _resident() - before < 64 * MiB


def test_a_file_that_grows_while_it_is_read(small: shoal.Sandbox) -> None:
    small.commands.run(
        "(while :; do head -c 1000000 /dev/zero >> /tmp/f; truncate -s +10M /tmp/f; done) >/dev/null 2>&1 &"
    )
    read = (_outcome(lambda: small.files.read("/tmp/f", limit="64MiB")) for _ in range(2000))
    assert any(isinstance(one, LimitExceeded) for one in read)


@pytest.mark.parametrize(
    "passwd",
    [
        "mkfifo /etc/passwd",
        "mkdir /etc/passwd",
        "ln -s /dev/zero /etc/passwd",
        "printf 'user:x:1:2:3\\0:/\\n\\377:::\\n' > /etc/passwd",
    ],
)
def test_accounts_are_read_as_hostile_text(small: shoal.Sandbox, passwd: str) -> None:
    small.commands.run(f"rm -f /etc/passwd; {passwd}", check=True)
    found: list[object] = []
    within(10, lambda: found.append(_outcome(lambda: small.commands.run("id", user="user"))))
    assert isinstance(found[0], shoal.InvalidRequest)
    assert small.commands.run(["/bin/true"], user=1000).exit_code == 0


def test_a_directory_of_many_entries() -> None:
    profile = shoal.Profile(cpu=2, memory=256 * MiB, disk=256 * MiB, processes=32, inodes=110_000)
    with shoal.Sandbox.create(profile=profile) as box:
        python(
            box, "os.mkdir('/tmp/many'); [os.mknod(f'/tmp/many/{n:06}') for n in range(100_000)]; answer(0)", timeout=60
        )
        assert len(box.files.list("/tmp/many")) == 100_000
        assert sum(change.path.startswith("/tmp/many/") for change in box.changes()) == 100_000
        box.files.remove("/tmp/many")
        assert not box.files.exists("/tmp/many")


def _dig(box: shoal.Sandbox, depth: int) -> None:
    python(
        box,
        f"""
    os.mkdir("/tmp/deep"); os.chdir("/tmp/deep")
    for _ in range({depth}):
        os.mkdir("d"); os.chdir("d")
    open("bottom", "w").close(); answer(0)
    """,
    )


def test_a_tree_deeper_than_paths_are_long(small: shoal.Sandbox, tmp_path: Path) -> None:
    """Each call either does the whole of it or says that it cannot."""
    _dig(small, 3000)
    listed = _outcome(lambda: small.files.list("/tmp/deep", depth=5000))
    assert isinstance(listed, (shoal.InvalidRequest, LimitExceeded)) or len(listed) == 3001  # type: ignore[arg-type]
    assert isinstance(_outcome(small.changes), LimitExceeded)
    assert isinstance(_outcome(lambda: small.files.download("/tmp/deep", tmp_path / "deep")), ShoalError)
    assert _outcome(lambda: small.files.remove("/tmp/deep")) is None
    small.changes()
    still_works(small)


def test_a_listing_is_whole_whatever_the_limit_of_open_files() -> None:
    profile = shoal.Profile(cpu=2, memory=128 * MiB, disk=32 * MiB, processes=32, open_files=32)
    with shoal.Sandbox.create(profile=profile) as box:
        _dig(box, 100)
        assert len(box.files.list("/tmp/deep", depth=1000)) == 101
        box.files.remove("/tmp/deep")


def test_a_stopped_operation_is_ended(small: shoal.Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP from inside cannot be refused; the call must not wait for ever."""
    monkeypatch.setattr("shoal.node.files._STILL_SECONDS", 1.0)
    small.commands.run("head -c 20000000 /dev/zero > /tmp/f", check=True)
    pieces = small.files.read("/tmp/f", format="stream")
    next(pieces)
    stop = """
    stopped = [pid for pid in os.listdir("/proc") if pid.isdigit() and pid != "1"
               and open(f"/proc/{pid}/comm").read() == "shoal-init\\n"]
    for pid in stopped: os.kill(int(pid), signal.SIGSTOP)
    answer(len(stopped))
    """
    assert python(small, stop) == 1
    with pytest.raises(Interrupted, match="stopped"):
        within(10, lambda: [None for _ in pieces])
    still_works(small)
    assert len(host_pids(small)) == 1


def test_a_killed_operation_is_not_the_platforms_fault(small: shoal.Sandbox) -> None:
    source = """
    #include <signal.h>
    #include <unistd.h>
    int main() { if (fork()) return 0; setsid(); usleep(50000); for (;;) { kill(-1, SIGKILL); usleep(20); } }
    """
    small.commands.run([compiled(small, source)], timeout=10)
    found = [_outcome(lambda: small.files.write("/tmp/f", bytes(8 * MiB))) for _ in range(20)]
    assert all(one is None or isinstance(one, Interrupted) for one in found)


def test_changes_under_a_tree_that_changes(small: shoal.Sandbox) -> None:
    """Folders become links and files while the host walks the writable layer."""
    source = """
    #include <fcntl.h>
    #include <stdio.h>
    #include <unistd.h>
    #include <sys/stat.h>
    int main() {
        if (fork()) return 0;
        setsid(); mkdir("/w", 0777); chdir("/w");
        for (;;) {
            mkdir("d", 0755); mkdir("d/e", 0755); close(open("d/e/f", O_CREAT | O_WRONLY, 0644));
            rename("d", "gone"); symlink("/etc", "d"); unlink("d");
            close(open("d", O_CREAT | O_WRONLY, 0644)); unlink("d");
            mkfifo("d", 0644); unlink("d"); unlink("gone/e/f"); rmdir("gone/e"); rmdir("gone");
        }
    }
    """
    small.commands.run([compiled(small, source)], timeout=10)
    for _ in range(300):
        paths = [change.path for change in small.changes()]
        assert not any(path.startswith("/w/d/") and not path.startswith("/w/d/e") for path in paths)


def test_nothing_is_left_of_operations_that_failed(small: shoal.Sandbox) -> None:
    threads = []
    for number in range(8):

        def act(number: int = number) -> None:
            _outcome(lambda: small.files.write("/tmp/full", bytes(32 * MiB)))
            _outcome(lambda: small.files.read(f"/tmp/{number}"))

        threads.append(threading.Thread(target=act))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(host_pids(small)) == 1
    assert [name for name in small.commands.run("ls -A /tmp").stdout.split() if name.startswith(".shoal")] == []
    assert len(os.listdir(f"/proc/{init_pid(small)}/fd")) < 64
    assert not list(node()._find(small.id).commands)


def test_marks_of_the_overlay_cannot_be_forged(small: shoal.Sandbox) -> None:
    """Whiteouts and opaque folders made by hand hide nothing and do not mislead what is read of the changes."""
    before = len(small.files.list("/usr/lib/python3", depth=1)) if small.files.exists("/usr/lib/python3") else 0
    code = """
    import stat
    os.makedirs("/w/d")
    names = ("user.overlay.opaque", "user.overlay.redirect", "user.overlay.whiteout", "user.overlay.metacopy",
             "trusted.overlay.opaque", "user.overlay.origin", "user.overlay.overlay.opaque")
    found = {}
    for place in ("/usr/lib/python3", "/w/d", "/etc"):
        for name in names:
            if os.path.isdir(place): found[f"{place} {name}"] = tried(os.setxattr, place, name, b"y")
    for place in ("/w/zero", "/tmp/zero", "/usr/zero"):
        found[place] = tried(os.mknod, place, stat.S_IFCHR, 0)
    answer(found)
    """
    found = python(small, code)
    assert "ok" not in {found[place] for place in ("/w/zero", "/tmp/zero", "/usr/zero")}
    if before:
        assert len(small.files.list("/usr/lib/python3", depth=1)) == before
    changes = {change.path: change.kind for change in small.changes()}
    assert changes["/w/d"] == "added"
    assert "removed" not in changes.values()
    small.files.write("/w/d/x", "y")
    assert small.commands.run("ls /etc/hostname").exit_code == 0


def test_a_tree_that_is_swapped_while_it_is_packed_and_unpacked(small: shoal.Sandbox, tmp_path: Path) -> None:
    """Folders of it become links to a folder that is on the host and inside: nothing of the host's comes or changes."""
    canary = tmp_path / "canary"
    canary.mkdir()
    (canary / "f").write_text("host")
    tmp_path.chmod(0o777)
    small.commands.run(f"mkdir -p {canary} /w/d/e; echo inside | tee {canary}/f > /w/d/e/f", check=True)
    loop = f"while :; do mv /w/d /w/x; ln -s {canary} /w/d; rm /w/d; mv /w/x /w/d; done"
    running = small.commands.run(loop, background=True)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "f").write_text("uploaded")
    for number in range(60):
        target = tmp_path / str(number)
        _outcome(lambda target=target: small.files.download("/w", target))  # type: ignore[misc]
        _outcome(lambda: small.files.upload(tmp_path / "source", "/w/d/e"))
        came = [path for path in target.rglob("*") if path.is_file() and not path.is_symlink()]
        assert {path.read_text() for path in came} <= {"inside\n", "uploaded"}
        assert os.listdir(canary) == ["f"]
    running.kill()
    assert (canary / "f").read_text() == "host"


def test_a_set_uid_root_file_never_reaches_the_host(small: shoal.Sandbox, tmp_path: Path) -> None:
    script = "mkdir t; cp /bin/true t/a; chmod 6755 t/a; ln t/a t/b; mkdir -m 6777 t/d; cp t/a t/d/c; chmod 7777 t/d/c"
    small.commands.run(script, check=True)
    small.files.download("/workspace/t", tmp_path / "t")
    small.files.download("/workspace/t/a", tmp_path / "a")
    for path in (tmp_path / "a", tmp_path / "t", *(tmp_path / "t").rglob("*")):
        assert not path.stat().st_mode & 0o7022, path


def test_what_packing_may_show_of_its_own_process(small: shoal.Sandbox, tmp_path: Path) -> None:
    names = ("self", "thread-self", "self/fd", "1", "self/exe", "self/mem")
    for number, name in enumerate(f"/proc/{name}" for name in names):
        small.commands.run(f"ln -sfn {name} /tmp/link", check=True)
        for path in (name, "/tmp/link"):
            target = tmp_path / str(number)
            found = _outcome(lambda path=path, target=target: small.files.download(path, target))  # type: ignore[misc]
            assert isinstance(found, ShoalError), path
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_all_of_proc_is_packed_without_harm(small: shoal.Sandbox, tmp_path: Path) -> None:
    within(60, lambda: _outcome(lambda: small.files.download("/proc", tmp_path / "proc", limit="16MiB", entries=3000)))
    still_works(small)


def test_all_the_inotify_instances_of_a_user(small: shoal.Sandbox) -> None:
    """Then its own watches are refused in words; a neighbour's and the host's are not."""
    hoard = """
    libc = ctypes.CDLL(None)
    count = 0
    while count < 1000 and libc.inotify_init1(0) >= 0: count += 1
    answer(count)
    sys.stdout.flush()
    if os.fork(): os._exit(0)
    os.setsid(); os.close(1); os.close(2); signal.pause()
    """
    assert 0 < python(small, hoard) < 1000
    with pytest.raises(LimitExceeded, match="watched by one user"):
        small.files.watch("/tmp")
    with shoal.Sandbox.create(profile=SMALL) as other:
        other.files.watch("/tmp").close()


def test_a_storm_of_events_that_nobody_takes(small: shoal.Sandbox) -> None:
    """The node holds no more of them than a window; what is lost is said."""
    small.files.make_dir("/tmp/w")
    with small.files.watch("/tmp/w", recursive=True) as watch:
        before = _resident()
        script = "import os\nfor n in range(100000): p = '/tmp/w/' + 'x' * 200; open(p, 'w').close(); os.unlink(p)"
        small.commands.run(["python3", "-c", script], timeout=60)
        assert _resident() - before < 16 * MiB
        assert any(event.kind == "overflow" for event in watch)


def _only_init_is_left(box: shoal.Sandbox) -> bool:
    return not residue.settled(lambda: host_pids(box)[1:])


def test_a_watch_that_is_killed_or_stopped(small: shoal.Sandbox) -> None:
    kill = """
    for pid in os.listdir("/proc"):
        if pid.isdigit() and pid != "1" and open(f"/proc/{pid}/comm").read() == "shoal-init\\n":
            os.kill(int(pid), signal.SIGKILL)
    answer(0)
    """
    watch = small.files.watch("/tmp")
    python(small, kill)
    with pytest.raises(Interrupted, match="signal 9"):
        for _ in watch:
            pass
    watch.close()
    second = small.files.watch("/tmp")
    python(small, kill.replace("SIGKILL", "SIGSTOP"))
    second.close()
    still_works(small)
    assert _only_init_is_left(small)


def test_nothing_is_left_of_watches(small: shoal.Sandbox) -> None:
    watches = [small.files.watch("/") for _ in range(5)]
    assert len(host_pids(small)) == 6
    for watch in watches:
        watch.close()
    still_works(small)
    assert _only_init_is_left(small)
