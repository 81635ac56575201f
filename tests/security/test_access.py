"""Attacks on access policies: other names for what is hidden, other ways to run what is no program, and races."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from shoal import AccessPolicy, Audit
from shoal.errors import InvalidRequest
from shoal.types import Layer

from .intruder import SMALL, compiled, python, still_works

pytestmark = pytest.mark.root
SECRET = "the answer is 42"
SHELL = "/usr/bin/bash"


@pytest.fixture
def holder() -> Iterator[shoal.Sandbox]:
    """One with something to hide, in what the sandbox itself wrote: nothing keeps it from moving folders there."""
    with shoal.Sandbox.create(profile=SMALL) as box:
        box.files.write("/srv/a/b/secret", SECRET)
        yield box


def find_secret(box: shoal.Sandbox) -> str:
    """All that a search of what can be written, and of what processes hold open, turns up."""
    open_ones = "/proc/[0-9]*/cwd/secret /proc/[0-9]*/fd/*/secret /proc/[0-9]*/root/srv/a/b/secret"
    search = f"grep -rIl 'answer is 4[2]' /srv /tmp /root /home /mnt /workspace /dev/shm; cat {open_ones}"
    return box.commands.run(["/bin/sh", "-c", search], timeout=60).stdout


def started(box: shoal.Sandbox, before: str, after: str) -> shoal.Command:
    """A command that has done the first part, and does the second when it gets a line."""
    command = box.commands.run([SHELL, "-c", f"{before}; : > /tmp/started; read; {after}"], background=True)
    while not box.files.exists("/tmp/started"):
        time.sleep(0.01)
    return command


# Other names


def test_the_parent_is_renamed(holder: shoal.Sandbox) -> None:
    holder.set_access(AccessPolicy(hidden=["/srv/a/b"]))
    holder.commands.run("mv /srv/a /srv/z; ln -s /srv/z/b /tmp/link", check=True)
    for path in ("/srv/z/b/secret", "/tmp/link/secret", "/proc/self/root/srv/z/b/secret"):
        assert "Permission denied" in holder.commands.run(["cat", path]).stderr
    assert holder.commands.run("mv /srv/z/b /srv/c || rmdir /srv/z/b || rm -rf /srv/z").exit_code != 0
    assert find_secret(holder) == ""


def test_a_read_only_folder_goes_with_its_parent(holder: shoal.Sandbox) -> None:
    holder.set_access(AccessPolicy(read_only=["/srv/a/b"]))
    holder.commands.run("mv /srv/a /srv/z", check=True)
    for command in (
        "echo x > /srv/z/b/secret", "rm -rf /srv/z/b", "mv /srv/z/b /srv/c",
        "ln /srv/z/b/secret /tmp/x && echo x > /tmp/x",
        "chmod 777 /srv/z/b/secret", "setfattr -n user.x -v 1 /srv/z/b/secret",
    ):  # fmt: skip
        holder.commands.run(command)
    assert holder.files.read("/srv/z/b/secret") == SECRET


def test_a_file_with_another_name_is_not_hidden_by_halves(holder: shoal.Sandbox) -> None:
    holder.commands.run("ln /srv/a/b/secret /srv/other", check=True)
    with pytest.raises(InvalidRequest, match="hard links") as caught:
        holder.set_access(AccessPolicy(hidden=["/srv/a/b/secret"]))
    assert caught.value.field == "access.hidden"
    holder.set_access(AccessPolicy(hidden=["/srv"]))
    assert find_secret(holder) == ""


def test_what_is_hidden_cannot_be_linked(holder: shoal.Sandbox) -> None:
    holder.set_access(AccessPolicy(hidden=["/srv/a/b/secret"]))
    outcomes = python(
        holder,
        """
        path = os.open("/srv/a/b/secret", os.O_PATH)
        answer([
            tried(os.link, "/srv/a/b/secret", "/tmp/x"),
            call(265, path, b"", -100, b"/tmp/y", 0x1000),
            call(265, -100, b"/proc/self/fd/%d" % path, -100, b"/tmp/z", 0x400),
            tried(os.rename, "/srv/a/b/secret", "/tmp/w"), tried(os.unlink, "/srv/a/b/secret"),
            tried(os.open, "/proc/self/fd/%d" % path, os.O_RDONLY), tried(os.chmod, "/srv/a/b/secret", 0o777),
            tried(os.chown, "/srv/a/b/secret", 0, 0), tried(os.setxattr, "/srv/a/b/secret", "user.x", b"x"),
        ])
        """,
    )
    assert "ok" not in outcomes
    assert find_secret(holder) == ""


def test_a_new_root_is_no_way_around(holder: shoal.Sandbox) -> None:
    holder.set_access(AccessPolicy(hidden=["/srv/a/b"]))
    outcomes = python(
        holder,
        """
        root = os.open("/", os.O_RDONLY)
        os.makedirs("/tmp/jail", exist_ok=True)
        found = []
        for jail in ("/srv/a", "/srv", "/tmp/jail"):
            os.chroot(jail)
            found += [tried(os.listdir, path) for path in ("/b", "/a/b")]
            os.fchdir(root)
            found += [tried(os.listdir, "srv/a/b"), tried(os.listdir, "../../../srv/a/b")]
            os.chroot(".")
        answer(found)
        """,
    )
    assert set(outcomes) <= {"EACCES", "ENOENT"}


def test_what_ran_before_gives_nothing_away_through_proc(holder: shoal.Sandbox) -> None:
    """It stands in the folder and holds it open. It can read on; commands that start later get no further by it."""
    earlier = started(holder, "cd /srv/a/b; exec 9<.", "cat secret")
    holder.set_access(AccessPolicy(hidden=["/srv/a/b"]))
    outcomes = python(
        holder,
        f"""
        base = "/proc/{earlier.pid}/"
        places = ("cwd/secret", "fd/9/secret", "root/srv/a/b/secret", "task/{earlier.pid}/cwd/secret")
        answer([tried(os.open, base + place, os.O_RDONLY) for place in places]
               + [call(101, 16, {earlier.pid}, 0, 0), call(438, call(434, {earlier.pid}, 0) == "ok" and 3, 9, 0)])
        """,
    )
    assert "ok" not in outcomes
    assert find_secret(holder) == ""
    earlier.send_stdin("\n")
    assert earlier.wait().stdout == SECRET  # docs/guide/access.md says so


def test_the_owner_s_reading_shows_it_to_nobody(holder: shoal.Sandbox) -> None:
    """A file operation sees what is hidden; its process must not be a window to it."""
    holder.files.write("/srv/a/b/large", b"x" * (8 << 20))
    holder.set_access(AccessPolicy(hidden=["/srv/a/b"]))
    stream = holder.files.read("/srv/a/b/large", "stream")
    next(stream)
    assert find_secret(holder) == ""
    outcomes = python(
        holder,
        """
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            for place in ("root/srv/a/b/secret", "cwd/srv/a/b/secret", "fd/3", "fd/0"):
                if int(pid) != os.getpid():
                    found.append(tried(os.open, f"/proc/{pid}/{place}", os.O_RDONLY))
        answer(found)
        """,
    )
    assert len(outcomes) > 4
    assert "ok" not in outcomes
    for _ in stream:
        pass


@pytest.mark.parametrize("target", ["/etc", "../../../../../../../../etc", "loop"])
def test_links_of_a_layer_stay_inside(tmp_path: Path, target: str) -> None:
    layer, outside = tmp_path / "layer", Path("/etc/hostname").read_bytes()
    layer.mkdir()
    tmp_path.chmod(0o755)
    layer.chmod(0o755)
    (layer / "data").symlink_to(target)
    (layer / "loop").symlink_to("loop")
    hostile = Layer(digest=f"host:{layer}", source=str(layer))
    policy = AccessPolicy(hidden=["/data/hostname"])
    if target == "loop":
        with pytest.raises(InvalidRequest, match="symbolic link"):
            shoal.Sandbox.create(layers=[hostile], access=policy)
        return
    with shoal.Sandbox.create(layers=[hostile], access=policy) as box:
        assert "Permission denied" in box.commands.run("cat /etc/hostname").stderr
        assert "Permission denied" in box.commands.run("cat /data/hostname").stderr
    assert Path("/etc/hostname").read_bytes() == outside


SWAP = """
#include <stdio.h>
#include <unistd.h>
int main() {
    symlink("/srv/decoy", "/srv/link");
    if (fork()) return 0;
    setsid();
    for (;;) {
        rename("/srv/real", "/srv/aside"); rename("/srv/link", "/srv/real");
        rename("/srv/real", "/srv/link"); rename("/srv/aside", "/srv/real");
    }
}
"""


def test_a_path_is_swapped_while_it_is_being_hidden(small: shoal.Sandbox) -> None:
    """Either the call fails, or the real folder is hidden; never a decoy."""
    small.files.write("/srv/decoy/secret", "nothing")
    small.files.write("/srv/real/secret", SECRET)
    small.commands.run([compiled(small, SWAP)], timeout=5)
    hidden = 0
    for _ in range(200):
        try:
            small.set_access(AccessPolicy(hidden=["/srv/real"]))
        except InvalidRequest:
            continue
        hidden = 1
        break
    still_works(small)
    if hidden:
        assert find_secret(small) == ""


def test_nothing_can_be_mounted_or_unmounted(holder: shoal.Sandbox) -> None:
    holder.set_access(AccessPolicy(hidden=["/srv/a/b"], read_only=["/etc"]))
    for command in ("umount /srv/a/b", "umount -l /etc", "mount -o remount,rw /etc", "mount --bind /srv /mnt"):
        assert holder.commands.run(command).exit_code != 0
    assert holder.commands.run("unshare -Urm umount /srv/a/b").exit_code != 0
    assert find_secret(holder) == ""


def test_open_writers_are_not_overlooked(holder: shoal.Sandbox) -> None:
    """The root can't become read-only under a file that is open for writing; the caller is told, and can try again."""
    writer = started(holder, "exec 9>/root/log", "echo x >&9")
    with pytest.raises(InvalidRequest, match="open for writing"):
        holder.set_access(AccessPolicy(writable=["/tmp"]))
    writer.kill()
    writer.wait()
    holder.set_access(AccessPolicy(writable=["/tmp"]))
    assert "Read-only" in holder.commands.run("echo x > /root/log").stderr


