"""The egress against a real namespace, with servers of the host that stand for the outside."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable
from ipaddress import IPv4Network
from pathlib import Path

import pytest
import uvloop

from shoal.network.audit import Event
from shoal.network.egress import Egress, Limits
from shoal.network.index import read_package_index
from shoal.network.namespace import filtered
from shoal.network.policy import Policy, compile_policy
from shoal.types import NetworkPolicy

from .conftest import Enter, Namespace

RESOLVE = """
import socket, ssl, sys
from dnslib import DNSRecord
def resolve(name, server="9.9.9.9"):
    # by a query of its own, since /etc/hosts would know `localhost`
    return str(DNSRecord.parse(DNSRecord.question(name).send(server, timeout=5)).a.rdata)
def attempt(address, data=b"hello"):
    try:
        with socket.create_connection(address, timeout=5) as s:
            s.sendall(data)
            s.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: s.recv(65536), b""))
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        raise
    except OSError:  # a reset may come at any of these calls
        return "reset"
"""


class Outside:
    """A namespace served by an egress, and the port of an upper-casing server on the host's loopback."""

    def __init__(self, namespace: Namespace, egress: Egress, events: list[Event], port: int) -> None:
        self.namespace = namespace
        self.egress = egress
        self.events = events
        self.port = port

    async def python(self, code: str) -> str:
        return await asyncio.to_thread(self.namespace.python, RESOLVE + code)

    def event(self, kind: str) -> Event:
        return [event for event in self.events if event.kind == kind][-1]

    async def wait_for(self, kind: str) -> Event:
        async with asyncio.timeout(10):
            while not any(event.kind == kind for event in self.events):  # noqa: ASYNC110 - a plain list
                await asyncio.sleep(0.02)
        return self.event(kind)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers after the end of what it was sent, so that only half-close lets it answer."""
    writer.write((await reader.read()).upper())
    writer.close()


Policing = Callable[[int], Policy]
Scenario = Callable[[Outside], Awaitable[None]]


def play(
    namespace: Namespace,
    policy: Policing,
    scenario: Scenario,
    host: str = "127.0.0.1",
    limits: Limits | None = None,
) -> None:
    async def run() -> None:
        events: list[Event] = []
        server = await asyncio.start_server(echo, host, 0)
        port = server.sockets[0].getsockname()[1]
        async with server, Egress(namespace.listeners, policy(port), events.append, limits) as egress:
            await scenario(Outside(namespace, egress, events, port))
        async with asyncio.timeout(5):
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    uvloop.run(run())


def allow(*entries: str, deny: tuple[str, ...] = ()) -> Policing:
    """A policy in which PORT stands for the server's."""
    return lambda port: compile_policy(
        NetworkPolicy(allow=tuple(entry.replace("PORT", str(port)) for entry in entries), deny=deny)
    )


local_server = allow("localhost:PORT", "127.0.0.0/8:PORT", "[::1]:PORT")


def test_an_allowed_name_is_reached_with_half_close(filtered_namespace: Namespace) -> None:
    async def scenario(outside: Outside) -> None:
        got = await outside.python(
            f"print(attempt((resolve('LocalHost'), {outside.port}), b'x' * 3_000_000) == b'X' * 3_000_000)"
        )
        assert got == "True"
        await asyncio.sleep(0.05)
        closed = outside.event("close")
        assert (closed.sent, closed.received, closed.reason) == (3_000_000, 3_000_000, "closed")
        assert closed.rule == f"localhost:{outside.port}"

    play(filtered_namespace, local_server, scenario)


def test_a_name_that_leads_to_a_reserved_address_is_refused(filtered_namespace: Namespace) -> None:
    async def scenario(outside: Outside) -> None:
        code = f"print(attempt((resolve('localhost'), {outside.port})))"
        assert await outside.python(code) == "reset"
        assert "reserved" in str(outside.event("connect").reason)

    play(filtered_namespace, allow("localhost:PORT"), scenario)
    play(filtered_namespace, allow("localhost:PORT", "0.0.0.0/0:PORT"), scenario)


