"""The Python codec against the C one: the same bytes mean the same to both."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from itertools import pairwise, takewhile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import PlatformError
from shoal.sandbox.frame import (
    HEADER,
    PAYLOAD_MAX,
    PIECE,
    RECEIVE,
    Decoder,
    Exit,
    Frame,
    Kind,
    Request,
    decode_exit,
    encode,
)

INIT = Path(__file__).parents[2] / "init"
WHOLE, PARTIAL, MALFORMED = range(3)


class Header(ctypes.Structure):
    """`struct frame` of init/frame.h."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("kind", ctypes.c_uint8),
        ("stream", ctypes.c_uint8),
        ("id", ctypes.c_uint32),
        ("number", ctypes.c_uint32),
    )


@pytest.fixture(scope="module")
def c(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: install gcc")
    library = tmp_path_factory.mktemp("init") / "init.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", library, *INIT.glob("*.c")], check=True)
    return ctypes.CDLL(str(library))


def c_decode(c: ctypes.CDLL, data: bytes) -> tuple[list[Frame], int]:
    """The frames at the start of `data`, as the loop of init.c cuts them, and the status of what follows."""
    header, frames = Header(), []
    while (status := c.frame_decode(ctypes.byref(header), data, ctypes.c_size_t(len(data)))) == WHOLE:
        if header.number != len(frames):
            return frames, MALFORMED
        end = HEADER.size + header.length
        frames.append(Frame(header.kind, header.stream, header.id, data[HEADER.size : end]))
        data = data[end:]
    # A header alone can be wrong; its number is looked at by the Python side as early as that.
    if status == PARTIAL and len(data) >= HEADER.size and header.number != len(frames):
        status = MALFORMED
    return frames, status


def python_decode(pieces: list[bytes]) -> tuple[list[Frame], int]:
    """Whole frames: the parts in which output comes are put together again."""
    decoder, frames, part = Decoder(), [], b""
    try:
        for piece in pieces:
            for frame in decoder.feed(piece):
                part += frame.payload
                if frame.kind == Kind.OUTPUT and len(frames) + 1 == decoder.number and decoder.left:
                    continue
                frames.append(frame._replace(payload=part))
                part = b""
    except PlatformError:
        return frames, MALFORMED
    return frames, PARTIAL


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(bounds)]


frames = st.lists(
    st.builds(Frame, st.sampled_from(Kind), st.integers(0, 2), st.integers(0, 0xFFFFFFFF), st.binary(max_size=300)),
    max_size=8,
)
places = st.lists(st.integers(0, 5000), max_size=10)


def wire(sent: list[Frame]) -> bytes:
    return b"".join(encode(f.kind, f.id, f.payload, f.stream, number) for number, f in enumerate(sent))


@given(frames, places)
def test_frames_survive_any_split(c: ctypes.CDLL, sent: list[Frame], places: list[int]) -> None:
    data = wire(sent)
    assert python_decode(cut(data, places)) == (sent, PARTIAL)
    assert c_decode(c, data) == (sent, PARTIAL)


@given(frames, places, st.integers(0, 5000))
def test_cut_streams_give_the_whole_frames_only(c: ctypes.CDLL, sent: list[Frame], places: list[int], end: int) -> None:
    data = wire(sent)
    data = data[: end % (len(data) + 1)]
    found, status = python_decode(cut(data, places))
    assert (found, status) == c_decode(c, data)
    assert found == sent[: len(found)]


@given(frames, places, st.integers(0, 5000), st.integers(1, 255))
def test_a_changed_byte_means_the_same_to_both(
    c: ctypes.CDLL, sent: list[Frame], places: list[int], at: int, change: int
) -> None:
    data = bytearray(wire(sent))
    if data:
        data[at % len(data)] ^= change
    assert python_decode(cut(bytes(data), places)) == c_decode(c, bytes(data))


headers = st.tuples(
    st.integers(0, PAYLOAD_MAX + 2) | st.integers(0, 0xFFFFFFFF),
    st.integers(0, 255),
    st.integers(0, 255),
    st.integers(0, 0xFFFF) | st.just(0),
    st.integers(0, 0xFFFFFFFF),
    st.just(0) | st.integers(0, 0xFFFFFFFF),
)


@given(headers, st.binary(max_size=64), places)
def test_any_header_means_the_same_to_both(
    c: ctypes.CDLL, header: tuple[int, ...], rest: bytes, places: list[int]
) -> None:
    data = HEADER.pack(*header) + rest
    assert python_decode(cut(data, places)) == c_decode(c, data)


