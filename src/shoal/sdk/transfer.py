"""Files and trees between this machine and a sandbox: a tar stream in either direction, never whole in memory."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final, TypeVar

from shoal.errors import NotFound, PlatformError, ShoalError, StorageFull
from shoal.node.files import file_error
from shoal.node.interface import Node
from shoal.sandbox.departure import depart
from shoal.sandbox.landing import Bounds, Landing
from shoal.sandbox.tar import Steps
from shoal.sdk.streams import close_stream

T = TypeVar("T")
_BATCH: Final = 512 << 10
"""Bytes; less than the channel's window, which is not opened further before they are taken."""


async def upload(
    node: Node, sandbox: str, local: Path, remote: str, user: str | int | None = None, owners: bool = False
) -> None:
    """A file or a tree to the path `remote`; links stay links. NotFound if there is nothing at `local`."""
    if not await asyncio.to_thread(local.exists):
        raise NotFound(f"local: there is no {local}")
    await node.unpack_files(sandbox, remote, _read(local), user, owners)


async def _read(local: Path) -> AsyncIterator[bytes]:
    pieces = depart(local)
    try:
        while (piece := await _in_thread(next, pieces, None)) is not None:
            yield piece
    except OSError as error:
        raise _local_error(local, error) from error
    finally:
        pieces.close()


async def download(node: Node, sandbox: str, remote: str, local: Path, bounds: Bounds) -> None:
    """A file or a tree to the path `local`. LimitExceeded past `bounds`; what has come by then stays."""
    landing = Landing(local, bounds).land()
    pieces = node.pack_files(sandbox, remote)
    done = False
    try:
        next(landing)
        async for batch in _batches(pieces):
            done = done or await _in_thread(_feed, landing, batch)
    except OSError as error:
        raise _local_error(local, error) from error
    finally:
        landing.close()
        await close_stream(pieces)
    if not done:
        raise PlatformError(f"{remote}: its stream ended before its end")


async def _batches(pieces: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """As much as is worth a change of threads."""
    batch: list[bytes] = []
    async for piece in pieces:
        batch.append(piece)
        if sum(map(len, batch)) >= _BATCH:
            yield batch
            batch = []
    yield batch


def _feed(landing: Steps[None], batch: list[bytes]) -> bool:
    """Whether all has landed."""
    try:
        for piece in batch:
            landing.send(piece)
    except StopIteration:
        return True
    return False


async def _in_thread(work: Callable[..., T], *arguments: object) -> T:
    """Returns only when the thread has, also if nobody waits any more: a generator at work can't be closed."""
    step = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(step)
    except asyncio.CancelledError:
        await asyncio.wait([step])
        raise


def _local_error(local: Path, error: OSError) -> ShoalError:
    """What this machine refused, typed."""
    place = f"local: {local}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(f"{place}: {error.strerror}")
    return file_error(place, error.errno or errno.EIO)
