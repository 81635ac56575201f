from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from ipaddress import IPv4Network

import pytest
from dnslib import QTYPE, RCODE, DNSRecord
from hypothesis import given
from hypothesis import strategies as st

from shoal.network.dns import MAX_QUERY, Allowance, NameTable, UdpServer, answer, read_question, serve_stream


def reply(packet: bytes, names: NameTable | None = None) -> DNSRecord | None:
    data = answer(packet, names or NameTable(), lambda name: name.endswith("good.example"))
    return None if data is None else DNSRecord.parse(data)


def test_an_allowed_name_has_an_address_of_its_own() -> None:
    names = NameTable()
    query = DNSRecord.question("A.Good.Example")
    first, again = reply(query.pack(), names), reply(query.pack(), names)
    other = reply(DNSRecord.question("b.good.example").pack(), names)
    assert first is not None
    assert again is not None
    assert other is not None
    assert first.header.id == query.header.id
    assert first.header.qr == 1
    assert str(first.q.qname) == "A.Good.Example."  # as it was asked: clients that vary the case compare it
    assert str(first.a.rdata) == str(again.a.rdata) != str(other.a.rdata)
    assert names.name(str(first.a.rdata)) == "a.good.example"
    assert names.name("198.18.99.99") is None


@pytest.mark.parametrize("kind", ["AAAA", "TXT", "MX", "HTTPS", "ANY", "NS", "SOA"])
def test_an_allowed_name_has_nothing_else(kind: str) -> None:
    found = reply(DNSRecord.question("good.example", kind).pack())
    assert found is not None
    assert found.header.rcode == RCODE.NOERROR
    assert found.rr == []


@pytest.mark.parametrize("kind", ["A", "AAAA", "TXT", "PTR"])
def test_any_other_name_does_not_exist(kind: str) -> None:
    found = reply(DNSRecord.question("secret.evil.example", kind).pack())
    assert found is not None
    assert found.header.rcode == RCODE.NXDOMAIN
    assert found.rr == []


def test_a_name_of_strange_bytes_is_no_name() -> None:
    dotted = DNSRecord.question("x").pack()[:12] + b"\x0cgood.example\0\0\1\0\1"
    question = read_question(dotted)
    assert question is not None
    assert question.name == ""


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"\0" * 12,
        bytes(DNSRecord.question("good.example").reply().pack()),
        bytes(DNSRecord.question("good.example").pack())[:-1],
        DNSRecord.question("x").pack()[:12] + b"\xc0\x0c\0\1\0\1",  # a name that points at itself
        DNSRecord.question("x").pack()[:12] + b"\x01a" * 200 + b"\0\0\1\0\1",
        bytes(DNSRecord.question("good.example").pack()).ljust(MAX_QUERY + 1, b"\0"),
    ],
)
def test_what_is_no_question_is_dropped(packet: bytes) -> None:
    assert reply(packet) is None


@given(st.binary(max_size=MAX_QUERY + 10))
def test_no_packet_breaks_it(packet: bytes) -> None:
    found = reply(packet)
    assert found is None or found.header.id == int.from_bytes(packet[:2])


question_bytes = bytes(DNSRecord.question("www.good.example").pack())


@given(st.integers(0, len(question_bytes) - 1), st.binary(max_size=4), st.binary(max_size=40))
def test_no_damage_breaks_it(at: int, damage: bytes, tail: bytes) -> None:
    damaged = question_bytes[:at] + damage + question_bytes[at + len(damage) :] + tail
    found = answer(damaged, NameTable(), lambda name: name.endswith("good.example"))
    assert found is None or found[:2] == damaged[:2]


label = st.text("abcdefghijklmnopqrstuvwxyzABC0123456789-_", min_size=1, max_size=20)


@given(st.lists(label, min_size=1, max_size=8), st.sampled_from(["A", "AAAA", "TXT", "SRV"]))
def test_it_reads_what_another_codec_writes(labels: list[str], kind: str) -> None:
    record = DNSRecord.question(".".join(labels), kind)
    question = read_question(bytes(record.pack()))
    assert question is not None
    assert question.name == ".".join(labels).lower()
    assert QTYPE[question.kind] == kind


def test_the_table_is_bounded_and_gives_no_address_twice() -> None:
    names = NameTable(capacity=4, network=IPv4Network("198.18.0.0/29"))
    assert [names.address(name) for name in "abcd"] == [f"198.18.0.{number}" for number in (1, 2, 3, 4)]
    assert names.address("a") == "198.18.0.1"
    assert names.address("e") == "198.18.0.5"  # takes the place of b, not its address
    assert names.name("198.18.0.2") is None
    assert names.name("198.18.0.1") == "a"
    assert names.address("f") == "198.18.0.6"
    assert names.address("g") == "198.18.0.2"


def test_too_many_questions_wait() -> None:
    async def ask() -> int:
        server, client = (socket.socket(type=socket.SOCK_DGRAM) for _ in range(2))
        with server, client:
            server.bind(("127.0.0.1", 0))
            client.connect(server.getsockname())
            serving = UdpServer(server, lambda packet: packet, Allowance(rate=1, burst=5))
            for _ in range(50):
                client.send(b"x")
            await asyncio.sleep(0.3)
            serving.close()
            client.setblocking(False)
            answered = 0
            with suppress(BlockingIOError):
                while client.recv(10):
                    answered += 1
            return answered

    assert asyncio.run(ask()) == 5


def test_stream() -> None:
    async def ask() -> tuple[bytes, bytes]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            loop = asyncio.get_running_loop()
            serving = asyncio.create_task(serve_stream(theirs, lambda packet: packet[::-1], Allowance(10, 10)))
            await loop.sock_sendall(ours, b"\0\3abc\0")
            first = await loop.sock_recv(ours, 100)
            await loop.sock_sendall(ours, b"\4defg")
            second = await loop.sock_recv(ours, 100)
            await loop.sock_sendall(ours, b"\xff\xff")
            await asyncio.wait_for(serving, 5)
            return first, second

    assert asyncio.run(ask()) == (b"\0\3cba", b"\0\4gfed")
