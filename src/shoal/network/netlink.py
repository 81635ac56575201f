"""Netlink messages as bytes: the few of rtnetlink and nf_tables that a sandbox's network is set up with.

Nothing is sent from here. A message is data, built once, and sent by whoever sits in the fresh namespace.
Lengths and rtnetlink values are in the byte order of the machine, nf_tables values in that of the network.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network

NETLINK_ROUTE = 0
NETLINK_NETFILTER = 12

LOOPBACK_INDEX = 1
"""The kernel gives `lo` this interface index in every network namespace."""

_REQUEST, _ACK, _REPLACE, _CREATE, _APPEND = 0x1, 0x4, 0x100, 0x400, 0x800
_NESTED = 0x8000
_REGISTER = 1
_VERDICT_REGISTER = 0

# -- framing -------------------------------------------------------------------------------------------------


def message(kind: int, flags: int, body: bytes, sequence: int = 0) -> bytes:
    """One netlink message. Addressed to the kernel, which is port 0."""
    return struct.pack("=IHHII", 16 + len(body), kind, flags | _REQUEST, sequence, 0) + _padded(body)


def attribute(kind: int, value: bytes) -> bytes:
    return _padded(struct.pack("=HH", 4 + len(value), kind) + value)


def _nest(kind: int, *attributes: bytes) -> bytes:
    return attribute(kind | _NESTED, b"".join(attributes))


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


def _u32(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack(">I", value))


def _text(kind: int, value: str) -> bytes:
    return attribute(kind, value.encode() + b"\0")


# -- rtnetlink -----------------------------------------------------------------------------------------------


def loopback_up() -> bytes:
    """`ip link set lo up`"""
    newlink, up = 16, 0x1
    return message(newlink, _ACK, struct.pack("=BxHiII", socket.AF_UNSPEC, 0, LOOPBACK_INDEX, up, up))


def loopback_address(address: IPv4Address) -> bytes:
    """`ip address add ADDRESS/32 dev lo`"""
    newaddr, host_scope, local, label = 20, 254, 2, 1
    header = struct.pack("=BBBBI", socket.AF_INET, 32, 0, host_scope, LOOPBACK_INDEX)
    body = header + attribute(local, address.packed) + attribute(label, address.packed)
    return message(newaddr, _ACK | _CREATE | _REPLACE, body)


def everything_is_local(source: IPv4Address) -> bytes:
    """`ip route add local default dev lo src SOURCE table local`: every address is this machine."""
    newroute, local_table, static, host_scope, local = 24, 255, 4, 254, 2
    outgoing, preferred_source = 4, 7
    header = struct.pack("=BBBBBBBBI", socket.AF_INET, 0, 0, 0, local_table, static, host_scope, local, 0)
    body = header + attribute(outgoing, struct.pack("=I", LOOPBACK_INDEX))
    return message(newroute, _ACK | _CREATE, body + attribute(preferred_source, source.packed))


# -- nf_tables: expressions ----------------------------------------------------------------------------------

Expressions = tuple[bytes, ...]
"""What one match or action of a rule compiles to; a rule is a sequence of them."""


def _expression(name: str, *attributes: bytes) -> bytes:
    return _nest(1, _text(1, name), _nest(2, *attributes))


def _compare(data: bytes, *, equal: bool = True) -> bytes:
    return _expression("cmp", _u32(1, _REGISTER), _u32(2, 0 if equal else 1), _nest(3, attribute(1, data)))


def _mask(data: bytes) -> bytes:
    zeros = bytes(len(data))
    sizes = _u32(1, _REGISTER) + _u32(2, _REGISTER) + _u32(3, len(data))
    return _expression("bitwise", sizes, _nest(4, attribute(1, data)), _nest(5, attribute(1, zeros)))


def _payload(base: int, offset: int, length: int) -> bytes:
    return _expression("payload", _u32(1, _REGISTER), _u32(2, base), _u32(3, offset), _u32(4, length))


def _network_field(offset: int, network: IPv4Network) -> Expressions:
    load = _payload(1, offset, 4)
    narrow = () if network.prefixlen == 32 else (_mask(network.netmask.packed),)
    return load, *narrow, _compare(network.network_address.packed)


def source_in(network: IPv4Network) -> Expressions:
    return _network_field(12, network)


def destination_in(network: IPv4Network) -> Expressions:
    return _network_field(16, network)


def protocol(number: int) -> Expressions:
    """`meta l4proto`: IPPROTO_TCP or IPPROTO_UDP."""
    l4proto = 16
    return _expression("meta", _u32(1, _REGISTER), _u32(2, l4proto)), _compare(bytes([number]))


def source_port(number: int, port: int) -> Expressions:
    return *protocol(number), _payload(2, 0, 2), _compare(struct.pack(">H", port))


def destination_port(number: int, port: int) -> Expressions:
    return *protocol(number), _payload(2, 2, 2), _compare(struct.pack(">H", port))


NEW, UNTRACKED = 0x8, 0x40


def connection_state(state: int) -> Expressions:
    """`ct state`: NEW or UNTRACKED."""
    load = _expression("ct", _u32(1, _REGISTER), _u32(2, 0))
    return load, _mask(struct.pack("=I", state)), _compare(bytes(4), equal=False)


def connections_over(limit: int) -> Expressions:
    """`ct count over LIMIT`: more live connections than that have matched this rule."""
    return (_expression("connlimit", _u32(1, limit), _u32(2, 1)),)


# -- nf_tables: actions --------------------------------------------------------------------------------------


def accept() -> Expressions:
    verdict = _nest(2, _u32(1, 1))
    return (_expression("immediate", _u32(1, _VERDICT_REGISTER), _nest(2, verdict)),)


def untrack() -> Expressions:
    """`notrack`: no connection tracking, and so no memory, for this packet."""
    return (_expression("notrack"),)


def redirect(port: int) -> Expressions:
    """To 127.0.0.1:PORT, keeping the original destination for SO_ORIGINAL_DST."""
    load = _expression("immediate", _u32(1, _REGISTER), _nest(2, attribute(1, struct.pack(">H", port))))
    return load, _expression("redir", _u32(1, _REGISTER), _u32(2, _REGISTER), _u32(3, 0x2))


def reset() -> Expressions:
    """Answer with a TCP RST: ECONNREFUSED at once."""
    return (_expression("reject", _u32(1, 1), attribute(2, b"\0")),)


def prohibit() -> Expressions:
    """Drop, and answer with ICMP "administratively prohibited": EPERM for the sender at once."""
    return (_expression("reject", _u32(1, 0), attribute(2, b"\x0d")),)


# -- nf_tables: tables, chains, rules ------------------------------------------------------------------------

_TABLES = 10
"""The subsystem number of nf_tables below nfnetlink."""


def _nf_message(kind: int, flags: int, body: bytes, sequence: int) -> bytes:
    return message(_TABLES << 8 | kind, flags, struct.pack(">BBH", socket.AF_INET, 0, 0) + body, sequence)


def table(name: str) -> bytes:
    return _text(1, name)


def chain(table: str, name: str, *, kind: str, priority: int) -> bytes:
    """A base chain at the output hook. `kind` is "filter" or "nat"."""
    output = 3
    hook = _nest(4, _u32(1, output), attribute(2, struct.pack(">i", priority)))
    return _text(1, table) + _text(3, name) + hook + _text(7, kind)


def rule(table: str, chain: str, *parts: Expressions) -> bytes:
    """Matches and one action, in order."""
    expressions = [expression for part in parts for expression in part]
    return _text(1, table) + _text(2, chain) + _nest(4, *expressions)


def ruleset(tables: Iterable[bytes], chains: Iterable[bytes], rules: Iterable[bytes]) -> bytes:
    """One nf_tables transaction: all of it or nothing. The kernel acknowledges the last message."""
    newtable, newchain, newrule = 0, 3, 6
    bodies = [(newtable, 0, body) for body in tables]
    bodies += [(newchain, 0, body) for body in chains]
    bodies += [(newrule, _APPEND, body) for body in rules]
    last = len(bodies)
    changes = [
        _nf_message(kind, flags | _CREATE | (_ACK if number == last else 0), body, number)
        for number, (kind, flags, body) in enumerate(bodies, start=1)
    ]
    return _batch(changes)


def _batch(changes: Sequence[bytes]) -> bytes:
    begin, end = 16, 17
    frame = struct.pack(">BBH", socket.AF_UNSPEC, 0, _TABLES)
    return message(begin, 0, frame) + b"".join(changes) + message(end, 0, frame, len(changes) + 1)
