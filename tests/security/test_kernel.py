"""What the kernel refuses: system calls, capabilities, namespaces, mounts, devices and settings."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import shoal

from .intruder import USERS, compiled, init_pid, python, still_works, x86_64

pytestmark = pytest.mark.root

CALLS = {
    "mount": 165, "umount2": 166, "pivot_root": 155, "fsopen": 430, "open_tree": 428, "move_mount": 429,
    "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442, "unshare": 272, "setns": 308, "bpf":
    321, "keyctl": 250, "add_key": 248, "request_key": 249, "perf_event_open": 298, "userfaultfd": 323,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "kexec_load": 246,
    "kexec_file_load": 320, "init_module": 175, "finit_module": 313, "delete_module": 176, "reboot": 169,
    "open_by_handle_at": 304, "name_to_handle_at": 303, "syslog": 103, "acct": 163, "swapon": 167, "swapoff":
    168, "settimeofday": 164, "clock_settime": 227, "adjtimex": 159, "clock_adjtime": 305, "iopl": 172,
    "ioperm": 173, "fanotify_init": 300, "vhangup": 153, "quotactl": 179, "sethostname": 170,
    "setdomainname": 171, "modify_ldt": 154, "fanotify_mark": 301, "quotactl_fd": 443, "open_tree_attr": 467,
}  # fmt: skip
KEPT = {0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 31}
"""CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, SYS_CHROOT, SETFCAP."""


@x86_64
@pytest.mark.parametrize("user", USERS)
def test_refused_calls(calm: shoal.Sandbox, user: str) -> None:
    code = f"""
    text = ctypes.create_string_buffer(4096)
    answer({{name: call(number, 1, text, text, 0, 0, 0) for name, number in {CALLS!r}.items()}})
    """
    assert {name: how for name, how in python(calm, code, user).items() if how != "EPERM"} == {}


def test_capabilities_are_few_and_cannot_come_back(calm: shoal.Sandbox) -> None:
    text = calm.commands.run("grep Cap /proc/self/status", check=True).stdout
    sets = {line.split()[0]: int(line.split()[1], 16) for line in text.splitlines()}
    allowed = sum(1 << number for number in KEPT)
    assert all(value & ~allowed == 0 for value in sets.values()), text
    assert sets["CapInh:"] == sets["CapAmb:"] == 0
    host = Path(f"/proc/{init_pid(calm)}/status").read_text()
    assert f"CapBnd:\t{allowed:016x}" in host
    assert "CapEff:\t0000000000000000" in calm.commands.run("grep CapEff /proc/self/status", user="user").stdout


@x86_64
@pytest.mark.parametrize("user", USERS)
def test_no_namespace_can_be_made_or_entered(calm: shoal.Sandbox, user: str) -> None:
    code = """
    flags = {"mnt": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000,
             "pid": 0x20000000, "net": 0x40000000, "time": 0x80}
    def clone(number, *arguments):
        how = None
        result = _libc.syscall(ctypes.c_long(number), *arguments)
        if result == 0: os._exit(0)
        return "ok" if result > 0 else errno.errorcode[ctypes.get_errno()]
    found = {}
    for name, flag in flags.items():
        found[name] = [call(272, flag)]
        if name != "time":
            found[name].append(clone(56, ctypes.c_long(flag | 17), None, None, None, None))
        found[name].append(clone(435, struct.pack("QQQQQQQQ", flag, 0, 0, 0, 17, 0, 0, 0), ctypes.c_long(64)))
        found[name].append(call(308, os.open(f"/proc/self/ns/{name}", os.O_RDONLY), 0))
    answer(found)
    """
    found = python(calm, code, user)
    made = {name: hows for name, hows in found.items() if not set(hows) <= {"EPERM", "ENOSPC", "EINVAL", "EUSERS"}}
    assert made == {}
    assert calm.commands.run("cat /proc/sys/user/max_user_namespaces").stdout == "0\n"
    assert calm.commands.run("unshare -Ur true || bwrap --unshare-user --ro-bind / / true", user=user).exit_code != 0


@x86_64
@pytest.mark.parametrize("user", USERS)
def test_socket_families(calm: shoal.Sandbox, user: str) -> None:
    """AF_VSOCK is not namespaced; the rest have had their holes. Bits that the kernel ignores do not help."""
    code = """
    found = {}
    for top in (0, 1 << 32, 1 << 63):
        for family in range(48):
            kinds = [call(41, top | family, kind, 0) for kind in (1, 2, 3, 5)]
            found[f"{family} {top >> 32}"] = "ok" if "ok" in kinds else kinds[0]
        for protocol in range(32):
            found[f"netlink {protocol} {top >> 32}"] = call(41, 16, 3, top | protocol)
    found["vsock device"] = tried(os.open, "/dev/vsock", os.O_RDWR)
    answer(found)
    """
    found = python(calm, code, user)
    opened = {name for name, how in found.items() if how == "ok"}
    assert opened <= {f"{family} {top}" for family in (1, 2, 10, 16) for top in (0, 1, -(1 << 31), 1 << 31)} | {
        f"netlink {protocol} {top}" for protocol in (0, 4) for top in (0, 1, -(1 << 31), 1 << 31)
    }
    assert {"1 0", "2 0", "10 0", "netlink 0 0"} <= opened


@x86_64
@pytest.mark.parametrize(
    "assembly",
    [
        "mov $20, %%eax; int $0x80",
        "mov $102, %%eax; mov $1, %%ebx; xor %%ecx, %%ecx; int $0x80",
        "mov $0x40000027, %%eax; syscall",
    ],
    ids=["getpid of i386", "socketcall of i386", "getpid of x32"],
)
def test_calls_of_other_architectures_kill(small: shoal.Sandbox, assembly: str) -> None:
    program = compiled(
        small, f'int main() {{ __asm__ volatile("{assembly}" ::: "rax", "rbx", "rcx", "memory"); return 0; }}'
    )
    result = small.commands.run([program], timeout=10)
    assert result.signal in (signal.SIGSYS, signal.SIGSEGV), "SIGSEGV where the kernel has no such entry"
    still_works(small)


@pytest.mark.parametrize("user", USERS)
def test_nothing_can_be_mounted(calm: shoal.Sandbox, user: str) -> None:
    """With cgroup2 mounted, a command could leave the group by which it is killed."""
    for kind in ("cgroup2", "cgroup", "tmpfs", "proc", "sysfs", "overlay", "bpf", "debugfs", "devpts", "mqueue"):
        assert calm.commands.run(["mount", "-t", kind, "none", "/mnt"], user=user).exit_code != 0
    before = calm.commands.run("cat /proc/self/mountinfo").stdout
    for attempt in (
        "mount --bind /etc /mnt",
        "mount -o remount,rw /sys",
        "umount /proc",
        "umount -l /dev/pts",
        "umount /sys",
    ):
        assert calm.commands.run(attempt, user=user).exit_code != 0
    assert calm.commands.run("cat /proc/self/mountinfo").stdout == before
    assert calm.commands.run("ls -A /sys/fs/cgroup").stdout == ""


@pytest.mark.parametrize("user", USERS)
def test_no_device_can_be_made(small: shoal.Sandbox, user: str) -> None:
    code = """
    import stat
    found = {}
    for place in ("/tmp", "/dev/shm", "/dev", "/dev/mqueue", "/workspace"):
        for kind, major, minor in ((stat.S_IFCHR, 1, 1), (stat.S_IFCHR, 1, 11), (stat.S_IFCHR, 10, 200),
                                   (stat.S_IFBLK, 254, 0), (stat.S_IFBLK, 7, 0), (stat.S_IFCHR, 5, 1)):
            found[f"{place} {major}:{minor}"] = tried(os.mknod, f"{place}/d", kind | 0o666, os.makedev(major, minor))
    answer(found)
    """
    assert set(python(small, code, user).values()) <= {"EPERM", "EACCES"}
    present = set(small.commands.run("find /dev -type b -o -type c | sort").stdout.split())
    assert present <= {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "pts/ptmx")} | {
        f"/dev/pts/{number}" for number in range(4)
    }


@pytest.mark.parametrize("user", USERS)
def test_settings_of_the_kernel_are_read_only(calm: shoal.Sandbox, user: str) -> None:
    """But for those of the sandbox's own IPC and PID namespaces."""
    code = """
    written = []
    for folder, _, names in os.walk("/proc/sys"):
        for name in names:
            path = f"{folder}/{name}"
            try:
                with open(path, "r+b", buffering=0) as file: file.write(file.read(4096) or b"0")
            except OSError:
                continue
            written.append(path)
    more = [f"/proc/{name}" for name in ("sysrq-trigger", "kcore", "kmsg", "kpageflags", "slabinfo", "vmallocinfo")]
    answer([written] + [{path: tried(os.open, path, how) for path in more if os.path.exists(path)}
                        for how in (os.O_WRONLY, os.O_RDONLY)])
    """
    written, more, read = python(calm, code, user)
    own = (
        "/proc/sys/kernel/shm",
        "/proc/sys/kernel/msg",
        "/proc/sys/kernel/sem",
        "/proc/sys/kernel/auto_msgmni",
        "/proc/sys/kernel/pid_max",
        "/proc/sys/fs/mqueue/",
    )
    assert [path for path in written if not path.startswith(own)] == []
    assert "ok" not in {**more, **read}.values()