def test_a_denied_range_holds_for_what_a_name_leads_to(filtered_namespace: Namespace) -> None:
    async def scenario(outside: Outside) -> None:
        code = f"print(attempt((resolve('localhost'), {outside.port})))"
        assert await outside.python(code) == "reset"
        assert outside.event("connect").rule in ("127.0.0.0/8", "::1")

    play(filtered_namespace, allow("localhost:PORT", deny=("127.0.0.0/8", "::1")), scenario)


def test_other_ports_names_and_addresses_are_refused(filtered_namespace: Namespace) -> None:
    async def scenario(outside: Outside) -> None:
        assert await outside.python("print(attempt((resolve('localhost'), 1)))") == "reset"
        assert outside.event("connect").reason == "denied by the network policy"
        for address in ("198.18.77.77", "1.1.1.1"):
            code = f"print(attempt(({address!r}, {outside.port})))"
            assert await outside.python(code) == ("reset" if address.startswith("198.18") else "refused")

    play(filtered_namespace, local_server, scenario)


@pytest.mark.parametrize("name", ["evil.example", "a.localhost", "localhost.evil.example"])
def test_other_names_do_not_resolve(filtered_namespace: Namespace, name: str) -> None:
    async def scenario(outside: Outside) -> None:
        code = f"""
import time
start = time.time()
try:
    socket.getaddrinfo({name!r}, 443)
except socket.gaierror as error:
    print(error.errno == socket.EAI_NONAME, time.time() - start < 0.5)
for server in ("8.8.8.8", "127.0.0.53"):
    print(DNSRecord.parse(DNSRecord.question({name!r}, "TXT").send(server, tcp=True, timeout=5)).header.rcode)
"""
        assert (await outside.python(code)).split() == ["True", "True", "3", "3"]
        denied = outside.event("resolve")
        assert (denied.allowed, denied.name) == (False, name)

    play(filtered_namespace, local_server, scenario)


def test_the_policy_can_be_replaced_while_it_runs(filtered_namespace: Namespace) -> None:
    async def scenario(outside: Outside) -> None:
        code = f"print(attempt((resolve('localhost'), {outside.port})))"
        assert await outside.python(code) == "b'HELLO'"
        allowed, outside.egress.policy = outside.egress.policy, Policy()
        assert await outside.python("print(attempt(('198.18.0.1', 80)))") == "reset"
        outside.egress.policy = allowed
        assert await outside.python(code) == "b'HELLO'"

    play(filtered_namespace, local_server, scenario)


SNI = """
context = ssl.create_default_context()
try:
    with socket.create_connection((resolve("pypi.org"), 443), timeout=5) as s:
        context.check_hostname = False
        context.wrap_socket(s, server_hostname={name!r})
except (ConnectionError, ssl.SSLError) as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("name", ["evil.example", "files.pythonhosted.org", None])
def test_tls_must_ask_for_the_name_that_was_resolved(filtered_namespace: Namespace, name: str | None) -> None:
    async def scenario(outside: Outside) -> None:
        assert await outside.python(SNI.format(name=name)) == "ConnectionResetError"
        assert repr(name) in str(outside.event("connect").reason)

    play(filtered_namespace, allow("pypi.org", "files.pythonhosted.org"), scenario)


def test_the_tls_port_takes_only_tls_and_not_for_ever(filtered_namespace: Namespace) -> None:
    async def scenario(outside: Outside) -> None:
        code = "print(attempt((resolve('pypi.org'), 443), b'GET / HTTP/1.1'))"
        assert await outside.python(code) == "reset"
        assert outside.event("connect").reason == "not TLS"
        code = """
with socket.create_connection((resolve('pypi.org'), 443), timeout=5) as s:
    try:
        s.recv(1)
    except ConnectionResetError as error:
        print("reset")
