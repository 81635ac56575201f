from __future__ import annotations

import errno
import stat
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.errors import (
    FileExists,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    PermissionDenied,
    PlatformError,
    ShoalError,
)
from shoal.node.files import _Answer, check_path, file_error, parse_entries

HEAD = struct.Struct("<IIIQQI")


def record(
    path: bytes, mode: int = stat.S_IFREG | 0o644, link: bytes = b"", size: int = 5, mtime: int = 2_500_000_000
) -> bytes:
    return HEAD.pack(mode, 1, 2, size, mtime, len(path)) + path + struct.pack("<I", len(link)) + link


# What the operations inside answer


def test_an_answer_grows_without_a_gap() -> None:
    pieces = [bytes([number]) * 700_001 for number in range(30)]
    answer = _Answer("/f", 100 << 20)
    for piece in pieces:
        answer.add(1, piece)
    assert answer.value() == b"".join(pieces)


@pytest.mark.parametrize("sizes", [[11], [5, 6], [10, 1, 1]])
def test_an_answer_past_its_limit_ends_the_operation_once(sizes: list[int]) -> None:
    ends: list[int] = []
    answer = _Answer("/f", 10)
    answer.on_excess = lambda: ends.append(answer.size)
    for size in sizes:
        answer.add(1, bytes(size))
    assert len(ends) == 1
    with pytest.raises(LimitExceeded):
        answer.check()


def test_a_record() -> None:
    (info,) = parse_entries(record(b"a/b"), "/w/")
    expected = shoal.FileInfo(name="b", path="/w/a/b", kind="file", size=5, mode=0o644, uid=1, gid=2, mtime=2.5)
    assert info == expected


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        (stat.S_IFREG, "file"),
        (stat.S_IFDIR, "directory"),
        (stat.S_IFLNK, "symlink"),
        (stat.S_IFIFO, "fifo"),
        (stat.S_IFSOCK, "socket"),
        (stat.S_IFCHR, "device"),
        (stat.S_IFBLK, "device"),
        (0, "device"),
        (0xF000, "device"),
    ],
)
def test_kinds(mode: int, kind: str) -> None:
    (info,) = parse_entries(record(b"x", mode | 0o4755, b"to"), "")
    assert (info.kind, info.mode) == (kind, 0o4755)
    assert info.link == ("to" if kind == "symlink" else None)


def test_bytes_that_are_not_utf8_can_be_given_back() -> None:
    (info,) = parse_entries(record(b"a\xff", stat.S_IFLNK, b"\xfe"), "/")
    assert info.path.encode("utf-8", "surrogateescape") == b"/a\xff"
    assert info.link is not None
    assert info.link.encode("utf-8", "surrogateescape") == b"\xfe"


@given(st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=20)), max_size=5), st.integers(0, 1000))
def test_a_cut_answer_is_an_error_and_never_a_short_list(entries: list[tuple[bytes, bytes]], end: int) -> None:
    whole = [record(path, stat.S_IFLNK, link) for path, link in entries]
    data = b"".join(whole)
    cut = data[: end % (len(data) + 1)]
    bounds = {sum(map(len, whole[:count])) for count in range(len(whole) + 1)}
    if len(cut) in bounds:
        assert b"".join(whole).startswith(cut)
        assert len(parse_entries(cut, "")) == sorted(bounds).index(len(cut))
    else:
        with pytest.raises(PlatformError):
            parse_entries(cut, "")


@given(st.binary(max_size=300))
def test_any_bytes_are_a_list_or_a_typed_error(data: bytes) -> None:
    try:
        found = parse_entries(data, "/w/")
    except PlatformError:
        return
    assert all(info.path.startswith("/w/") for info in found)


def test_a_length_that_promises_gigabytes_costs_nothing() -> None:
    with pytest.raises(PlatformError):
        parse_entries(HEAD.pack(0, 0, 0, 0, 0, 0xFFFFFFFF) + b"x", "")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errno.ENOENT, NotFound),
        (errno.ENOTDIR, NotFound),
        (errno.EACCES, PermissionDenied),
        (errno.EROFS, PermissionDenied),
        (errno.EISDIR, FileExists),
        (errno.ENOTEMPTY, FileExists),
        (errno.ELOOP, InvalidRequest),
        (errno.ENAMETOOLONG, InvalidRequest),
        (errno.ENOSPC, PermissionDenied),
        (errno.EIO, PlatformError),
    ],
)
def test_errors_are_typed_and_name_the_path(error: int, kind: type[ShoalError]) -> None:
    found = file_error("/w/a", error)
    assert type(found) is kind
    assert "/w/a" in str(found)


