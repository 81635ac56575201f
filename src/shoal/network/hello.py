"""The server name in a TLS ClientHello, read from the first bytes of a connection."""

from __future__ import annotations

MAX_HELLO = 16384
"""Bytes that a ClientHello may take; post-quantum key shares make some of 2 KiB."""

_MAX_RECORDS = 8  # each byte that arrives has all records looked at again
_HANDSHAKE, _CLIENT_HELLO = b"\x16", b"\x01"
_SERVER_NAME, _HOST_NAME = 0, 0


class Incomplete(Exception):
    """The ClientHello goes on after these bytes."""


class NotTls(Exception):
    """These bytes are not the beginning of a ClientHello."""


class _Reader:
    """Takes a structure apart. Asking for more than there is raises NotTls."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, count: int) -> bytes:
        part = self._data[self._at : self._at + count]
        if len(part) < count:
            raise NotTls
        self._at += count
        return part

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def vector(self, size: int) -> bytes:
        """Bytes after their length, which takes `size` bytes."""
        return self.take(self.number(size))


def server_name(data: bytes) -> str | None:
    """The name that the client asks for; None if it names no server.

    Raises Incomplete if the message has not ended yet, NotTls if it is none.
    """
    hello = _Reader(_handshake(data))
    hello.take(4 + 2 + 32)  # type and length, version, random
    hello.vector(1)  # session
    hello.vector(2)  # cipher suites
    hello.vector(1)  # compression
    extensions = _Reader(hello.vector(2) if hello else b"")
    while extensions:
        kind, body = extensions.number(2), extensions.vector(2)
        if kind == _SERVER_NAME:
            return _host_name(body)
    return None


def _handshake(data: bytes) -> bytes:
    """The ClientHello message, put together from its records."""
    message, rest = b"", data
    for _ in range(_MAX_RECORDS):
        if rest[:1] not in (b"", _HANDSHAKE) or message[:1] not in (b"", _CLIENT_HELLO):
            raise NotTls
        length = int.from_bytes(rest[3:5])
        if len(rest) < 5 or len(rest) < 5 + length:
            raise Incomplete
        message, rest = message + rest[5 : 5 + length], rest[5 + length :]
        end = 4 + int.from_bytes(message[1:4])
        if len(message) >= 4 and end <= len(message) and message[:1] == _CLIENT_HELLO:
            return message[:end]
    raise NotTls


def _host_name(body: bytes) -> str | None:
    names = _Reader(_Reader(body).vector(2))
    while names:
        kind, name = names.number(1), names.vector(2)
        if kind == _HOST_NAME:
            return name.decode("ascii", "replace")
    return None
