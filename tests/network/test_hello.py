from __future__ import annotations

import ssl
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.network.hello import MAX_HELLO, Incomplete, NotTls, server_name


def client_hello(name: str | None) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def split(hello: bytes, size: int) -> bytes:
    """The same message in records of this size."""
    body = hello[5:]
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(hello[:3] + len(part).to_bytes(2) + part for part in parts)


def test_the_name_of_a_real_client() -> None:
    assert server_name(client_hello("pypi.org")) == "pypi.org"
    assert server_name(client_hello("pypi.org") + b"early data") == "pypi.org"
    assert server_name(client_hello(None)) is None


def test_it_waits_for_the_whole_message() -> None:
    hello = client_hello("pypi.org")
    for length in range(len(hello)):
        with pytest.raises(Incomplete):
            server_name(hello[:length])


def test_records() -> None:
    hello = client_hello("pypi.org")
    assert server_name(split(hello, 100)) == "pypi.org"
    with pytest.raises(NotTls):
        server_name(split(hello, 1))


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n", b"\x16\x03\x01\x00\x04\x02\0\0\0"])
def test_other_protocols(data: bytes) -> None:
    with pytest.raises(NotTls):
        server_name(data)


@given(st.binary(max_size=300))
def test_no_bytes_break_it(data: bytes) -> None:
    for candidate in (data, b"\x16\x03\x01" + len(data).to_bytes(2) + data):
        with suppress(Incomplete, NotTls):
            server_name(candidate)


hello_bytes = client_hello("pypi.org")


@given(st.integers(0, len(hello_bytes) - 1), st.binary(min_size=1, max_size=8))
def test_no_damage_breaks_it(at: int, damage: bytes) -> None:
    assert len(hello_bytes) < MAX_HELLO
    with suppress(Incomplete, NotTls):
        server_name(hello_bytes[:at] + damage + hello_bytes[at + len(damage) :])