def test_a_whole_mount_becomes_read_only_for_what_stands_in_it(holder: shoal.Sandbox) -> None:
    earlier = started(
        holder, "cd /srv/a/b; exec 9<.", "echo x > new; echo x > /proc/self/fd/9/new; rm secret; echo end"
    )
    holder.set_access(AccessPolicy(writable=["/tmp"]))
    earlier.send_stdin("\n")
    assert earlier.wait().stderr.count("Read-only file system") == 3
    assert holder.files.read("/srv/a/b/secret") == SECRET


# Programs


@pytest.fixture(scope="module")
def narrow(shoal_home: object) -> Iterator[shoal.Sandbox]:
    """Where Python and a few tools are the only programs."""
    with shoal.Sandbox.create(profile=SMALL) as box:
        interpreter = box.commands.run("readlink -f $(command -v python3)").stdout.strip()
    names = ("bash", "cat", "cp", "chmod", "ln", "mv", "mkdir")
    programs = [interpreter, "/usr/bin/python3", *(f"/usr/bin/{name}" for name in names)]
    with shoal.Sandbox.create(profile=SMALL, access=AccessPolicy(programs=programs)) as box:
        yield box


LOADER = "/lib64/ld-linux-x86-64.so.2"


@pytest.mark.parametrize(
    "command",
    [
        f"{LOADER} /usr/bin/id",
        f"cp /usr/bin/id /tmp/copy; {LOADER} /tmp/copy",
        f"cp /usr/bin/id /dev/shm/copy; {LOADER} /dev/shm/copy",
        f"{LOADER} /proc/self/root/usr/bin/id",
        f"cp {LOADER} /tmp/ld; chmod +x /tmp/ld; /tmp/ld /usr/bin/id",
        "ln /usr/bin/id /tmp/linked; /tmp/linked",
        "ln -s /usr/bin/id /tmp/soft; /tmp/soft",
        "/proc/self/root/usr/bin/id",
        "cp /usr/bin/id /usr/bin/cat && cat",
        "mv /usr/bin/id /usr/bin/mkdir && mkdir",
        "mkdir -p /tmp/bin && cp /usr/bin/id /tmp/bin/cat && PATH=/tmp/bin cat",
        "echo '#!/usr/bin/id' > /tmp/shebang; chmod +x /tmp/shebang; /tmp/shebang",
        "cp /usr/bin/id /usr/lib/x86_64-linux-gnu/id && /usr/lib/x86_64-linux-gnu/id",
        "/usr/lib/git-core/git --version; [ -e /usr/lib/git-core/git ] && exit 1",
    ],
)
def test_no_other_way_to_run_a_program(narrow: shoal.Sandbox, command: str) -> None:
    result = narrow.commands.run([SHELL, "-c", command], timeout=20)
    assert "uid=" not in result.stdout
    assert "git version" not in result.stdout
    assert result.exit_code != 0


