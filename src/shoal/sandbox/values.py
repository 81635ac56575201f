"""Numbers and texts as plans and requests carry them: what `struct reader` of init/util.c takes apart again."""

from __future__ import annotations

import struct
from collections.abc import Sequence

encode_int = struct.Struct("<q").pack
_count = struct.Struct("<I").pack


def encode_text(value: str | bytes) -> bytes:
    """With its length before it and a NUL behind it, so that C can use it in place."""
    data = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
    return _count(len(data)) + data + b"\0"


def encode_list(values: Sequence[str | bytes]) -> bytes:
    """Of texts. TypeError for a text alone, which is a sequence as well, but of letters."""
    if isinstance(values, (str, bytes)):
        raise TypeError("a list of texts is wanted")
    return _count(len(values)) + b"".join(map(encode_text, values))


def decode_list(data: bytes) -> list[bytes]:
    """What `encode_list` made."""
    (count,) = struct.unpack_from("<I", data)
    found, at = [], 4
    for _ in range(count):
        (length,) = struct.unpack_from("<I", data, at)
        found.append(data[at + 4 : at + 4 + length])
        at += 4 + length + 1
    return found
