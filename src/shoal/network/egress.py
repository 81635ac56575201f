"""The way out of one sandbox: answers DNS, accepts redirected connections, opens those allowed.

    accept -> original destination -> name (own table) -> policy -> TLS server name
           -> resolve -> policy again, by address -> connect -> relay

Whatever is refused ends with a reset and an audit event.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from ipaddress import ip_network
from typing import Any, Self

from msgspec import Struct

from shoal.network.audit import Audit, Event
from shoal.network.dns import Allowance, NameTable, UdpServer, answer, serve_stream
from shoal.network.hello import MAX_HELLO, Incomplete, NotTls, server_name
from shoal.network.policy import Policy, normalize, parse_address, reserved_block
from shoal.network.relay import Traffic, relay

_ORIGINAL_DESTINATION = 80  # SO_ORIGINAL_DST of linux/netfilter_ipv4.h
_ADDRESSES_TRIED = 4
_RESOLVED_AT_ONCE = 4
_QUERIES_PER_SECOND, _QUERIES_AT_ONCE = 1000, 500


class Limits(Struct, frozen=True, kw_only=True):
    """What one sandbox may take of the egress."""

    connections: int = 256
    """Open at once; one more is reset."""
    dns_connections: int = 16
    """DNS over TCP, open at once."""
    hello_seconds: float = 10.0
    """How long the client may take for its TLS ClientHello."""
    resolve_seconds: float = 10.0
    connect_seconds: float = 20.0
    """For one address."""
    dns_seconds: float = 10.0
    """How long a DNS connection may stay open."""


class Refused(Exception):
    """This connection does not go out. `rule` is the policy's entry, if one said so."""

    def __init__(self, reason: str, rule: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.rule = rule


class _Target(Struct):
    """Where a connection wants to go, as far as it is known."""

    address: str
    port: int
    name: str | None
    rule: str | None = None


class Egress:
    """Serves the listeners of a `namespace.filtered()` recipe: egress TCP, DNS UDP, DNS TCP.

    The sockets stay the caller's and are open after `aclose`, so that another egress may take over.
    `policy` may be replaced at any time: it holds for every later question and connection.
    """

    def __init__(
        self, listeners: Sequence[socket.socket], policy: Policy, audit: Audit, limits: Limits | None = None
    ) -> None:
        self._tcp, self._dns_udp, self._dns_tcp = listeners
        self.policy = policy
        self._audit = audit
        self._limits = limits or Limits()
        self._names = NameTable()
        self._allowance = Allowance(_QUERIES_PER_SECOND, _QUERIES_AT_ONCE)
        self._resolving = asyncio.Semaphore(_RESOLVED_AT_ONCE)
        self._udp: UdpServer | None = None
        self._acceptors: list[asyncio.Task[None]] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._questions: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def start(self) -> None:
        """Begins to serve, in the running loop."""
        for listener in (self._tcp, self._dns_tcp):
            listener.setblocking(False)
        self._udp = UdpServer(self._dns_udp, self._answer, self._allowance)
        self._acceptors = [
            asyncio.create_task(self._accept(self._tcp)),
            asyncio.create_task(self._accept_questions(self._dns_tcp)),
        ]

    async def aclose(self) -> None:
        """Stops serving and ends every connection."""
        if self._udp is not None:
            self._udp.close()
            self._udp = None
        tasks = [*self._acceptors, *self._connections, *self._questions]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._acceptors = []

    # -- DNS -------------------------------------------------------------------------------------------------

    def _answer(self, packet: bytes) -> bytes | None:
        return answer(packet, self._names, self._allows_name)

    def _allows_name(self, name: str) -> bool:
        decision = self.policy.decide_name(name)
        event = Event(kind="resolve", time=time.time(), allowed=decision.allowed, name=name, rule=decision.rule)
        self._audit(event)
        return decision.allowed

    async def _accept_questions(self, listener: socket.socket) -> None:
        while True:
            connection = await _accept(listener)
            if len(self._questions) >= self._limits.dns_connections:
                _reset(connection)
            else:
                _keep(self._questions, self._serve_questions(connection))

    async def _serve_questions(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, TimeoutError):
            async with asyncio.timeout(self._limits.dns_seconds):
                await serve_stream(connection, self._answer, self._allowance)

    # -- connections -----------------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            client = await _accept(listener)
            if len(self._connections) < self._limits.connections:
                _keep(self._connections, self._serve(client))
            else:
                self._report(_target(client, self._names), "connect", False, "too many connections")
                _reset(client)

    async def _serve(self, client: socket.socket) -> None:
        """One connection from its acceptance to its end."""
        target, traffic = _target(client, self._names), Traffic()
        try:
            upstream = await self._open(client, target, traffic)
        except Refused as refused:
            target.rule = refused.rule
            self._report(target, "connect", False, refused.reason)
            return _reset(client)
        except BaseException:
            _reset(client)
            raise
        self._report(target, "connect", True)
        reason = "cancelled"
        try:
            reason = await relay(client, upstream, traffic)
        finally:
            self._report(target, "close", True, reason, traffic)

    async def _open(self, client: socket.socket, target: _Target, traffic: Traffic) -> socket.socket:
        """The connection to where the client wants to go. Raises Refused."""
        # 1. The policy, before the client is listened to.
        decision = self.policy.decide(target.name, None if target.name else target.address, target.port)
        if not decision.allowed:
            raise Refused("denied by the network policy", decision.rule)
        target.rule = decision.rule
        # 2. On the TLS port the client must ask for the name that it resolved.
        if target.name is not None and target.port == 443:
            traffic.unsent = await self._read_hello(client, target.name)
        # 3. The addresses behind the name, each of them under the policy too.
        addresses = [target.address] if target.name is None else await self._resolve(target.name, target.port)
        # 4. The first that answers.
        return await self._connect([self._check(address, target) for address in addresses], target.port)

    async def _read_hello(self, client: socket.socket, name: str) -> bytes:
        """The bytes of a ClientHello that asks for this name. Raises Refused."""
        try:
            async with asyncio.timeout(self._limits.hello_seconds):
                data, asked = await _receive_hello(client)
        except TimeoutError:
            raise Refused("no TLS ClientHello in time") from None
        except (NotTls, OSError):
            raise Refused("not TLS") from None
        if asked is None or normalize(asked) != name:
            raise Refused(f"TLS server name {asked!r} is not the name that was resolved")
        return data

    async def _resolve(self, name: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._limits.resolve_seconds), self._resolving:
                found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as error:
            raise Refused(f"the name can't be resolved: {error}") from None
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))[:_ADDRESSES_TRIED]

    def _check(self, text: str, target: _Target) -> str:
        """The address, if it may be connected to. Raises Refused."""
        address = parse_address(text)
        if address is None:
            raise Refused(f"{text} is no address that can be checked")
        denied = self.policy.decide(target.name, str(address), target.port)
        if not denied.allowed:
            raise Refused(f"{address} is denied by the network policy", denied.rule)
        block = reserved_block(address) or (ip_network(address) if _is_own(str(address)) else None)
        trusted = target.name in self.policy.internal
        if block is not None and not trusted and not self.policy.opens(block, address, target.port):
            raise Refused(f"{address} is reserved or this machine's; allow its range to reach it")
        return text

    async def _connect(self, addresses: list[str], port: int) -> socket.socket:
        reason = "the name has no address"
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            upstream = socket.socket(family, socket.SOCK_STREAM)
            try:
                await self._dial(upstream, address, port)
            except (OSError, TimeoutError) as error:
                upstream.close()
                reason = f"{address}: {error or 'no answer in time'}"
            except BaseException:
                upstream.close()
                raise
            else:
                return upstream
        raise Refused(reason)

    async def _dial(self, upstream: socket.socket, address: str, port: int) -> None:
        upstream.setblocking(False)
        upstream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(self._limits.connect_seconds):
            await asyncio.get_running_loop().sock_connect(upstream, (address, port))

    def _report(
        self,
        target: _Target,
        kind: Any,
        allowed: bool,
        reason: str | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        counts = traffic or Traffic()
        self._audit(
            Event(
                kind=kind,
                time=time.time(),
                allowed=allowed,
                name=target.name,
                address=target.address,
                port=target.port,
                rule=target.rule,
                reason=reason,
                sent=counts.sent,
                received=counts.received,
            )
        )


def _keep(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def _accept(listener: socket.socket) -> socket.socket:
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except OSError as error:
            if error.errno in (errno.EBADF, errno.EINVAL, errno.ENOTSOCK):
                raise
            await asyncio.sleep(0.05)  # out of descriptors, mostly: others must give some back first
        else:
            connection.setblocking(False)
            return connection


async def _receive_hello(client: socket.socket) -> tuple[bytes, str | None]:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < MAX_HELLO:
        part = await loop.sock_recv(client, MAX_HELLO - len(data))
        if not part:
            raise NotTls
        data += part
        with suppress(Incomplete):
            return data, server_name(data)
    raise NotTls


def _target(client: socket.socket, names: NameTable) -> _Target:
    """Where the client wanted to connect to, before the namespace's rules redirected it."""
    try:
        packed = client.getsockopt(socket.SOL_IP, _ORIGINAL_DESTINATION, 16)
    except OSError:  # gone already, or it came straight to the listener
        return _Target("", 0, None)
    port, address = struct.unpack_from(">2xH4s", packed)
    text = socket.inet_ntoa(address)
    return _Target(text, port, names.name(text))


def _is_own(address: str) -> bool:
    """Does the address belong to this machine? It can be bound to then, and only then."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _reset(connection: socket.socket) -> None:
    """Closes with RST, so that the client sees a refusal and not an end of data."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