def test_a_program_in_memory_is_not_run(narrow: shoal.Sandbox) -> None:
    outcomes = python(
        narrow,
        """
        program = open("/usr/bin/id", "rb").read()
        found = [call(number, b"x", flags) for number in (319, 447) for flags in (0, 1, 0x10, 0x8)]
        for path in ("/tmp/f", "/dev/shm/f"):
            with open(path, "wb") as file:
                file.write(program)
            os.chmod(path, 0o755)
            descriptor = os.open(path, os.O_RDONLY)
            found.append(tried(os.execve, descriptor, ["id"], {}))
            found.append(tried(os.execve, f"/proc/self/fd/{descriptor}", ["id"], {}))
        opened = os.open("/usr/bin/id", os.O_PATH)
        found.append(call(322, opened, b"", 0, 0, 0x1000))
        answer(found)
        """,
    )
    assert "ok" not in outcomes


def test_no_code_is_mapped_from_what_can_be_written(narrow: shoal.Sandbox) -> None:
    """Or a library preloaded into a program would be as good as another program."""
    library = narrow.commands.run(
        [SHELL, "-c", "cp /usr/lib/x86_64-linux-gnu/libz.so.1 /tmp/l.so; LD_PRELOAD=/tmp/l.so cat /etc/hostname"]
    )
    assert "failed to map" in library.stderr
    mapped = python(
        narrow,
        """
        import mmap
        def map_code(path):
            mmap.mmap(os.open(path, os.O_RDONLY), 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC, flags=mmap.MAP_PRIVATE)
        answer([tried(map_code, path) for path in ("/tmp/l.so", "/usr/bin/id", "/usr/lib/x86_64-linux-gnu/libc.so.6")])
        """,
    )
    assert mapped == ["EPERM", "EPERM", "ok"]


