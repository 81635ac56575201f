"""Carries out a `Recipe` in a fresh network namespace, as the spawner does, and runs programs in there.

Started as a program with a Unix socket as its argument. It becomes root of a user namespace that owns the
network namespace; what it runs sits in another one, as a sandbox does, and has no power over the network.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import msgspec

from shoal.network.namespace import Listener, Recipe

NEWUSER, NEWNET, NEWNS = 0x10000000, 0x40000000, 0x00020000


def unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def become_root(flags: int) -> None:
    uid, gid = os.geteuid(), os.getegid()
    unshare(NEWUSER | flags)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def carry_out(recipe: Recipe) -> list[socket.socket]:
    for protocol, data, acks in recipe.messages:
        send(protocol, data, acks)
    for path, value in recipe.sysctls:
        Path("/proc/sys/net", path).write_text(value)
    return [listen(listener) for listener in recipe.listeners]


def send(protocol: int, data: bytes, acks: int) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as netlink:
        netlink.settimeout(5)
        netlink.sendto(data, (0, 0))
        while acks > 0:
            acks -= check(netlink.recv(65536))


def check(reply: bytes) -> int:
    """How many acknowledgements stand in it."""
    found = 0
    while len(reply) >= 20:
        length, kind = struct.unpack_from("=IH", reply)
        error = struct.unpack_from("=i", reply, 16)[0] if kind == 2 else 0
        if error:
            raise OSError(-error, f"message {struct.unpack_from('=I', reply, 28)[0]}")
        found += kind == 2
        reply = reply[(length + 3) & ~3 :]
    return found


def listen(listener: Listener) -> socket.socket:
    kind = socket.SOCK_STREAM if listener.kind == "tcp" else socket.SOCK_DGRAM
    opened = socket.socket(socket.AF_INET, kind)
    opened.bind((listener.address, listener.port))
    if listener.kind == "tcp":
        opened.listen(listener.backlog)
    return opened


def serve(control: socket.socket) -> None:
    recipe = msgspec.msgpack.decode(control.recv(1 << 20), type=Recipe)
    become_root(NEWNET)
    listeners = carry_out(recipe)
    socket.send_fds(control, [b"ready"], [listener.fileno() for listener in listeners])
    for listener in listeners:
        listener.close()
    while request := control.recv(1 << 20):
        arguments, environment = msgspec.msgpack.decode(request, type=tuple[list[str], dict[str, str]])
        control.send(msgspec.msgpack.encode(run(arguments, environment)))


def run(arguments: list[str], environment: dict[str, str]) -> tuple[int, bytes, bytes]:
    done = subprocess.run(
        arguments,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        preexec_fn=lambda: become_root(0),
    )
    return done.returncode, done.stdout, done.stderr


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as inherited:
        serve(inherited)
