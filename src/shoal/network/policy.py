"""A network policy, compiled: a name or address and a port go in, a decision and its rule come out.

An entry is `name`, `*.name` (any subdomain, not the name itself) or an address range, each optionally with
`:port`. Names are matched whole and without regard to case. An `allow` entry without a port means 80 and 443,
a `deny` entry without one means all. Deny wins.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from msgspec import Struct

from shoal.errors import InvalidRequest, Unsupported
from shoal.types import NetworkPolicy

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_WEB = frozenset({80, 443})
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_LATER = ("npm", "debian", "open")


class Decision(Struct, frozen=True):
    """Whether the policy lets something through, and the entry that said so (None: none applies)."""

    allowed: bool
    rule: str | None = None


class Rule(Struct, frozen=True):
    """One entry. Exactly one of `name` and `network` is set."""

    text: str
    """As it was written."""
    name: str | None = None
    subdomains: bool = False
    """`name` stands for its subdomains and not for itself."""
    network: Network | None = None
    ports: frozenset[int] | None = None
    """None: all."""

    def covers_name(self, name: str) -> bool:
        if self.name is None:
            return False
        return name.endswith("." + self.name) if self.subdomains else name == self.name

    def covers_address(self, address: Address) -> bool:
        return self.network is not None and address in self.network

    def covers_port(self, port: int) -> bool:
        return self.ports is None or port in self.ports


class Policy(Struct, frozen=True):
    """What may be reached. The default is nothing."""

    allow: tuple[Rule, ...] = ()
    deny: tuple[Rule, ...] = ()
    internal: frozenset[str] = frozenset()
    """Names from this machine's own settings, which may stand for private addresses."""

    @property
    def ranges(self) -> tuple[IPv4Network, ...]:
        """Address ranges that are allowed as such: the sandbox's namespace must lead them to the egress."""
        return tuple(rule.network for rule in self.allow if isinstance(rule.network, IPv4Network))

    def decide(self, name: str | None, address: str | None, port: int) -> Decision:
        """May this port of that name or address be reached? An entry for either applies."""
        known = normalize(name) if name is not None else None
        place = parse_address(address) if address is not None else None
        for verdict, rules in ((False, self.deny), (True, self.allow)):
            for rule in rules:
                if rule.covers_port(port) and _covers(rule, known, place):
                    return Decision(verdict, rule.text)
        return Decision(False)

    def decide_name(self, name: str) -> Decision:
        """May this name be resolved, that is: may any port of it be reached?"""
        known = normalize(name)
        if known is None:
            return Decision(False)
        for rule in self.deny:
            if rule.ports is None and rule.covers_name(known):
                return Decision(False, rule.text)
        allowing = next((rule for rule in self.allow if rule.covers_name(known)), None)
        return Decision(True, allowing.text) if allowing is not None else Decision(False)

    def opens(self, block: Network, address: Address, port: int) -> bool:
        """Does an entry mean this reserved address on purpose, with a range that lies within its `block`?"""
        return any(
            rule.covers_address(address) and rule.covers_port(port) and _within(rule.network, block)
            for rule in self.allow
        )


def compile_policy(network: NetworkPolicy | str | None, index_hosts: Iterable[str] = ()) -> Policy:
    """The policy of a sandbox. `index_hosts` are the entries that the preset "pypi" stands for.

    Raises InvalidRequest for an entry that can't be read and Unsupported for a preset of a later version.
    """
    if network is None:
        return Policy()
    if isinstance(network, str):
        return _preset(network, tuple(index_hosts))
    return Policy(
        allow=tuple(parse_rule(entry, _WEB) for entry in network.allow),
        deny=tuple(parse_rule(entry, None) for entry in network.deny),
    )


def _preset(name: str, index_hosts: tuple[str, ...]) -> Policy:
    if name in _LATER:
        raise Unsupported(f"network={name!r} comes with version 0.2; until then name hosts: NetworkPolicy(allow=[...])")
    if name != "pypi":
        raise InvalidRequest("network", f"{name!r} is no preset; use None, 'pypi' or NetworkPolicy(allow=[...])")
    allow = tuple(parse_rule(entry, _WEB) for entry in index_hosts)
    return Policy(allow=allow, internal=frozenset(rule.name for rule in allow if rule.name is not None))


