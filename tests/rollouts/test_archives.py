"""Archives that mean harm, and those that don't."""

from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.errors import InvalidRequest
from shoal.rollouts.archives import Bounds, read_archive
from shoal.rollouts.trees import Entry

from .stand_in import BASE, pack

Member = tuple[tarfile.TarInfo, bytes]


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = kind, link, len(data), mode
    return info, data


def tar(path: Path, *members: Member, how: str = "w:gz") -> Path:
    with tarfile.open(path, how) as file:
        for info, data in members:
            file.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("how", ["w:gz", "w:bz2", "w:xz", "w"])
def test_an_archive_is_read_without_its_top_folder(tmp_path: Path, how: str) -> None:
    path = tar(
        tmp_path / "a.tar", member("p-1", kind=tarfile.DIRTYPE), member("p-1/empty", kind=tarfile.DIRTYPE),
        member("p-1/a", kind=tarfile.DIRTYPE), member("./p-1/a/x.py", b"x", mode=0o4775),
        member("p-1/a/hard", kind=tarfile.LNKTYPE, link="p-1/a/x.py"),
        member("p-1/a/soft", kind=tarfile.SYMTYPE, link="../a/x.py"), how=how,
    )  # fmt: skip
    assert read_archive(path) == {
        "empty": Entry(0o755, folder=True),
        "a/x.py": Entry(0o755, b"x"),
        "a/hard": Entry(0o755, b"x"),
        "a/soft": Entry(0o777, link="../a/x.py"),
    }


def test_a_packed_tree_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "thing.tar.gz"
    path.write_bytes(pack(BASE))
    assert read_archive(path) == BASE


HOSTILE: dict[str, tuple[list[Member], str]] = {
    "absolute": ([member("/etc/passwd", b"x")], "leads out"),
    "climbing": ([member("p/../../x", b"x")], "leads out"),
    "climbing at the end": ([member("p/a/..", b"x")], "leads out"),
    "link out": ([member("p/l", kind=tarfile.SYMTYPE, link="../../x")], "links to"),
    "link to the top's neighbour": ([member("p/l", kind=tarfile.SYMTYPE, link="../q")], "links to"),
    "link out and in": ([member("p/l", kind=tarfile.SYMTYPE, link="../p/x")], "links to"),
    "absolute link": ([member("p/l", kind=tarfile.SYMTYPE, link="/etc")], "links to"),
    "empty link": ([member("p/l", kind=tarfile.SYMTYPE, link="")], "links to"),
    "through a link": (
        [member("p/l", kind=tarfile.SYMTYPE, link="a"), member("p/l/x", b"x")],
        "file or a link",
    ),
    "file turned link": (
        [member("p/l/x", b"x"), member("p/l", kind=tarfile.SYMTYPE, link="a")], "file or a link",
    ),
    "hard link out": ([member("p/l", kind=tarfile.LNKTYPE, link="/etc/shadow")], "leads out"),
    "hard link to nothing": ([member("p/l", kind=tarfile.LNKTYPE, link="p/x")], "no earlier file"),
    "hard link to a link": (
        [member("p/s", kind=tarfile.SYMTYPE, link="x"), member("p/l", kind=tarfile.LNKTYPE, link="p/s")],
        "no earlier file",
    ),
    "device": ([member("p/d", kind=tarfile.CHRTYPE)], "device"),
    "pipe": ([member("p/d", kind=tarfile.FIFOTYPE)], "pipe"),
    "two tops": ([member("p/x", b"x"), member("q/x", b"x")], "one folder"),
    "file at the top": ([member("p", b"x")], "one folder"),
    "long name": ([member("p/" + "x" * 256, b"")], "255"),
    "long path": ([member("p/" + "xy/" * 400 + "z", b"")], "no path"),
    "nothing": ([], "one folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_entries_are_refused_by_name(tmp_path: Path, name: str) -> None:
    members, why = HOSTILE[name]
    with pytest.raises(InvalidRequest, match=why) as caught:
        read_archive(tar(tmp_path / "bad-1.tar.gz", *members))
    assert caught.value.field == "bad-1.tar.gz"


BOMBS: dict[str, Callable[[], list[Member]]] = {
    "bytes": lambda: [member("p/x", bytes(20_000))],
    "hard links": lambda: [
        member("p/x", bytes(4_000)), *(member(f"p/{i}", kind=tarfile.LNKTYPE, link="p/x") for i in range(3))
    ],
    "entries": lambda: [member(f"p/{i}", kind=tarfile.DIRTYPE) for i in range(12)],
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused(tmp_path: Path, name: str) -> None:
    path = tar(tmp_path / "bomb.tar.gz", *BOMBS[name]())
    with pytest.raises(InvalidRequest, match="more than"):
        read_archive(path, Bounds(bytes=15_000, entries=10))


def test_a_sparse_file_of_exabytes_is_refused_unread(tmp_path: Path) -> None:
    info, _ = member("p/x")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 62)}
    info.size = 512
    path = tmp_path / "sparse.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as file:
        file.addfile(info, io.BytesIO(b"0\n".ljust(512, b"\0")))
    with pytest.raises(InvalidRequest, match="more than"):
        read_archive(path)


def make_zip(path: Path, *members: tuple[str, int, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, mode, data in members:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            file.writestr(info, data)
    return path


def test_a_zip_is_read_the_same_way(tmp_path: Path) -> None:
    path = make_zip(
        tmp_path / "a.zip", ("p/", stat.S_IFDIR | 0o755, b""), ("p/x", stat.S_IFREG | 0o755, b"x"),
        ("p/y", 0, b"y"), ("p/l", stat.S_IFLNK | 0o777, b"x"),
    )  # fmt: skip
    assert read_archive(path) == {
        "x": Entry(0o755, b"x"),
        "y": Entry(0o644, b"y"),
        "l": Entry(0o777, link="x"),
    }


@pytest.mark.parametrize(
    ("hostile", "why"),
    [
        (("../x", 0, b""), "leads out"),
        (("/x", 0, b""), "leads out"),
        (("p/l", stat.S_IFLNK | 0o777, b"/etc/passwd"), "links to"),
        (("p/d", stat.S_IFCHR | 0o600, b""), "device"),
        (("p/big", 0, bytes(20_000)), "more than"),
    ],
)
def test_a_hostile_zip_is_refused(tmp_path: Path, hostile: tuple[str, int, bytes], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        read_archive(make_zip(tmp_path / "a.zip", hostile), Bounds(bytes=15_000))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.one_of(st.binary(max_size=600), st.binary(max_size=60).map(lambda tail: pack(BASE)[:-40] + tail)))
def test_damage_is_refused_as_such(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "damaged.tar.gz"
    path.write_bytes(data)
    with pytest.raises(InvalidRequest):
        read_archive(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.lists(st.tuples(st.text(st.characters(codec="utf-8"), max_size=20), st.sampled_from("fl"))))
def test_no_name_gets_out(tmp_path: Path, names: list[tuple[str, str]]) -> None:
    members = [
        member(f"p/{name}", b"", tarfile.SYMTYPE if kind == "l" else tarfile.REGTYPE, "x") for name, kind in names
    ]
    try:
        tree = read_archive(tar(tmp_path / "a.tar", *members, how="w"))
    except InvalidRequest:
        return
    assert all(".." not in path.split("/") and not path.startswith("/") and "\0" not in path for path in tree)
