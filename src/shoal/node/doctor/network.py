"""A probe of the network: the very set-up that a sandbox gets, in a namespace that ends with the probe."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from shoal.network.namespace import EGRESS_PORT, SYNTHETIC, Recipe, filtered
from shoal.node.doctor import calls, namespaces
from shoal.node.doctor.finding import Probe, Scene, Shortfall

SO_ORIGINAL_DST = 80


def send(protocol: int, messages: bytes, replies: int) -> None:
    """Hands the messages to the kernel and waits for so many acknowledgements; the first error is raised."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as link:
        link.bind((0, 0))
        link.settimeout(1.0)
        link.sendto(messages, (0, 0))
        while replies > 0:
            replies -= _acknowledged(link.recv(65536))


def _acknowledged(data: bytes) -> int:
    count, nlmsg_error = 0, 2
    while len(data) >= 20:
        size, kind = struct.unpack_from("=IH", data)
        if kind == nlmsg_error:
            if number := -struct.unpack_from("=i", data, 16)[0]:
                raise OSError(number, f"netlink: {os.strerror(number)}")
            count += 1
        data = data[(max(size, 16) + 3) & ~3 :]
    return count


def carry_out(recipe: Recipe) -> None:
    for protocol, messages, replies in recipe.messages:
        send(protocol, messages, replies)
    for name, value in recipe.sysctls:
        Path("/proc/sys/net", name).write_text(value)


def filtering(_: Scene) -> str:
    namespaces.enter(calls.NEWNET)
    carry_out(filtered())
    with socket.create_server(("127.0.0.1", EGRESS_PORT)) as listener:
        listener.settimeout(1.0)
        wanted = (str(SYNTHETIC[7]), 443)
        with socket.create_connection(wanted, timeout=1.0):
            seen = _original(listener.accept()[0])
    if seen != wanted:
        raise Shortfall(f"a connection to {wanted} was redirected and looks as if to {seen}")
    if not _refused("192.0.2.1"):
        raise Shortfall("a connection that the rules refuse was made")
    return "a sandbox's whole rule set loads, redirects what it should and refuses the rest"


def _original(connection: socket.socket) -> tuple[str, int]:
    with connection:
        port, address = struct.unpack_from(">2xH4s", connection.getsockopt(socket.IPPROTO_IP, SO_ORIGINAL_DST, 16))
    return socket.inet_ntoa(address), port


def _refused(address: str) -> bool:
    try:
        socket.create_connection((address, 80), timeout=1.0).close()
    except ConnectionRefusedError:
        return True
    return False


PROBES = (
    Probe(
        id="network.nftables",
        title="nf_tables in a namespace of its own",
        run=filtering,
        why="Sandboxes with an allow-list reach the network only by these rules; without them there is no network.",
        fix="sudo modprobe -a nf_tables nft_redir nft_reject_ipv4 nft_ct nft_connlimit nf_nat",
    ),
)