"""
        assert await outside.python(code) == "reset"
        assert "in time" in str(outside.event("connect").reason)

    play(filtered_namespace, allow("pypi.org"), scenario, limits=Limits(hello_seconds=0.3))


def test_connections_are_bounded(filtered_namespace: Namespace) -> None:
    async def scenario(outside: Outside) -> None:
        code = f"""
address = resolve("localhost")
held = [socket.create_connection((address, {outside.port}), timeout=5) for _ in range(3)]
print(attempt((address, {outside.port})))
held.pop().close()
import time; time.sleep(0.2)
print(attempt((address, {outside.port})))
"""
        assert (await outside.python(code)).split() == ["reset", "b'HELLO'"]

    play(filtered_namespace, local_server, scenario, limits=Limits(connections=3))


def test_closing_ends_every_connection(filtered_namespace: Namespace) -> None:
    async def scenario(outside: Outside) -> None:
        code = f"""
with socket.create_connection((resolve("localhost"), {outside.port}), timeout=10) as s:
    try:
        print(s.recv(1))
    except ConnectionResetError as error:
        print("reset")
"""
        waiting = asyncio.create_task(outside.python(code))
        await outside.wait_for("connect")
        await outside.egress.aclose()
        assert await waiting == "reset"
        assert outside.event("close").reason == "cancelled"

    play(filtered_namespace, local_server, scenario)


def test_a_slow_reader_slows_the_sender(filtered_namespace: Namespace) -> None:
    """What the egress and the kernel hold for a connection is bounded: the sender stands still."""

    async def scenario(outside: Outside) -> None:
        with socket.create_server(("127.0.0.1", 0)) as never_read:
            port = never_read.getsockname()[1]
            outside.egress.policy = local_server(port)
            code = f"""
with socket.create_connection((resolve("localhost"), {port})) as s:
    s.settimeout(0.5)
    sent = 0
    try:
        while sent < 100_000_000:
            sent += s.send(bytes(65536))
    except TimeoutError:
        print(sent < 50_000_000)
"""
            assert await outside.python(code) == "True"

    play(filtered_namespace, local_server, scenario)


def own_address() -> str | None:
    """An address of this machine beyond loopback."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


@pytest.mark.skipif(own_address() is None, reason="this machine has no address but loopback")
def test_an_allowed_range_is_reached_by_address(make_namespace: Enter) -> None:
    address = own_address() or ""
    namespace = make_namespace(filtered(ranges=[IPv4Network(address)]))

    async def reached(outside: Outside) -> None:
        assert await outside.python(f"print(attempt(({address!r}, {outside.port})))") == "b'HELLO'"

    async def refused(outside: Outside) -> None:
        code = f"print(attempt(({address!r}, {outside.port})))"
        assert await outside.python(code) == "reset"

    play(namespace, allow(f"{address}:PORT"), reached, host=address)
    play(namespace, allow("0.0.0.0/0:PORT"), refused, host=address)  # this machine is meant only if it is named


@pytest.mark.index
def test_the_package_index_is_reached_and_nothing_else(filtered_namespace: Namespace, tmp_path: Path) -> None:
    index = read_package_index()

    async def scenario(outside: Outside) -> None:
        get = "import urllib.request as u; print(u.urlopen('{}', timeout=30).status)"
        if "pypi.org:443" in index.hosts():
            assert await outside.python(get.format("https://pypi.org/simple/six/")) == "200"
        refused = await asyncio.to_thread(
            outside.namespace.run, sys.executable, "-c", get.format("https://example.com/")
        )
        assert "Name or service not known" in refused.stderr
        uv = str(Path(sys.executable).with_name("uv"))
        target = str(tmp_path / "target")
        command = [
            uv,
            "pip",
            "install",
            "--no-cache",
            "--target",
            target,
            *index.uv_arguments(),
            "six",
            "idna",
        ]
        done = await asyncio.to_thread(outside.namespace.run, *command, **index.uv_environment())
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "target/six.py").exists()

    play(filtered_namespace, lambda _: compile_policy("pypi", index.hosts()), scenario)