@given(st.binary(max_size=200), places)
def test_any_bytes_mean_the_same_to_both(c: ctypes.CDLL, data: bytes, places: list[int]) -> None:
    assert python_decode(cut(data, places)) == c_decode(c, data)


@given(frames)
def test_c_encodes_what_python_encodes(c: ctypes.CDLL, sent: list[Frame]) -> None:
    for number, frame in enumerate(sent):
        header, buffer = Header(len(frame.payload), frame.kind, frame.stream, frame.id, number), bytearray(HEADER.size)
        c.frame_encode(ctypes.byref(header), (ctypes.c_char * HEADER.size).from_buffer(buffer))
        assert bytes(buffer) + frame.payload == encode(frame.kind, frame.id, frame.payload, frame.stream, number)


def test_the_longest_payload_passes_and_one_byte_more_does_not(c: ctypes.CDLL) -> None:
    longest = encode(Kind.OUTPUT, 1, bytes(PAYLOAD_MAX), 1)
    assert len(python_decode([longest])[0]) == len(c_decode(c, longest)[0]) == 1
    longer = encode(Kind.OUTPUT, 1, bytes(PAYLOAD_MAX + 1), 1)
    assert python_decode([longer]) == c_decode(c, longer) == ([], MALFORMED)


def test_a_malformed_stream_stays_malformed() -> None:
    decoder = Decoder()
    with pytest.raises(PlatformError, match="malformed frame from init: kind 99"):
        list(decoder.feed(HEADER.pack(0, 99, 0, 0, 0, 0)))


def test_a_missing_frame_is_noticed() -> None:
    decoder = Decoder()
    list(decoder.feed(encode(Kind.READY, 0, number=0)))
    with pytest.raises(PlatformError, match="number 2"):
        list(decoder.feed(encode(Kind.READY, 0, number=2)))


def test_frame_numbers_wrap() -> None:
    decoder = Decoder()
    decoder.number = 0xFFFFFFFF
    assert len(list(decoder.feed(encode(Kind.READY, 0, number=0xFFFFFFFF) + encode(Kind.READY, 0, number=0)))) == 2


@given(
    st.integers(-(1 << 31), (1 << 31) - 1),
    st.integers(0, (1 << 32) - 1),
    *(st.integers(0, (1 << 64) - 1) for _ in range(3)),
    st.integers(0, (1 << 32) - 1),
)
def test_exits(status: int, kills: int, duration: int, cpu: int, memory: int, refused: int) -> None:
    payload = struct.pack("<iIQQQI", status, kills, duration, cpu, memory, refused)
    assert decode_exit(payload) == Exit(status, kills, duration, cpu, memory, refused)


# Requests


class CRequest(ctypes.Structure):
    """`struct request` of init/init.h."""

    _fields_ = (
        ("flags", ctypes.c_uint32),
        ("uid", ctypes.c_uint32),
        ("gid", ctypes.c_uint32),
        ("window", ctypes.c_uint32),
        ("rows", ctypes.c_uint16),
        ("cols", ctypes.c_uint16),
        ("cwd", ctypes.c_char_p),
        ("argv", ctypes.POINTER(ctypes.c_char_p)),
        ("envp", ctypes.POINTER(ctypes.c_char_p)),
        ("groups", ctypes.c_uint32 * 64),
        ("group_count", ctypes.c_size_t),
        ("operation", ctypes.c_int),
        ("number", ctypes.c_int64),
    )


def c_request(c: ctypes.CDLL, payload: bytes, *, file: bool) -> Request | None:
    """As init reads it; None where it refuses."""
    request, header = CRequest(), Header(len(payload))
    memory = ctypes.create_string_buffer(payload, len(payload))
    c.request_decode.restype = ctypes.c_bool
    good = c.request_decode(ctypes.byref(request), ctypes.byref(header), memory, ctypes.c_bool(file))
    found = None
    if good:
        argv, env = (list(takewhile(lambda text: text is not None, texts)) for texts in (request.argv, request.envp))
        groups = tuple(request.groups[: request.group_count])
        identity = (request.uid, request.gid, groups)
        terminal = (request.flags, request.rows, request.cols)
        cwd = request.cwd.decode("utf-8", "surrogateescape")
        found = Request(argv, env, cwd, *identity, *terminal, request.operation, request.number)
    c.request_free(ctypes.byref(request))
    return found


