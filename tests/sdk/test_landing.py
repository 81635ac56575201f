"""Streams that no honest sandbox sends. Whatever they say, nothing is made outside of the target."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.errors import FileExists, LimitExceeded, PlatformError, ShoalError
from shoal.sandbox.landing import DEPTH_MAX, OPEN_DIRECTORY, Bounds, Landing
from shoal.sandbox.tar import DIRECTORY, END, FILE, HARD_LINK, SYMLINK, Member, padding, write_map, write_member

ROOT = write_member(Member(".", DIRECTORY, 0o755))


def land(stream: bytes, target: Path, *, step: int = 1 << 20, limit: int = 1 << 30, entries: int = 1000) -> bool:
    """Whether it ended."""
    landing = Landing(target, Bounds(limit, entries)).land()
    next(landing)
    try:
        for at in range(0, len(stream), step):
            landing.send(stream[at : at + step])
    except StopIteration:
        return True
    finally:
        landing.close()
    return False


def file(path: str, data: bytes = b"evil", **more: object) -> bytes:
    return write_member(Member(path, FILE, 0o644, size=len(data))._replace(**more)) + data + bytes(padding(len(data)))


def tree_of(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): f"-> {path.readlink()}" if path.is_symlink() else path.read_text()
        for path in root.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_a_whole_tree_in_steps_of_any_size(tmp_path: Path) -> None:
    folder = write_member(Member("d", DIRECTORY, 0o755, mtime_ns=5))
    stream = ROOT + file("a", b"x" * 5000) + folder + file("d/b") + folder + ROOT + END
    for step in (1, 7, 512, 1 << 20):
        assert land(stream, tmp_path / str(step), step=step)
        assert tree_of(tmp_path / str(step)) == {"a": "x" * 5000, "d/b": "evil"}
        assert (tmp_path / str(step) / "d").stat().st_mtime_ns == 5


@pytest.mark.parametrize(
    "path", ["../evil", "a/../../evil", "/evil", "a//b", "..", "", "a/./b", "d/evil", "./evil", "."]
)
@pytest.mark.parametrize("kind", [FILE, SYMLINK, DIRECTORY])
def test_names_that_lead_elsewhere(tmp_path: Path, path: str, kind: bytes) -> None:
    member = file(path) if kind == FILE else write_member(Member(path, kind, 0o755, link="/etc"))
    with pytest.raises(PlatformError):
        land(ROOT + member + (member if path == "." else b"") + member + END, tmp_path / "in" / "t")
    assert tree_of(tmp_path) == {}


def test_a_member_of_a_folder_that_is_not_open(tmp_path: Path) -> None:
    """Also if it is there: no path is walked that the stream chose."""
    folder = write_member(Member("d", DIRECTORY, 0o755))
    with pytest.raises(PlatformError):
        land(ROOT + folder + folder + file("d/f") + END, tmp_path / "t")


def test_through_links_of_either_side(tmp_path: Path) -> None:
    target, precious = tmp_path / "t", tmp_path / "precious"
    precious.mkdir()
    (precious / "f").write_text("precious")
    link = write_member(Member("l", SYMLINK, 0o777, link=str(precious)))
    folder = write_member(Member("l", DIRECTORY, 0o755))
    with pytest.raises(FileExists):
        land(ROOT + link + folder + file("l/f") + END, target)
    target.joinpath("g").symlink_to(precious / "f")
    assert land(ROOT + file("g") + ROOT + END, target)
    assert (precious / "f").read_text() == "precious"


def test_hard_links_only_to_what_came(tmp_path: Path) -> None:
    target = tmp_path / "t"
    target.mkdir()
    (target / "mine").write_text("mine")
    for link in ("mine", "../mine", "/etc/passwd", "a"):
        member = write_member(Member("x", HARD_LINK, 0o644, link=link))
        with pytest.raises(PlatformError, match="had not sent"):
            land(ROOT + file("a") + member + END, target)
    assert (target / "mine").stat().st_nlink == 1


def test_modes_owners_and_kinds(tmp_path: Path) -> None:
    assert land(ROOT + file("s", mode=0o6755, uid=0) + file("w", mode=0o777) + ROOT + END, tmp_path / "t")
    assert (tmp_path / "t/s").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "t/w").stat().st_mode & 0o022 == 0
    device = tarfile.TarInfo("null")
    device.type, device.devmajor, device.devminor = tarfile.CHRTYPE, 1, 3
    with pytest.raises(PlatformError):
        land(ROOT + device.tobuf() + END, tmp_path / "t")


def test_more_than_the_caller_takes(tmp_path: Path) -> None:
    with pytest.raises(LimitExceeded, match="bytes"):
        land(ROOT + write_member(Member("a", FILE, size=1 << 40)), tmp_path / "t")
    with pytest.raises(LimitExceeded, match="bytes"):
        land(ROOT + write_member(Member("a", FILE, size=512, real_size=1 << 60)), tmp_path / "t")
    with pytest.raises(LimitExceeded, match="entries"):
        land(ROOT + b"".join(file(str(n)) for n in range(20)), tmp_path / "t", entries=10)
    deep = [write_member(Member("/".join("d" * n), DIRECTORY, 0o755)) for n in range(1, DEPTH_MAX + 3)]
    with pytest.raises(LimitExceeded, match="levels"):
        land(ROOT + b"".join(deep), tmp_path / "deep")


@pytest.mark.parametrize(
    ("pieces", "real"),
    [([(0, 10), (5, 5)], 100), ([(95, 10)], 100), ([(1 << 62, 10)], 100), ([(0, 5)], 100)],
    ids=["back", "past the end", "far", "short"],
)
def test_maps_that_lie(tmp_path: Path, pieces: list[tuple[int, int]], real: int) -> None:
    text = write_map(pieces)
    member = write_member(Member("a", FILE, size=len(text) + 10, real_size=real))
    with pytest.raises(PlatformError):
        land(ROOT + member + text + bytes(1024), tmp_path / "t")
    assert tree_of(tmp_path) == {}
    assert os.listdir(tmp_path / "t") == []


@pytest.mark.parametrize(
    "records",
    [
        b"9 path=x",
        b"99 path=x\n",
        b"0 path=x\n",
        b"10 path=x\0\n",
        b"12 mtime=x\n",
        b"11 size=-1\n",
        b"garbage",
        b"1\n",
    ],
)
def test_records_that_are_none(tmp_path: Path, records: bytes) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, len(records)
    stream = ROOT + info.tobuf(tarfile.USTAR_FORMAT) + records + bytes(padding(len(records))) + file("a") + END
    with pytest.raises(PlatformError):
        land(stream, tmp_path / "t")


def test_records_of_a_gigabyte_are_not_waited_for(tmp_path: Path) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 1 << 30
    with pytest.raises(PlatformError, match="bytes of records"):
        land(ROOT + info.tobuf(tarfile.USTAR_FORMAT), tmp_path / "t")


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_any_bytes_are_a_tree_or_a_typed_error(tmp_path: Path, data: st.DataObject) -> None:
    """Honest streams with a few bytes of them changed, and nonsense."""
    honest = bytearray(ROOT + file("a") + write_member(Member("l", SYMLINK, link="a")) + ROOT + END)
    for _ in range(data.draw(st.integers(1, 4))):
        honest[data.draw(st.integers(0, len(honest) - 1))] = data.draw(st.integers(0, 255))
    target = tmp_path / "in" / "t"
    try:
        land(bytes(honest), target)
        land(ROOT + data.draw(st.binary(max_size=600)), target)
    except (ShoalError, OSError):
        pass
    assert set(os.listdir(tmp_path)) <= {"in"}
    assert not [name for name in os.listdir(target) if name.startswith(".shoal")] if target.exists() else True


def test_a_stream_that_stops_leaves_no_half_file(tmp_path: Path) -> None:
    assert not land((ROOT + file("a", b"x" * 5000))[:-3000], tmp_path / "t")
    assert os.listdir(tmp_path / "t") == []


def test_it_is_tar(tmp_path: Path) -> None:
    """What others read."""
    stream = ROOT + file("\udcff") + file("x" * 300) + ROOT + END
    with tarfile.open(fileobj=io.BytesIO(stream), errors="surrogateescape") as archive:
        assert archive.getnames() == [".", "\udcff", "x" * 300, "."]


def test_the_flags_that_the_safety_hangs_on() -> None:
    assert OPEN_DIRECTORY & os.O_NOFOLLOW
    assert OPEN_DIRECTORY & os.O_DIRECTORY
