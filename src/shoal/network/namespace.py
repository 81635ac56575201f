"""What a sandbox's network namespace consists of, as data: a `Recipe` that is carried out inside a fresh one.

No packet leaves it. A default route of type `local` makes every address this machine; nf_tables rules lead
what may have a destination to listeners whose descriptors the host holds, and refuse the rest at once. The
namespace belongs to a user namespace that no sandbox enters, so root in a sandbox has no power over this.

The rules, by hook of locally made packets:

    raw     DNS, TCP to the synthetic range and to allowed ranges, and the listeners' replies are tracked (a
            redirect needs that); nothing else is: tracking takes kernel memory that nobody's limit pays for.
    nat     DNS goes to the DNS listeners, the other tracked TCP to the egress listener.
    filter  A connection straight to the egress listener has no original destination and is reset. Too many
            tracked flows at once are prohibited. What stays on the sandbox's own addresses passes, redirected
            or not. Other TCP is reset (ECONNREFUSED), anything else is prohibited (EPERM).

IPv6 has no route but ::1, so it fails with ENETUNREACH without a rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network
from socket import IPPROTO_TCP as TCP
from socket import IPPROTO_UDP as UDP
from typing import Literal

from msgspec import Struct

from shoal.network import netlink as nl

ADDRESS = IPv4Address("10.0.2.15")
"""Every sandbox's own address, which its hostname stands for."""
SYNTHETIC = IPv4Network("198.18.0.0/15")
"""DNS answers come out of this range, an address for each name. No host has one: it is for benchmarks."""
EGRESS_PORT, DNS_PORT = 61080, 61053
"""Ports of the listeners, above the ones that the kernel hands out (32768-60999)."""

_LOOPBACK = IPv4Address("127.0.0.1")
_OWN = (IPv4Network("127.0.0.0/8"), IPv4Network(ADDRESS))
_TABLE = "shoal"
_TRACKED = 2048


class Listener(Struct, frozen=True):
    """A socket opened inside the namespace, whose descriptor the host gets."""

    kind: Literal["tcp", "udp"]
    address: str
    port: int
    backlog: int = 128
    """Connections that may wait to be accepted; TCP only."""


class Recipe(Struct, frozen=True):
    """How a fresh network namespace is set up, in this order."""

    messages: tuple[tuple[int, bytes, int], ...]
    """(netlink protocol, bytes of one sendto, NLMSG_ERROR replies to await). Any error in them fails it."""
    sysctls: tuple[tuple[str, str], ...]
    """(path below /proc/sys/net, value)."""
    listeners: tuple[Listener, ...]
    """The descriptors are handed to the host in this order."""


def isolated(ping_groups: tuple[int, int] = (0, 0)) -> Recipe:
    """No network but the sandbox's own addresses.

    `ping_groups`: first and last group, as the namespace's owner maps them, that may ping those addresses.
    """
    return Recipe(messages=(_links(nl.loopback_up(), _address()),), sysctls=_own_ports(ping_groups), listeners=())


def filtered(ranges: Iterable[IPv4Network] = (), ping_groups: tuple[int, int] = (0, 0)) -> Recipe:
    """As `isolated`, with listeners (egress TCP, DNS UDP, DNS TCP) for what may have a destination outside.

    `ranges`: addresses that a policy allows as such and not by a name; the egress has the last word on them.
    """
    links = _links(nl.loopback_up(), _address(), nl.everything_is_local(ADDRESS))
    return Recipe(
        messages=(links, (nl.NETLINK_NETFILTER, _rules((SYNTHETIC, *ranges)), 1)),
        sysctls=_own_ports(ping_groups) + _SHORT_MEMORY,
        listeners=(
            Listener("tcp", str(_LOOPBACK), EGRESS_PORT, backlog=512),
            Listener("udp", str(_LOOPBACK), DNS_PORT),
            Listener("tcp", str(_LOOPBACK), DNS_PORT),
        ),
    )


_SHORT_MEMORY = (
    ("netfilter/nf_conntrack_udp_timeout", "2"),
    ("netfilter/nf_conntrack_udp_timeout_stream", "2"),
    ("netfilter/nf_conntrack_tcp_timeout_syn_sent", "10"),
    ("netfilter/nf_conntrack_tcp_timeout_time_wait", "1"),
    ("netfilter/nf_conntrack_tcp_timeout_close", "1"),
)
"""Seconds for which a silent tracked flow is remembered. Both ends are on one machine: no packet is late."""


def _own_ports(ping_groups: tuple[int, int]) -> tuple[tuple[str, str], ...]:
    first, last = ping_groups
    return ("ipv4/ip_unprivileged_port_start", "0"), ("ipv4/ping_group_range", f"{first} {last}")


def _links(*messages: bytes) -> tuple[int, bytes, int]:
    return nl.NETLINK_ROUTE, b"".join(messages), len(messages)


def _address() -> bytes:
    return nl.loopback_address(ADDRESS)


def _rules(redirected: tuple[IPv4Network, ...]) -> bytes:
    chains = (
        nl.chain(_TABLE, "raw", kind="filter", priority=-300),
        nl.chain(_TABLE, "nat", kind="nat", priority=-100),
        nl.chain(_TABLE, "filter", kind="filter", priority=0),
    )
    rules = [nl.rule(_TABLE, "raw", *parts) for parts in _raw(redirected)]
    rules += [nl.rule(_TABLE, "nat", *parts) for parts in _nat(redirected)]
    rules += [nl.rule(_TABLE, "filter", *parts) for parts in _filter()]
    return nl.ruleset([nl.table(_TABLE)], chains, rules)


Parts = tuple[nl.Expressions, ...]


def _raw(redirected: tuple[IPv4Network, ...]) -> list[Parts]:
    listener = nl.source_in(IPv4Network(_LOOPBACK))
    return [
        (nl.destination_port(UDP, 53), nl.accept()),
        (nl.destination_port(TCP, 53), nl.accept()),
        (nl.source_port(UDP, DNS_PORT), listener, nl.accept()),
        (nl.source_port(TCP, DNS_PORT), listener, nl.accept()),
        (nl.source_port(TCP, EGRESS_PORT), listener, nl.accept()),
        *((nl.destination_in(own), nl.untrack()) for own in _OWN),
        *((nl.protocol(TCP), nl.destination_in(network), nl.accept()) for network in redirected),
        (nl.untrack(),),
    ]


def _nat(redirected: tuple[IPv4Network, ...]) -> list[Parts]:
    return [
        (nl.destination_port(UDP, 53), nl.redirect(DNS_PORT)),
        (nl.destination_port(TCP, 53), nl.redirect(DNS_PORT)),
        *((nl.protocol(TCP), nl.destination_in(network), nl.redirect(EGRESS_PORT)) for network in redirected),
    ]


def _filter() -> list[Parts]:
    listener = nl.destination_in(IPv4Network(_LOOPBACK)), nl.destination_port(TCP, EGRESS_PORT)
    direct = *listener, nl.connection_state(nl.UNTRACKED)
    flood = nl.connection_state(nl.NEW), nl.connections_over(_TRACKED)
    return [
        (*direct, nl.reset()),
        (*flood, nl.prohibit()),
        *((nl.destination_in(own), nl.accept()) for own in _OWN),
        (nl.protocol(TCP), nl.reset()),
        (nl.prohibit(),),
    ]