def parse_rule(entry: str, default_ports: frozenset[int] | None) -> Rule:
    """One entry of a list. Raises InvalidRequest."""
    text = entry.strip()
    host, port = _split_port(text, entry)
    ports = default_ports if port is None else frozenset({port})
    if text.startswith("[") or re.fullmatch(r"[\d./]+|.*:.*", host):
        return Rule(text=entry, network=_parse_network(host, entry), ports=ports)
    subdomains = host.startswith("*.")
    name = normalize(host.removeprefix("*."))
    if name is None:
        raise _malformed(entry)
    return Rule(text=entry, name=name, subdomains=subdomains, ports=ports)


def _split_port(text: str, entry: str) -> tuple[str, int | None]:
    bracketed = re.fullmatch(r"\[([^\[\]]*)\](?::(\d{1,5}))?", text, re.ASCII)
    plain = re.fullmatch(r"([^:\[\]]*)(?::(\d{1,5}))?", text, re.ASCII)
    found = bracketed or plain
    if found is None:  # an IPv6 range without brackets, or nonsense that its parser will refuse
        return text, None
    port = int(found[2]) if found[2] else None
    if port is not None and not 0 < port < 65536:
        raise _malformed(entry)
    return found[1], port


def _parse_network(host: str, entry: str) -> Network:
    try:
        return ipaddress.ip_network(host)
    except ValueError as error:
        raise InvalidRequest("network", f"{entry!r} is no address range: {error}") from None


def _malformed(entry: str) -> InvalidRequest:
    return InvalidRequest(
        "network",
        f"{entry!r} is not an entry; write 'host', '*.host' or '10.0.0.0/8', each also with ':port'",
    )


def normalize(name: str) -> str | None:
    """The form in which names are compared: lower case, IDNA, no dot at the end. None: it is no host name."""
    text = name.removesuffix(".")
    try:
        ascii_name = text.encode("idna").decode().lower()
    except UnicodeError:
        return None
    labels = ascii_name.split(".")
    if len(ascii_name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        return None
    return ascii_name


def parse_address(text: str) -> Address | None:
    """An address, with IPv4 inside IPv6 taken out. None if it is none."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return embedded_ipv4(address) or address


def embedded_ipv4(address: Address) -> IPv4Address | None:
    """The IPv4 address that a mapped, 6to4, Teredo or NAT64 address leads to."""
    if isinstance(address, IPv4Address):
        return None
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None)


_NAT64 = IPv6Network("64:ff9b::/96")
_RESERVED: tuple[Network, ...] = (
    IPv4Network("0.0.0.0/8"),
    IPv4Network("10.0.0.0/8"),
    IPv4Network("100.64.0.0/10"),
    IPv4Network("127.0.0.0/8"),
    IPv4Network("168.63.129.16/32"),  # Azure's metadata and DNS, on an address that looks public
    IPv4Network("169.254.0.0/16"),  # link-local, with the metadata address of most clouds
    IPv4Network("172.16.0.0/12"),
    IPv4Network("192.0.0.0/24"),  # Oracle's metadata
    IPv4Network("192.168.0.0/16"),
    IPv4Network("198.18.0.0/15"),
    IPv4Network("224.0.0.0/3"),
    IPv6Network("::/127"),
    IPv6Network("fc00::/7"),
    IPv6Network("fe80::/9"),
    IPv6Network("ff00::/8"),
)


def reserved_block(address: Address) -> Network | None:
    """The range of loopback, private, link-local, metadata or multicast addresses that it lies in."""
    return next((block for block in _RESERVED if address in block), None)


def _covers(rule: Rule, name: str | None, address: Address | None) -> bool:
    return (name is not None and rule.covers_name(name)) or (address is not None and rule.covers_address(address))


def _within(network: Network | None, block: Network) -> bool:
    if isinstance(network, IPv4Network) and isinstance(block, IPv4Network):
        return network.subnet_of(block)
    if isinstance(network, IPv6Network) and isinstance(block, IPv6Network):
        return network.subnet_of(block)
    return False
