"""The recipes, carried out in real namespaces: each result that the rules promise."""

from __future__ import annotations

import json
import socket
import struct
import threading
from ipaddress import IPv4Network

import pytest

from shoal.network.namespace import DNS_PORT, EGRESS_PORT, filtered, isolated

from .conftest import Enter, Namespace

ATTEMPT = """
import errno, json, socket, sys, time
def attempt(kind, host, port):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, getattr(socket, kind)) as s:
        s.settimeout(3)
        start = time.perf_counter()
        try:
            s.sendto(b"x", (host, port)) if kind == "SOCK_DGRAM" else s.connect((host, port))
        except OSError as error:
            return errno.errorcode.get(error.errno, repr(error)), time.perf_counter() - start
        return "connected", time.perf_counter() - start
"""


def attempt(namespace: Namespace, kind: str, host: str, port: int) -> str:
    code = f"print(json.dumps(attempt({kind!r}, {host!r}, {port})))"
    outcome, seconds = json.loads(namespace.python(ATTEMPT + code))
    assert seconds < 0.1
    return str(outcome)


def connect(namespace: Namespace, host: str, port: int) -> str:
    return attempt(namespace, "SOCK_STREAM", host, port)


def send(namespace: Namespace, host: str, port: int) -> str:
    return attempt(namespace, "SOCK_DGRAM", host, port)


OWN = ("127.0.0.1", "127.0.1.1", "0.0.0.0", "10.0.2.15", "::1")
SERVE = """
with socket.create_server(("{bound}", 80), family=socket.{family}):
    print(json.dumps([attempt("SOCK_STREAM", host, 80)[0] for host in {hosts!r}]))
"""


@pytest.fixture(params=["isolated_namespace", "filtered_namespace"])
def either(request: pytest.FixtureRequest) -> Namespace:
    namespace = request.getfixturevalue(request.param)
    assert isinstance(namespace, Namespace)
    return namespace


def test_own_servers_are_reached_by_every_own_address_and_on_low_ports(either: Namespace) -> None:
    four, six = OWN[:-1], OWN[-1:]
    assert json.loads(either.python(ATTEMPT + SERVE.format(bound="0.0.0.0", family="AF_INET", hosts=four))) == [
        "connected"
    ] * len(four)
    assert json.loads(either.python(ATTEMPT + SERVE.format(bound="::1", family="AF_INET6", hosts=six))) == ["connected"]


def test_ipv6_has_no_route(either: Namespace) -> None:
    assert connect(either, "2001:db8::1", 443) == "ENETUNREACH"
    assert send(either, "2001:db8::1", 443) == "ENETUNREACH"


def test_the_inside_has_no_power_over_the_network(either: Namespace) -> None:
    code = """
import socket
with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as s:
    s.send(bytes.fromhex({message!r}))
    print(int.from_bytes(s.recv(4096)[16:20], "little", signed=True))
"""
    down = struct.pack("=IHHII BxHiII", 32, 16, 5, 1, 0, 0, 0, 1, 0, 1)
    assert either.python(code.format(message=down.hex())) == "-1"  # EPERM


def test_isolated_reaches_nothing(isolated_namespace: Namespace) -> None:
    assert isolated().listeners == ()
    for host in ("1.1.1.1", "169.254.169.254", "198.18.0.1"):
        assert connect(isolated_namespace, host, 443) == "ENETUNREACH"
        assert send(isolated_namespace, host, 53) == "ENETUNREACH"


@pytest.mark.parametrize("host", ["1.1.1.1", "169.254.169.254", "10.0.2.2", "192.168.0.1"])
def test_a_denied_address_refuses_at_once(filtered_namespace: Namespace, host: str) -> None:
    assert connect(filtered_namespace, host, 443) == "ECONNREFUSED"
    assert send(filtered_namespace, host, 443) == "EPERM"


def test_only_tcp_goes_to_the_synthetic_range(filtered_namespace: Namespace) -> None:
    assert send(filtered_namespace, "198.18.0.1", 443) == "EPERM"
    assert connect(filtered_namespace, "198.18.0.1", 443) == "connected"  # accepted by the listener's backlog
    client, _ = filtered_namespace.listeners[0].accept()
    with client:
        packed = client.getsockopt(socket.SOL_IP, 80, 16)
    assert struct.unpack_from(">2xH4s", packed) == (443, socket.inet_aton("198.18.0.1"))


def test_the_egress_listener_refuses_who_comes_straight_to_it(filtered_namespace: Namespace) -> None:
    assert connect(filtered_namespace, "127.0.0.1", EGRESS_PORT) == "ECONNREFUSED"


@pytest.mark.parametrize("server", ["8.8.8.8", "127.0.0.53", "10.255.255.53", "127.0.0.1"])
def test_dns_to_any_server_answers_from_that_server(filtered_namespace: Namespace, server: str) -> None:
    udp = filtered_namespace.listeners[1]
    udp.settimeout(5)
    code = f"""
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.settimeout(5)
    s.sendto(b"question", ({server!r}, 53))
    print(s.recvfrom(100))
"""

    def reply() -> None:
        packet, sender = udp.recvfrom(100)
        udp.sendto(packet[::-1], sender)

    thread = threading.Thread(target=reply)
    thread.start()
    assert filtered_namespace.python(code) == str((b"noitseuq", (server, 53)))
    thread.join()


def test_only_what_is_redirected_is_tracked(make_namespace: Enter) -> None:
    namespace = make_namespace(filtered())
    code = """
import socket
def count():
    return int(open("/proc/sys/net/netfilter/nf_conntrack_count").read())
with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(type=socket.SOCK_DGRAM) as udp:
    held = [socket.create_connection(server.getsockname()) for _ in range(20)]
    for port in range(10000, 10500):
        udp.sendto(b"x", ("127.0.0.1", port)) if port % 2 else udp.sendto(b"x", ("10.0.2.15", port))
    for port in range(300):
        try:
            udp.sendto(b"x", ("1.2.3.4", 1000 + port))
        except PermissionError:
            pass
    print(count())
    for host in range(3000):
        try:
            udp.sendto(b"x", (f"8.8.{host >> 8}.{host & 255}", 53))
        except PermissionError:
            break
    print(count())
"""
    local, flooded = map(int, namespace.python(code).split())
    assert local == 0
    assert flooded <= 2049


def test_ranges_are_led_to_the_egress(make_namespace: Enter) -> None:
    namespace = make_namespace(filtered(ranges=[IPv4Network("203.0.113.0/25")]))
    assert connect(namespace, "203.0.113.7", 5432) == "connected"
    assert connect(namespace, "203.0.113.200", 5432) == "ECONNREFUSED"


def test_listeners_are_on_loopback() -> None:
    listeners = [(one.kind, one.address, one.port) for one in filtered().listeners]
    assert listeners == [
        ("tcp", "127.0.0.1", EGRESS_PORT),
        ("udp", "127.0.0.1", DNS_PORT),
        ("tcp", "127.0.0.1", DNS_PORT),
    ]
