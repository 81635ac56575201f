"""The system-call filter of a sandbox, from a table with reasons, compiled once to BPF by libseccomp."""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import os
from typing import Any, Final

from shoal.errors import Unsupported

_ALLOW: Final = 0x7FFF0000
_KILL_PROCESS: Final = 0x80000000
_ERRNO: Final = 0x00050000
_GT, _MASKED_EQ = 6, 7
_BAD_ARCHITECTURE, _OPTIMIZE = 2, 8
"""Attributes SCMP_FLTATR_ACT_BADARCH and SCMP_FLTATR_CTL_OPTIMIZE."""

_REFUSED: Final = (
    # Kernel interfaces with a history of holes, or state that is not namespaced.
    ("bpf userfaultfd perf_event_open io_uring_setup io_uring_enter io_uring_register", "attack surface"),
    ("add_key request_key keyctl", "keyrings outlive the sandbox and are charged to uids"),
    (
        "kexec_load kexec_file_load init_module finit_module delete_module create_module reboot",
        "the host's kernel",
    ),
    ("open_by_handle_at name_to_handle_at", "reaches files past the mount namespace"),
    ("syslog acct quotactl quotactl_fd swapon swapoff", "the host's state"),
    ("settimeofday clock_settime clock_adjtime adjtimex stime", "the host's clock"),
    ("iopl ioperm modify_ldt vm86 vm86old", "hardware"),
    ("lookup_dcookie uselib ustat sysfs _sysctl nfsservctl vserver", "obsolete"),
    # Root inside has no CAP_SYS_ADMIN, so these fail anyway; refused here they never reach the kernel's parsers.
    (
        "mount umount umount2 pivot_root move_mount open_tree fsopen fsconfig fsmount fspick mount_setattr",
        "mounts",
    ),
    ("setns unshare", "namespaces"),
    ("fanotify_init", "watches whole file systems"),
    ("vhangup", "the host's terminals"),
)

# With pid 1 as first argument they would take init down or slow it, and a bad reward would look like a broken platform.
_NOT_ON_INIT: Final = (
    "prlimit64 sched_setparam sched_setscheduler sched_setaffinity sched_setattr migrate_pages move_pages"
)
_SOCKET_FAMILIES: Final = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK. AF_VSOCK for one is not namespaced: it is a way to the hypervisor."""
_NETLINK: Final = 16
_NETLINK_PROTOCOLS: Final = (0, 4)
"""NETLINK_ROUTE and NETLINK_SOCK_DIAG."""


def _is(argument: int, value: int) -> tuple[int, int, int, int]:
    """Of the lower 32 bits: the kernel takes an int, and what is above it is the caller's to choose."""
    return (argument, _MASKED_EQ, 0xFFFFFFFF, value)


class _Comparison(ctypes.Structure):
    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def _load() -> Any:
    name = ctypes.util.find_library("seccomp") or "libseccomp.so.2"
    try:
        library = ctypes.CDLL(name, use_errno=True)
    except OSError as error:
        raise Unsupported("libseccomp is missing: install libseccomp2 (Debian) or libseccomp (Fedora)") from error
    library.seccomp_init.restype = ctypes.c_void_p
    return library


class _Filter:
    def __init__(self) -> None:
        self._library = _load()
        self._context = ctypes.c_void_p(self._library.seccomp_init(ctypes.c_uint32(_ALLOW)))
        # An `int 0x80` socketcall would pass every rule on families below.
        self._library.seccomp_attr_set(self._context, _BAD_ARCHITECTURE, ctypes.c_uint32(_KILL_PROCESS))
        self._library.seccomp_attr_set(self._context, _OPTIMIZE, ctypes.c_uint32(2))

    def refuse(self, name: str, error: int, *comparisons: tuple[int, int, int, int]) -> None:
        """A name that this architecture or library does not have needs no rule."""
        number = self._library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:
            return
        array = (_Comparison * len(comparisons))(*(_Comparison(*c) for c in comparisons))
        action = ctypes.c_uint32(_ERRNO | error)
        result = self._library.seccomp_rule_add_array(self._context, action, number, len(comparisons), array)
        if result < 0:
            raise Unsupported(f"libseccomp takes no rule for {name}: {os.strerror(-result)}")

    def export(self) -> bytes:
        descriptor = os.memfd_create("seccomp")
        try:
            result = self._library.seccomp_export_bpf(self._context, descriptor)
            if result < 0:
                raise Unsupported(f"libseccomp cannot compile the filter: {os.strerror(-result)}")
            return os.pread(descriptor, 1 << 20, 0)
        finally:
            os.close(descriptor)
            self._library.seccomp_release(self._context)


def compile_filter() -> bytes:
    """The filter as an array of `struct sock_filter`. Unsupported without libseccomp."""
    rules = _Filter()
    for names, _reason in _REFUSED:
        for name in names.split():
            rules.refuse(name, errno.EPERM)
    for name in _NOT_ON_INIT.split():
        rules.refuse(name, errno.EPERM, _is(0, 1))
    for name, by_user in (("setpriority", 2), ("ioprio_set", 3)):
        rules.refuse(name, errno.EPERM, _is(1, 1))
        rules.refuse(name, errno.EPERM, _is(0, by_user))  # init is of root's processes
    _refuse_sockets(rules)
    return rules.export()


def _refuse_sockets(rules: _Filter) -> None:
    for call in ("socket", "socketpair"):
        _refuse_others(rules, call, errno.EAFNOSUPPORT, 0, _SOCKET_FAMILIES)
    netlink = _is(0, _NETLINK)
    _refuse_others(rules, "socket", errno.EPROTONOSUPPORT, 2, _NETLINK_PROTOCOLS, netlink)


def _refuse_others(
    rules: _Filter, call: str, error: int, argument: int, kept: tuple[int, ...], *also: tuple[int, int, int, int]
) -> None:
    """All values of an argument but these. One comparison for what is above them keeps the program short."""
    for value in set(range(max(kept))) - set(kept):
        rules.refuse(call, error, *also, _is(argument, value))
    rules.refuse(call, error, *also, (argument, _GT, max(kept), 0))