@pytest.mark.parametrize("path", ["", "a\0b", b"bytes", None, 5, "x" * 4096, "\u2615" * 1366])
def test_paths_that_the_kernel_cannot_be_given(path: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_path(path)
    assert caught.value.field == "path"


# In a sandbox


def test_reading_what_is_no_file_ends_at_once(box: shoal.Sandbox) -> None:
    box.commands.run("mkfifo /w-fifo; ln -s /w-loop /w-loop; mkdir /w-dir")
    kinds: dict[str, type[ShoalError]] = {
        "/w-fifo": InvalidRequest, "/dev/zero": InvalidRequest, "/w-dir": FileExists, "/w-dir/..": FileExists,
        "/w-loop": InvalidRequest, "/none": NotFound, "/etc/passwd/x": NotFound,
    }  # fmt: skip
    for path, kind in kinds.items():
        with pytest.raises(kind):
            box.files.read(path)


@pytest.mark.root
def test_writing_keeps_mode_and_owner_and_goes_through_a_link(box: shoal.Sandbox) -> None:
    box.commands.run("echo old > f; chown 1000:1000 f; chmod 751 f; ln -s f l")
    box.files.write("l", "new")
    info = box.files.stat("f")
    assert (info.mode, info.uid, info.gid, box.files.read("f")) == (0o751, 1000, 1000, "new")
    assert box.files.stat("l").kind == "symlink"


@pytest.mark.root
def test_a_write_that_fails_leaves_nothing_beside(box: shoal.Sandbox) -> None:
    box.commands.run("mkdir /d; chmod 555 /d; echo keep > /d/f; chmod 444 /d/f")
    for path in ("/d/f", "/d/new"):
        with pytest.raises(PermissionDenied):
            box.files.write(path, "x", user=1000)
    assert [info.name for info in box.files.list("/d")] == ["f"]
    assert box.files.read("/d/f") == "keep\n"


def test_a_full_disk_is_a_typed_error_and_the_old_file_stays() -> None:
    with shoal.Sandbox.create(profile=shoal.Profile(disk=4 << 20)) as box:
        box.files.write("/workspace/f", "old")
        with pytest.raises(PermissionDenied, match="limit is reached"):
            box.files.write("/workspace/f", bytes(16 << 20))
        assert box.files.read("/workspace/f") == "old"
        assert [info.name for info in box.files.list("/workspace")] == ["f"]
        box.files.write("/workspace/small", "works")


@pytest.mark.root
def test_operations_are_the_users(box: shoal.Sandbox) -> None:
    box.files.write("/tmp/mine", "x", user="user")
    assert box.files.stat("/tmp/mine").uid == 1000
    with pytest.raises(PermissionDenied):
        box.files.write("/root/mine", "x", user="user")


def test_listing_does_not_follow_links_and_goes_as_deep_as_asked(box: shoal.Sandbox) -> None:
    box.commands.run("mkdir -p a/b/c; touch a/b/f; ln -s / a/root; ln -s .. a/b/up")
    assert [info.path for info in box.files.list("/workspace/a")] == ["/workspace/a/b", "/workspace/a/root"]
    deep = [info.path for info in box.files.list("/workspace/a", depth=9)]
    assert deep == [f"/workspace/a/{name}" for name in ("b", "b/c", "b/f", "b/up", "root")]
    for depth in (0, -1, 1.5, "2"):
        with pytest.raises(InvalidRequest) as caught:
            box.files.list("/workspace", depth=depth)  # type: ignore[arg-type]
        assert caught.value.field == "depth"


def test_removing_goes_below_no_link(box: shoal.Sandbox) -> None:
    box.commands.run("mkdir -p /precious d/deep; touch /precious/f; ln -s /precious d/link")
    box.files.remove("d")
    assert box.files.exists("/precious/f")
    assert not box.files.exists("d")
    for path in ("/workspace/.", "/workspace/..", "/"):
        with pytest.raises(ShoalError):
            box.files.remove(path)
