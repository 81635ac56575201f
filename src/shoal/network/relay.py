"""Bytes between two connected sockets, both ways, until both ends are done."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress

from msgspec import Struct

CHUNK = 64 * 1024
"""Bytes held for each direction; the sender waits while the receiver does not take them."""


class Traffic(Struct):
    """What has gone through one connection."""

    sent: int = 0
    """Bytes from the client to the upstream."""
    received: int = 0
    unsent: bytes = b""
    """What the client has sent already; it goes first."""


async def relay(client: socket.socket, upstream: socket.socket, traffic: Traffic) -> str:
    """Moves bytes until both sides have closed, or one fails, and closes both. Says how it ended.

    An end of data goes on as an end of data (half-close), a failure as a reset.
    """
    tasks = [
        asyncio.create_task(_send(client, upstream, traffic)),
        asyncio.create_task(_receive(upstream, client, traffic)),
    ]
    try:
        await asyncio.gather(*tasks)
    except OSError as error:
        _abort(client, upstream)
        return error.strerror or str(error)
    except BaseException:
        _abort(client, upstream)
        raise
    else:
        return "closed"
    finally:
        # The loop must have let go of the descriptors before they are closed: their numbers are used again.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        client.close()
        upstream.close()


async def _send(client: socket.socket, upstream: socket.socket, traffic: Traffic) -> None:
    loop, data = asyncio.get_running_loop(), traffic.unsent
    traffic.unsent = b""
    while data or (data := await loop.sock_recv(client, CHUNK)):
        await loop.sock_sendall(upstream, data)
        traffic.sent += len(data)
        data = b""
    _finish(upstream)


async def _receive(upstream: socket.socket, client: socket.socket, traffic: Traffic) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(upstream, CHUNK):
        await loop.sock_sendall(client, data)
        traffic.received += len(data)
    _finish(client)


def _finish(connection: socket.socket) -> None:
    with suppress(OSError):  # reset in the meantime
        connection.shutdown(socket.SHUT_WR)


def _abort(*connections: socket.socket) -> None:
    for connection in connections:
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