def test_its_own_limit_of_pids_can_be_lowered_without_harm(small: shoal.Sandbox) -> None:
    small.commands.run("echo 301 > /proc/sys/kernel/pid_max")
    for _ in range(320):
        small.commands.run(["/bin/true"], timeout=10)
    still_works(small)
    assert int(Path("/proc/sys/kernel/pid_max").read_text()) > 301


def test_a_crash_does_not_start_a_handler_on_the_host(calm: shoal.Sandbox) -> None:
    """A core_pattern with a pipe runs as the host's root, unless the limit is exactly 1 (0 does not stop it)."""
    code = "answer([resource.getrlimit(resource.RLIMIT_CORE), tried(open, '/proc/sys/kernel/core_pattern', 'w')])"
    limits, pattern = python(calm, code)
    assert limits == [1, 1]
    assert pattern in ("EACCES", "EPERM")


def test_set_uid_programs_gain_nothing(small: shoal.Sandbox) -> None:
    """Neither the host's, nor one that root inside left for another user, nor one with file capabilities."""
    assert "NoNewPrivs:\t1" in Path(f"/proc/{init_pid(small)}/status").read_text()
    program = compiled(small, '#include <unistd.h>\n#include <stdio.h>\nint main() { printf("%d", geteuid()); }')
    small.commands.run(
        f"chown root {program}; chmod 4755 {program}; cp -p {program} /dev/shm/s; chmod 4755 /dev/shm/s", check=True
    )
    for path in (program, "/dev/shm/s"):
        assert small.commands.run([path], user="user").stdout in ("1000", "")
    assert small.commands.run("su root -c id </dev/null", user="user").exit_code != 0
    assert Path(program).name not in os.listdir("/tmp")