def test_programs_hold_for_what_runs_already(holder: shoal.Sandbox) -> None:
    holder.commands.run("cp /usr/bin/id /tmp/id", check=True)
    attempts = f"./id; /proc/self/fd/9; /usr/bin/id; {LOADER} /tmp/id; {LOADER} /proc/self/fd/9; echo end"
    earlier = started(holder, "cd /tmp; exec 9</tmp/id", attempts)
    holder.set_access(AccessPolicy(programs=[SHELL]))
    earlier.send_stdin("\n")
    assert earlier.wait().stdout == "end\n"


# The audit


def test_an_audit_is_not_held_up_by_what_is_opened(tmp_path: Path) -> None:
    """FIFOs, leases, names that are no text, files that are gone, and more than is kept."""
    with shoal.Sandbox.create(profile=SMALL, audit=Audit(files=True, records=100)) as box:
        python(
            box,
            r"""
            import fcntl
            signal.signal(signal.SIGIO, signal.SIG_IGN)  # the node's look at a file breaks a lease on it
            os.mkfifo("/tmp/fifo")
            if os.fork() == 0:
                os.open("/tmp/fifo", os.O_WRONLY)
                os._exit(0)
            os.open("/tmp/fifo", os.O_RDONLY)
            held = os.open("/tmp/leased", os.O_CREAT | os.O_RDWR)
            while tried(fcntl.fcntl, held, fcntl.F_SETLEASE, fcntl.F_WRLCK) == "EAGAIN":
                time.sleep(0.01)  # the node has it open for a moment
            for number in range(3000):
                name = b"/tmp/\xff\n" + str(number).encode()
                os.close(os.open(name, os.O_CREAT | os.O_WRONLY))
                os.unlink(name)
            answer(0)
            """,
        )
        still_works(box)
        first, *records = box.audit()
        assert len(records) == 100
        assert int(first.detail) > 1000
        assert all(len(record.detail) < 5000 for record in records)
    held = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    assert not [path for path in held if "fifo" in path or "\udcff" in path]
