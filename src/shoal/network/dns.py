"""The name server of a sandbox. It answers from the policy and a table and asks nobody.

An allowed name has one address, of its own, out of the synthetic range; the connection to that address
tells the egress the name. Any other name does not exist. What is no plain question is dropped.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network

from msgspec import Struct

from shoal.network.namespace import SYNTHETIC

MAX_QUERY = 1232
"""Bytes. A question is at most 273; the rest is room for EDNS options, which are not read."""
TTL = 60
"""Seconds for which a resolver in the sandbox may keep an answer."""

_HEADER = struct.Struct(">6H")
_NOT_A_QUERY = 0xF800  # the response flag and the operation code
_IS_REPLY = 0x8180  # response, recursion desired and available
_NAME_ERROR = 3
_ADDRESS, _INTERNET = 1, 1
_NAME_POINTER = 0xC00C  # "the name in the question"
_LONGEST_NAME = 255
_LABEL = re.compile(rb"[A-Za-z0-9_-]{1,63}")


class NameTable:
    """Names and the addresses that they were given. The least recently used name goes when it is full.

    Addresses are given out in turn, so one comes back to another name only after the whole range has gone by.
    """

    def __init__(self, capacity: int = 4096, network: IPv4Network = SYNTHETIC) -> None:
        if not 0 < capacity < network.num_addresses - 2:
            raise ValueError("the range must have more addresses than the table has places")
        self._capacity = capacity
        self._network = network
        self._next = 0
        self._addresses: OrderedDict[str, str] = OrderedDict()
        self._names: dict[str, str] = {}

    def address(self, name: str) -> str:
        """The address of this name, the same as long as the name is in use."""
        if name in self._addresses:
            self._addresses.move_to_end(name)
            return self._addresses[name]
        if len(self._addresses) >= self._capacity:
            _, freed = self._addresses.popitem(last=False)
            del self._names[freed]
        address = self._free_address()
        self._addresses[name], self._names[address] = address, name
        return address

    def name(self, address: str) -> str | None:
        """The name to which this address was given."""
        name = self._names.get(address)
        if name is not None:
            self._addresses.move_to_end(name)
        return name

    def _free_address(self) -> str:
        while True:
            self._next = self._next % (self._network.num_addresses - 2) + 1
            address = str(self._network[self._next])
            if address not in self._names:
                return address


class Question(Struct, frozen=True):
    """The one question of a query."""

    number: int
    """The query's id."""
    name: str
    """In lower case, without the dot at the end; empty if it has bytes that no host name has."""
    kind: int
    network: int
    """The class; 1 is the internet."""
    section: bytes
    """As it stood in the packet."""


def read_question(packet: bytes) -> Question | None:
    """The question of a plain query. None for anything else. Nothing after the question is read."""
    if not _HEADER.size < len(packet) <= MAX_QUERY:
        return None
    number, flags, count = _HEADER.unpack_from(packet)[:3]
    end = _name_end(packet, _HEADER.size)
    if flags & _NOT_A_QUERY or count != 1 or end is None or end + 4 > len(packet):
        return None
    kind, network = struct.unpack_from(">HH", packet, end)
    labels = _labels(packet[_HEADER.size : end])
    plain = labels and all(_LABEL.fullmatch(label) for label in labels)
    name = b".".join(labels).decode().lower() if plain else ""
    return Question(number, name, kind, network, packet[_HEADER.size : end + 4])


def _name_end(packet: bytes, start: int) -> int | None:
    """Where the name that starts here has ended. None if it is too long or compressed, as none needs be."""
    at = start
    while at < min(len(packet), start + _LONGEST_NAME):
        length = packet[at]
        if length > 63:
            return None
        at += 1 + length
        if length == 0:
            return at
    return None


def _labels(name: bytes) -> list[bytes]:
    labels, at = [], 0
    while length := name[at]:
        labels.append(name[at + 1 : at + 1 + length])
        at += 1 + length
    return labels


def answer(packet: bytes, names: NameTable, allowed: Callable[[str], bool]) -> bytes | None:
    """The reply to a query, or None where it deserves none. `allowed` is asked once, in lower case."""
    question = read_question(packet)
    if question is None:
        return None
    if not allowed(question.name):
        return _reply(question, _NAME_ERROR, b"")
    if (question.kind, question.network) != (_ADDRESS, _INTERNET):
        return _reply(question, 0, b"")
    address = IPv4Address(names.address(question.name))
    return _reply(question, 0, struct.pack(">HHHIH", _NAME_POINTER, _ADDRESS, _INTERNET, TTL, 4) + address.packed)


def _reply(question: Question, code: int, record: bytes) -> bytes:
    header = _HEADER.pack(question.number, _IS_REPLY | code, 1, 1 if record else 0, 0, 0)
    return header + question.section + record


class Allowance:
    """How many queries may still be answered: `rate` a second, `burst` at once."""

    def __init__(self, rate: float, burst: int) -> None:
        self._rate = rate
        self._burst = burst
        self._left = float(burst)
        self._at = time.monotonic()

    def take(self) -> bool:
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


Answer = Callable[[bytes], bytes | None]


class UdpServer:
    """Answers on a datagram socket. Asked too much it stops reading, and the kernel drops the rest."""

    _BATCH = 16
    _PAUSE = 0.05

    def __init__(self, listener: socket.socket, answer: Answer, allowance: Allowance) -> None:
        self._listener = listener
        self._answer = answer
        self._allowance = allowance
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Stops answering. The socket stays open."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._read)

    def _read(self) -> None:
        for _ in range(self._BATCH):  # then it is the turn of others in the loop
            if not self._allowance.take():
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(self._PAUSE, self._resume)
                return
            try:
                packet, sender = self._listener.recvfrom(MAX_QUERY + 1)
            except OSError:  # nothing left, or an ICMP error that belongs to an earlier reply
                return
            reply = self._answer(packet)
            if reply is not None:
                with suppress(OSError):  # the sandbox does not take its replies
                    self._listener.sendto(reply, sender)


async def serve_stream(connection: socket.socket, answer: Answer, allowance: Allowance) -> None:
    """Answers the queries on one TCP connection until it ends or sends something else."""
    loop = asyncio.get_running_loop()
    while True:
        length = int.from_bytes(await _read_exactly(connection, 2))
        if not 0 < length <= MAX_QUERY or not allowance.take():
            return
        reply = answer(await _read_exactly(connection, length))
        if reply is None:
            return
        await loop.sock_sendall(connection, len(reply).to_bytes(2) + reply)


async def _read_exactly(connection: socket.socket, count: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < count:
        part = await loop.sock_recv(connection, count - len(data))
        if not part:
            return b""
        data += part
    return data
