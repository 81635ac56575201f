"""System calls that Python has no function for. All raise OSError that names the call."""

from __future__ import annotations

import ctypes
import os
import struct

# Numbers from 424 on are the same on every architecture.
OPEN_TREE, MOVE_MOUNT, FSOPEN, FSCONFIG, FSMOUNT, CLONE3, MOUNT_SETATTR = 428, 429, 430, 431, 432, 435, 442
QUOTACTL_FD, LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF = 443, 444, 446

NEWTIME, NEWNS, NEWCGROUP, NEWUTS = 0x80, 0x20000, 0x2000000, 0x4000000
NEWIPC, NEWUSER, NEWPID, NEWNET = 0x8000000, 0x10000000, 0x20000000, 0x40000000
CLONE_PIDFD, CLONE_INTO_CGROUP = 0x1000, 0x200000000

MS_REC, MS_PRIVATE, MNT_DETACH = 0x4000, 1 << 18, 2
SET_FLAG, SET_STRING, SET_FD, CMD_CREATE = 0, 1, 5, 6
ATTR_RDONLY, ATTR_IDMAP = 0x1, 0x100000
AT_FDCWD, AT_EMPTY_PATH, CLOEXEC = -100, 0x1000, 1
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH = 1, 4

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38

Argument = int | bytes | None


def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def failed(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def syscall(what: str, number: int, *arguments: Argument) -> int:
    words = [ctypes.c_long(a) if isinstance(a, int) else ctypes.c_char_p(a) for a in arguments]
    result = libc().syscall
    result.restype = ctypes.c_long
    if (value := result(ctypes.c_long(number), *words)) < 0:
        raise failed(what)
    return int(value)


def unshare(flags: int, what: str = "unshare") -> None:
    if libc().unshare(ctypes.c_int(flags)) < 0:
        raise failed(what)


def prctl(what: str, option: int, *arguments: int | ctypes.c_void_p) -> None:
    words = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    words += [ctypes.c_ulong(0)] * (4 - len(words))
    if libc().prctl(ctypes.c_int(option), *words) < 0:
        raise failed(what)


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    names = [name.encode() for name in (source, target, kind)]
    if libc().mount(*names, ctypes.c_ulong(flags), data.encode()) < 0:
        raise failed(f"mount {kind or target}")


def detach(target: str) -> None:
    if libc().umount2(target.encode(), MNT_DETACH) < 0:
        raise failed(f"umount {target}")


def private_mounts() -> None:
    """In a mount namespace of one's own: from here on no mount reaches the others."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)


def fsopen(kind: str) -> int:
    return syscall(f"fsopen {kind}", FSOPEN, kind.encode(), CLOEXEC)


def set_string(context: int, key: str, value: str) -> None:
    syscall(f"fsconfig {key}={value}", FSCONFIG, context, SET_STRING, key.encode(), value.encode(), 0)


def set_flag(context: int, key: str) -> None:
    syscall(f"fsconfig {key}", FSCONFIG, context, SET_FLAG, key.encode(), None, 0)


def set_fd(context: int, key: str, descriptor: int) -> None:
    syscall(f"fsconfig {key} by descriptor", FSCONFIG, context, SET_FD, key.encode(), None, descriptor)


def fsmount(context: int) -> int:
    """Creates the file system and returns its mount, attached nowhere."""
    try:
        syscall("fsconfig create", FSCONFIG, context, CMD_CREATE, None, None, 0)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}{complaint(context)}") from None
    return syscall("fsmount", FSMOUNT, context, CLOEXEC, 0)


def complaint(context: int) -> str:
    """The kernel's own words about a mount that it refused."""
    try:
        words = os.read(context, 512).decode("utf-8", "replace").strip()
    except OSError:
        return ""
    return f" ({words})"


def open_tree(path: str) -> int:
    """A detached copy of the mount at `path`, from that folder down."""
    return syscall(f"open_tree {path}", OPEN_TREE, AT_FDCWD, path.encode(), OPEN_TREE_CLONE | os.O_CLOEXEC)


def copy_tree(tree: int) -> int:
    """A copy of a detached mount."""
    flags = OPEN_TREE_CLONE | os.O_CLOEXEC | AT_EMPTY_PATH
    return syscall("open_tree of a detached mount", OPEN_TREE, tree, b"", flags)


def move_mount(tree: int, target: str) -> None:
    arguments = (tree, b"", AT_FDCWD, target.encode(), MOVE_MOUNT_F_EMPTY_PATH)
    syscall("move_mount", MOVE_MOUNT, *arguments)


def mount_setattr(tree: int, attributes: int, user_namespace: int = 0) -> None:
    request = struct.pack("=4Q", attributes, 0, 0, user_namespace)
    syscall("mount_setattr", MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, request, len(request))


def clone_into(cgroup: int) -> int:
    """Forks a child born in the cgroup that the descriptor names; returns 0 in it, as fork does."""
    flags, exit_signal = CLONE_INTO_CGROUP, 17
    request = struct.pack("=11Q", flags, 0, 0, 0, exit_signal, 0, 0, 0, 0, 0, cgroup)
    return syscall("clone3 into a cgroup", CLONE3, request, len(request))
