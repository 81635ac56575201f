"""What of the host a sandbox sees, and what of the host it can change: nothing."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal

from .intruder import SMALL, USERS, python

pytestmark = pytest.mark.root


@pytest.fixture
def canary() -> Iterator[Path]:
    """A file of the host in a directory that sandboxes see."""
    folder = Path(f"/usr/local/shoal-canary-{secrets.token_hex(4)}")
    folder.mkdir()
    (folder / "file").write_text("alive")
    (folder / "program").write_text("#!/bin/sh\necho alive\n")
    (folder / "program").chmod(0o755)
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.mark.parametrize("user", USERS)
def test_layers_cannot_be_changed_by_any_way(small: shoal.Sandbox, canary: Path, user: str) -> None:
    before = {path: (path.read_text(), path.lstat()) for path in canary.iterdir()}
    code = f"""
    import mmap, shutil
    folder, file, program = {str(canary)!r}, {str(canary / "file")!r}, {str(canary / "program")!r}
    held = os.open(file, os.O_RDONLY)
    def mapped(flags, protection):
        area = mmap.mmap(held, 5, flags, protection)
        area[:5] = b"dead!"
    def poke():
        area = mmap.mmap(held, 5, mmap.MAP_PRIVATE, mmap.PROT_READ)
        address = ctypes.addressof(ctypes.c_char.from_buffer_copy(b"x"))
        with open("/proc/self/maps") as maps: start = next(int(l.split("-")[0], 16) for l in maps if file in l)
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start); memory.write(b"dead!")
    answer({{
        "mmap shared": str(tried(lambda: mapped(mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE))),
        "proc mem": str(tried(poke)),
        "proc fd": str(tried(lambda: open(f"/proc/self/fd/{{held}}", "w").write("dead!"))),
        "write": str(tried(lambda: open(file, "w").write("dead!"))),
        "truncate": str(tried(os.truncate, file, 0)),
        "chmod": str(tried(os.chmod, program, 0o4777)),
        "chown": str(tried(os.chown, file, 1000, 1000)),
        "utime": str(tried(os.utime, file, (0, 0))),
        "xattr": str(tried(os.setxattr, file, "user.x", b"y")),
        "link": str(tried(os.link, file, folder + "/link")),
        "rename": str(tried(os.rename, program, folder + "/renamed")),
        "remove": str(tried(shutil.rmtree, folder)),
        "create": str(tried(lambda: open("/usr/local/new", "w").write("x"))),
    }})
    """
    found = python(small, code, user)
    if user == "root":
        assert found["write"] == found["remove"] == found["create"] == "ok", "it may break its own copy"
    else:
        assert found["write"] in ("EACCES", "EPERM")
    assert {path: (path.read_text(), path.lstat()) for path in canary.iterdir()} == before
    assert not os.path.exists("/usr/local/new")


def test_an_open_file_of_a_layer_stays_read_only_after_copy_up(small: shoal.Sandbox, canary: Path) -> None:
    """A descriptor from before the copy is of the host's own file."""
    code = f"""
    import fcntl
    held = os.open({str(canary / "file")!r}, os.O_RDONLY)
    open({str(canary / "file")!r}, "a").close()
    answer([tried(os.write, held, b"dead!"), tried(os.ftruncate, held, 0), tried(os.fchmod, held, 0o777),
            tried(os.fchown, held, 7, 7), tried(os.setxattr, held, "user.x", b"y"),
            tried(os.posix_fallocate, held, 0, 100), tried(fcntl.ioctl, held, 0x40086602, b"12345678")])
    """
    python(small, code)
    assert (canary / "file").read_text() == "alive"
    assert (canary / "file").stat().st_mode & 0o777 == 0o644
    assert os.listxattr(canary / "file") == []


def test_writes_of_one_are_not_seen_by_another(canary: Path) -> None:
    with shoal.Sandbox.create(profile=SMALL) as first, shoal.Sandbox.create(profile=SMALL) as second:
        first.commands.run(
            f"echo dead > {canary}/file; touch /tmp/mine /dev/shm/mine /var/tmp/mine /workspace/mine", check=True
        )
        assert second.files.read(f"{canary}/file") == "alive"
        assert second.commands.run("find / -xdev -name mine; ls /dev/shm").stdout == ""


