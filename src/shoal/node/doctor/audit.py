"""Probes of what tells the host what happens in a sandbox."""

from __future__ import annotations

import ctypes
import os
import socket
import struct

from shoal.node.doctor import calls
from shoal.node.doctor.finding import Probe, Scene, Shortfall

FAN_CLOEXEC, FAN_NONBLOCK = 0x1, 0x2
FAN_MARK_ADD, FAN_MARK_FILESYSTEM = 0x1, 0x100
FAN_OPEN = 0x20
NETLINK_AUDIT, AUDIT_GET, ACKNOWLEDGED = 9, 1000, 5


def fanotify(scene: Scene) -> str:
    libc = calls.libc()
    group = libc.fanotify_init(FAN_CLOEXEC | FAN_NONBLOCK, os.O_RDONLY)
    if group < 0:
        raise calls.failed("fanotify_init")
    path = scene.folder / "opened"
    path.touch()
    flags, mask = FAN_MARK_ADD | FAN_MARK_FILESYSTEM, ctypes.c_uint64(FAN_OPEN)
    if libc.fanotify_mark(group, flags, mask, -1, str(path).encode()):
        raise calls.failed("fanotify_mark")
    path.read_bytes()
    try:
        os.read(group, 4096)
    except BlockingIOError:
        raise Shortfall("a watched file system was read and nothing was told") from None
    return "what is opened on a watched file system is told"


def kernel_audit(_: Scene) -> str:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_AUDIT) as link:
        link.settimeout(1.0)
        link.send(struct.pack("=IHHII", 16, AUDIT_GET, ACKNOWLEDGED, 1, 0))
        for _reply in range(2):
            data = link.recv(4096)
            if struct.unpack_from("=H", data, 4) == (AUDIT_GET,):
                enabled: int = struct.unpack_from("=I", data, 20)[0]
                if enabled:
                    return "on: `ausearch -m LANDLOCK_ACCESS` shows what Landlock refused"
                raise Shortfall("off: what Landlock refuses is written down nowhere")
    raise Shortfall("the kernel does not say whether it is on")


PROBES = (
    Probe(
        id="audit.fanotify",
        title="fanotify",
        run=fanotify,
        missing="absent",
        why="Audit(files=True) writes down which files a sandbox opens.",
        fix="Run as root, on a kernel with CONFIG_FANOTIFY; fs.fanotify.max_user_groups bounds the watched sandboxes.",
    ),
    Probe(
        id="audit.kernel",
        title="the kernel's audit",
        run=kernel_audit,
        missing="absent",
        why="Writes down what Landlock refuses to a process. What mounts refuse (hidden and read-only paths, programs "
        "outside of library folders) no part of the kernel reports; box.audit() has the commands that could not start.",
        fix="Nothing needs doing: access policies hold without. To have it: auditctl -e 1, on Linux 6.15 or newer.",
    ),
)