words = st.binary(max_size=40).map(lambda data: data.replace(b"\0", b""))
requests = st.builds(
    Request,
    st.lists(words, min_size=1, max_size=5),
    st.lists(words, max_size=5),
    words.map(lambda data: data.decode("utf-8", "surrogateescape")),
    st.integers(0, 0xFFFFFFFF),
    st.integers(0, 0xFFFFFFFF),
    st.lists(st.integers(0, 0xFFFFFFFF), max_size=64).map(tuple),
    st.integers(0, 7),
    st.integers(0, 0xFFFF),
    st.integers(0, 0xFFFF),
    st.integers(-1, 9),
    st.integers(-(1 << 63), (1 << 63) - 1),
)


@given(requests)
def test_a_request_arrives_as_it_was_sent(c: ctypes.CDLL, request: Request) -> None:
    payload = request.wire(4096)
    assert c_request(c, payload, file=request.operation > 0) == request
    assert c_request(c, payload, file=request.operation <= 0) is None


@given(requests, st.integers(0, 5000))
def test_a_cut_request_is_refused(c: ctypes.CDLL, request: Request, end: int) -> None:
    payload = request.wire(4096)
    assert c_request(c, payload[: end % len(payload)], file=request.operation > 0) is None


@given(requests, st.integers(0, 5000), st.integers(1, 255))
def test_a_changed_request_is_refused_or_another(c: ctypes.CDLL, request: Request, at: int, change: int) -> None:
    payload = bytearray(request.wire(4096))
    payload[at % len(payload)] ^= change
    found = c_request(c, bytes(payload), file=request.operation > 0)
    assert found is None or len(found.wire(4096)) <= len(payload)


def test_too_many_groups_are_refused(c: ctypes.CDLL) -> None:
    assert c_request(c, Request(["x"], [], "/", groups=range(65)).wire(1), file=False) is None


def test_a_request_without_a_program_is_refused(c: ctypes.CDLL) -> None:
    assert c_request(c, Request([], [], "/").wire(1), file=False) is None


def test_kinds_and_limits_are_those_of_the_header() -> None:
    text = (INIT / "frame.h").read_text()
    for kind in Kind:
        assert f"FRAME_{kind.name} = {kind.value}," in text
    assert f"FRAME_PAYLOAD_MAX = {PAYLOAD_MAX >> 20} << 20" in text


def test_a_request_is_laid_out_as_c_reads_it() -> None:
    request = Request(["sh", "-c", b"\xff"], ["A=1"], "/w", 1000, 1001, (5, 6), 3, 24, 80, -1, 7)
    number = struct.Struct("<q").pack

    def text(value: bytes) -> bytes:
        return struct.pack("<I", len(value)) + value + b"\0"

    numbers = b"".join(map(number, (3, 1000, 1001, 4096, 24, 80, -1, 7)))
    groups = number(2) + number(5) + number(6)
    argv = struct.pack("<I", 3) + text(b"sh") + text(b"-c") + text(b"\xff")
    env = struct.pack("<I", 1) + text(b"A=1")
    assert request.wire(4096) == numbers + text(b"/w") + groups + argv + env


def test_output_is_handed_on_as_it_comes_and_the_rest_is_asked_for() -> None:
    decoder, data = Decoder(), encode(Kind.OUTPUT, 7, bytes(3 * PIECE), 1)
    start = HEADER.size + 10
    assert list(decoder.feed(data[:start])) == [Frame(Kind.OUTPUT, 1, 7, bytes(10))]
    assert decoder.wanted == PIECE
    (frame,) = decoder.feed(data[start:-5])
    assert len(frame.payload) == 3 * PIECE - 15
    assert decoder.wanted == 5
    assert list(decoder.feed(data[-5:])) == [Frame(Kind.OUTPUT, 1, 7, bytes(5))]
    assert decoder.wanted == HEADER.size
    assert [frame.kind for frame in decoder.feed(encode(Kind.EXIT, 7, b"x", 0, 1))] == [Kind.EXIT]
    assert decoder.wanted == RECEIVE


def test_an_output_frame_without_its_payload_is_no_frame_yet() -> None:
    decoder = Decoder()
    assert list(decoder.feed(encode(Kind.OUTPUT, 7, b"abc", 1)[: HEADER.size])) == []
    assert [frame.payload for frame in decoder.feed(b"abc")] == [b"abc"]