def test_files_of_the_host_are_absent(calm: shoal.Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    homes = [str(path) for path in Path("/home").iterdir()]
    hidden = [
        "/root/.ssh",
        "/root/.bash_history",
        "/root/.netrc",
        "/root/.config",
        str(secret),
        *homes,
        "/boot",
        "/var/log/dpkg.log",
    ]
    hidden += [
        "/var/run/docker.sock",
        "/run/systemd",
        "/run/shoal",
        "/run/dbus",
        "/var/lib/cloud",
        "/etc/ssh/ssh_host_rsa_key",
        "/lost+found",
    ]
    hidden += [
        str(Path(__file__)),
        os.environ["SHOAL_HOME"],
        f"/proc/{os.getpid()}",
        f"/proc/1/root{secret}",
        "/dev/kmsg",
        "/dev/mem",
        "/dev/kvm",
    ]
    found = python(calm, f"answer([path for path in {hidden!r} if os.path.lexists(path)])")
    assert found == []


def test_no_password_of_the_host(calm: shoal.Sandbox) -> None:
    shadow = Path("/etc/shadow").read_text()
    hashes = [line.split(":")[1] for line in shadow.splitlines() if line.split(":")[1].startswith(("$", "_"))]
    inside = calm.commands.run("cat /etc/shadow /etc/shadow- /etc/gshadow 2>/dev/null").stdout
    assert not re.search(r"\$[0-9a-z]+\$", inside)
    assert not [text for text in hashes if text in inside]


def test_environment_of_the_node_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """T19: neither in a command, nor in a shell, nor in what /proc shows of any process."""
    monkeypatch.setenv("SHOAL_TEST_SECRET", "zzz-secret-zzz")
    with shoal.Sandbox.create(profile=SMALL) as box:
        code = """
        found = [os.environ.get("SHOAL_TEST_SECRET", "")]
        for pid in os.listdir("/proc"):
            if pid.isdigit():
                for name in ("environ", "cmdline", "comm", "auxv"):
                    try: found.append(open(f"/proc/{pid}/{name}", "rb").read().decode("latin-1"))
                    except OSError: pass
        answer("\\n".join(found))
        """
        text = python(box, code) + box.commands.run("env; bash -lc env; sh -c env", user="user").stdout
    assert "zzz-secret-zzz" not in text


def test_processes_are_its_own(calm: shoal.Sandbox) -> None:
    text = python(
        calm,
        "pids = sorted(filter(str.isdigit, os.listdir('/proc')), key=int)\n"
        "answer([open(f'/proc/{pid}/cmdline').read() for pid in pids])",
    )
    assert len(text) == 2
    assert text[0].startswith("shoal-init")
    assert python(calm, f"answer(tried(os.kill, {os.getpid()}, 0))") == "ESRCH"


def test_kernel_log_and_keys_of_the_host_are_closed(calm: shoal.Sandbox) -> None:
    assert calm.commands.run(["dmesg"]).exit_code != 0
    assert calm.commands.run("cat /proc/keys /proc/key-users").stdout.strip() == ""
    addresses = calm.commands.run(
        "cut -d' ' -f1 /proc/kallsyms | sort -u; cut -d' ' -f6 /proc/modules | sort -u"
    ).stdout.split()
    assert all(int(address, 16) == 0 for address in addresses if re.fullmatch(r"(0x)?[0-9a-f]{8,}", address))


def test_its_tables_tell_nothing_of_the_host(calm: shoal.Sandbox) -> None:
    """Mounts, cgroups, PID 1's arguments: no path, device, id range or name of the machine."""
    text = calm.commands.run(
        "cat /proc/self/mountinfo /proc/self/mounts /proc/self/cgroup; tr '\\0' ' ' < /proc/1/cmdline"
    ).stdout
    text += calm.commands.run(
        "cat /proc/sys/kernel/hostname /proc/sys/kernel/domainname /etc/hostname /etc/hosts /etc/machine-id; hostname"
    ).stdout
    for word in (
        "/dev/",
        "ext4",
        "shoal/",
        "shoal-tests",
        "/run/shoal",
        "/root",
        "/var",
        "/home",
        "upperdir=/up0/",
        str(os.getpid()),
    ):
        allowed = ("/dev/pts", "/dev/shm", "/dev/mqueue")
        lines = [line for line in text.splitlines() if word in line and not any(place in line for place in allowed)]
        assert lines == [], word
    assert not re.search(r"\b(18|19|2[01])\d{8}\b", text), "an id of the host"
    assert socket.gethostname() not in text or len(socket.gethostname()) < 4
    paths = [line.split(":")[2] for line in text.splitlines() if re.match(r"\d+:[a-z_=,]*:/", line)]
    assert paths
    assert all(re.fullmatch(r"/(\.\./)?(cmd(/\d+)?|init)?", path) for path in paths), paths


@pytest.mark.parametrize("user", USERS)
def test_commands_get_three_descriptors(calm: shoal.Sandbox, user: str) -> None:
    code = """
    answer([number for number in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{number}")])
    """
    for stdin in (None, b"text"):
        result = calm.commands.run(["/bin/ls", "-l", "/proc/self/fd"], user=user, stdin=stdin)
        numbers = re.findall(r" (\d+) -> (.*)", result.stdout)
        assert [number for number, target in numbers if not target.startswith("/proc/")] == ["0", "1", "2"]
    assert set(python(calm, code, user)) == {"0", "1", "2"}


def test_host_listeners_are_out_of_reach(calm: shoal.Sandbox) -> None:
    name = f"shoal-test-{secrets.token_hex(4)}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_INET6) as six,
    ):
        abstract.bind("\0" + name)
        abstract.listen()
        six.bind(("::1", 0))
        six.listen()
        code = f"""
        def tcp(address, port):
            with socket.create_connection((address, port), timeout=2): pass
        def unix():
            with socket.socket(socket.AF_UNIX) as s: s.connect("\\0{name}")
        places = ("127.0.0.1", "127.0.1.1", "0.0.0.0", "10.0.2.15", "10.0.2.2", "192.168.0.1", "169.254.169.254")
        found = [tried(tcp, place, {tcp.getsockname()[1]}) for place in places]
        found += [tried(tcp, "::1", {six.getsockname()[1]}), tried(tcp, "fd00:ec2::254", 80), tried(unix)]
        answer(found)
        """
        found = python(calm, code)
    assert not {"ok"} & set(found), found
    assert "lo:" in calm.commands.run("cat /proc/net/dev").stdout
    assert len(calm.commands.run("tail -n +3 /proc/net/dev").stdout.splitlines()) == 1
