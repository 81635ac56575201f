"""Probes of what confines a process beyond namespaces."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from pathlib import Path

from shoal.node.doctor import calls
from shoal.node.doctor.finding import Probe, Scene, Shortfall
from shoal.sandbox import apparmor as profile

GETPPID = {"x86_64": 110, "aarch64": 173}
"""The call that the trial filter refuses; nothing here needs it."""
SECCOMP_MODE_FILTER = 2
LOAD_NUMBER, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000

CREATE_RULESET_VERSION = 1
ACCESS_WRITE_FILE = 1 << 1


def seccomp(_: Scene) -> str:
    number = GETPPID.get(platform.machine())
    if number is None:
        raise Shortfall(f"not tried: the number of getppid on {platform.machine()} is not known here", "warn")
    _load(
        (LOAD_NUMBER, 0, 0, 0),
        (JUMP_EQUAL, 0, 1, number),
        (RETURN, 0, 0, ERRNO | errno.EPERM),
        (RETURN, 0, 0, ALLOW),
    )
    try:
        calls.syscall("getppid", number)
    except PermissionError:
        return "a filter was loaded and refuses what it should"
    raise Shortfall("a filter was loaded and refuses nothing")


def _load(*program: tuple[int, int, int, int]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    calls.prctl("prctl no_new_privs", calls.PR_SET_NO_NEW_PRIVS, 1)
    address = ctypes.c_void_p(ctypes.addressof(header))
    calls.prctl("prctl seccomp", calls.PR_SET_SECCOMP, SECCOMP_MODE_FILTER, address)


def libseccomp(_: Scene) -> str:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        raise Shortfall("libseccomp.so.2 is not installed") from None
    library.seccomp_version.restype = ctypes.POINTER(ctypes.c_uint * 3)
    version = ".".join(map(str, library.seccomp_version().contents))
    if library.seccomp_syscall_resolve_name(b"openat") < 0:
        raise Shortfall(f"libseccomp {version} does not know openat")
    return f"version {version}"


def landlock(_: Scene) -> str:
    version = calls.syscall("landlock_create_ruleset", calls.LANDLOCK_CREATE_RULESET, None, 0, CREATE_RULESET_VERSION)
    request = struct.pack("=Q", ACCESS_WRITE_FILE)
    rules = calls.syscall("landlock_create_ruleset", calls.LANDLOCK_CREATE_RULESET, request, len(request), 0)
    calls.prctl("prctl no_new_privs", calls.PR_SET_NO_NEW_PRIVS, 1)
    calls.syscall("landlock_restrict_self", calls.LANDLOCK_RESTRICT_SELF, rules, 0)
    try:
        os.close(os.open("/dev/null", os.O_WRONLY))
    except PermissionError:
        return f"ABI {version}; a process that gave up writing cannot write"
    raise Shortfall(f"ABI {version}, but a process that gave up writing still can")


OTHERS = (
    "other walls stand in: namespaces, ids that are nobody's, no capabilities outside, the allow-list of system calls, "
    "and Landlock for access policies"
)


def apparmor(_: Scene) -> str:
    switch = Path("/sys/module/apparmor/parameters/enabled")
    if not switch.exists() or switch.read_text().strip() != "Y":
        raise Shortfall(f"not in this kernel, or turned off; {OTHERS}")
    if profile.is_loaded():
        return f"on; sandboxes run under the profile {profile.NAME}"
    fix = f"sudo apparmor_parser -r -W {profile.profile_file()}, then start the node again."
    raise Shortfall(f"on, but the profile {profile.NAME} is not loaded or not to be seen; {OTHERS}", "warn", fix)


def selinux(_: Scene) -> str:
    switch = Path("/sys/fs/selinux/enforce")
    if not switch.exists():
        raise Shortfall(f"not in this kernel, or turned off; {OTHERS}")
    if switch.read_text().strip() == "1":
        return "enforcing; sandboxes run in the domain of their node, Shoal brings no policy of its own"
    raise Shortfall("permissive: it reports and refuses nothing", fix="sudo setenforce 1")


STAND_IN = "Nothing needs doing: namespaces, seccomp and, where it is ok, Landlock confine a sandbox. To add it: "

PROBES = (
    Probe(
        id="security.seccomp",
        title="seccomp filters",
        run=seccomp,
        missing="fail",
        why="Keeps sandboxes away from system calls that reach around their namespaces (AF_VSOCK, io_uring, bpf).",
        fix="Use a kernel with CONFIG_SECCOMP_FILTER.",
    ),
    Probe(
        id="security.libseccomp",
        title="libseccomp",
        run=libseccomp,
        why="Its table turns names of system calls into this machine's numbers.",
        fix="sudo apt-get install libseccomp2",
    ),
    Probe(
        id="security.landlock",
        title="Landlock",
        run=landlock,
        why="Under an access policy it refuses to execute what lies in library folders, and keeps commands from "
        "looking into processes that are older than the policy. The rest of a policy is mounts and holds without it. "
        "It stands in where AppArmor and SELinux are absent.",
        fix="Use Linux 5.13 or newer and put landlock into the kernel parameter lsm=.",
    ),
    Probe(
        id="security.apparmor",
        title="AppArmor",
        run=apparmor,
        missing="absent",
        why="A second wall around the node and its sandboxes.",
        fix=f"{STAND_IN}sudo apt-get install apparmor, with apparmor=1 security=apparmor on the kernel command line; "
        f"then load the profile {profile.NAME} that comes with Shoal.",
    ),
    Probe(
        id="security.selinux",
        title="SELinux",
        run=selinux,
        missing="absent",
        why="A second wall around the node and its sandboxes.",
        fix=f"{STAND_IN}use a distribution that ships it (Fedora, RHEL) or selinux=1 security=selinux.",
    ),
)
