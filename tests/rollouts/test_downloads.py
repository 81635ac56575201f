"""Archives from an index: the real one, one on this machine, and ones that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from shoal.errors import DigestMismatch, NotFound, PlatformError, ShoalError
from shoal.network.index import PackageIndex, read_package_index
from shoal.rollouts.downloads import Downloads, parse_html_page, parse_json_page
from shoal.rollouts.pypi import fetch_releases
from shoal.rollouts.tasks import Archive, load_tasks, select_tasks

from .stand_in import archive_of

DATA = b"an archive\n" * 1000
THING = archive_of(DATA, "thing-1.0.tar.gz")
PAGE = '<html><a href="../files/thing-1.0.tar.gz#sha256=0">thing-1.0.tar.gz</a><a>no</a></html>'


class Site(http.server.BaseHTTPRequestHandler):
    """An index with one package in HTML, and addresses where something is wrong."""

    answers: ClassVar[dict[str, tuple[int, str, bytes]]]
    asked: ClassVar[list[str]]
    address: ClassVar[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        status, kind, body = self.answers.get(self.path, (404, "text/plain", b""))
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[type[Site]]:
    class Fresh(Site):
        answers: ClassVar = {
            "/simple/thing/": (200, "text/html", PAGE.encode()),
            "/simple/files/thing-1.0.tar.gz": (200, "application/gzip", DATA),
            "/broken/thing/": (500, "text/plain", b""),
            "/odd/thing/": (200, "application/vnd.pypi.simple.v1+json", b"[]"),
        }
        asked: ClassVar = []

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Fresh) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        Fresh.address = f"http://127.0.0.1:{server.server_port}"
        yield Fresh
        server.shutdown()
        thread.join()


def fetch(folder: Path, index: PackageIndex, *archives: Archive) -> list[Path | BaseException]:
    async def all_of_them() -> list[Path | BaseException]:
        async with Downloads(folder, index) as downloads:
            wanted = [downloads.fetch("thing", archive) for archive in archives]
            return await asyncio.gather(*wanted, return_exceptions=True)

    return asyncio.run(all_of_them())


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.index
def test_real_releases_come_from_the_index(tmp_path: Path) -> None:
    async def both() -> None:
        async with Downloads(tmp_path, read_package_index()) as downloads:
            for task in select_tasks(load_tasks("pypi"), ["validators__0.23*", "pathspec__1.1.0*"]):
                releases = await fetch_releases(task, downloads)
                assert set(task.test_files) <= releases.fix.keys()
                assert "PKG-INFO" in releases.base

    asyncio.run(both())
    assert len(left(tmp_path)) == 4


@pytest.mark.index
def test_a_real_release_under_a_wrong_digest_is_refused(tmp_path: Path) -> None:
    [task] = select_tasks(load_tasks("pypi"), ["validators__0.23*"])
    wrong = msgspec.structs.replace(task.base_sdist, sha256="0" * 64)

    async def get() -> None:
        async with Downloads(tmp_path, read_package_index()) as downloads:
            await downloads.fetch(task.package, wrong)

    with pytest.raises(DigestMismatch, match=rf"{wrong.file}.*{task.base_sdist.sha256}"):
        asyncio.run(get())
    assert left(tmp_path) == []


def test_a_page_in_html_will_do_and_is_read_once(tmp_path: Path, site: type[Site]) -> None:
    index = PackageIndex(index_url=f"{site.address}/simple")
    again = [fetch(tmp_path, index, THING, THING), fetch(tmp_path, index, THING)]
    paths = {path for paths in again for path in paths}
    assert [path.read_bytes() for path in paths if isinstance(path, Path)] == [DATA]
    assert site.asked == ["/simple/thing/", "/simple/files/thing-1.0.tar.gz"]


def test_further_indexes_are_asked_where_the_first_has_nothing(tmp_path: Path, site: type[Site]) -> None:
    address = site.address
    index = PackageIndex(index_url=f"{address}/none", extra_index_urls=(f"{address}/simple/",))
    assert isinstance(fetch(tmp_path, index, THING)[0], Path)


@pytest.mark.parametrize(
    ("folder", "kind", "says"),
    [
        ("none", NotFound, "in none of the package indexes"),
        ("broken", PlatformError, "500"),
        ("odd", PlatformError, "not a page of a package index"),
    ],
)
def test_what_an_index_does_wrong_is_said_without_its_password(
    tmp_path: Path, site: type[Site], folder: str, kind: type[ShoalError], says: str
) -> None:
    address = site.address.replace("//", "//me:secret@")
    [error] = fetch(tmp_path, PackageIndex(index_url=f"{address}/{folder}"), THING)
    assert type(error) is kind
    assert says in str(error)
    assert folder in str(error)
    assert "secret" not in str(error)
    assert left(tmp_path) == []


def test_a_server_that_is_not_there_is_the_platforms_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.rollouts.downloads.ATTEMPTS", 1)
    [error] = fetch(tmp_path, PackageIndex(index_url="http://127.0.0.1:1/simple"), THING)
    assert type(error) is PlatformError


def test_a_folder_of_links_goes_first(tmp_path: Path) -> None:
    (tmp_path / THING.file).write_bytes(DATA)
    index = PackageIndex(find_links=(str(tmp_path),), no_index=True)
    assert isinstance(fetch(tmp_path / "d", index, THING)[0], Path)


@pytest.mark.parametrize(("data", "found"), [(DATA[1:], "found "), (DATA + b"!", "more than the 11000 bytes")])
def test_other_bytes_than_promised_are_refused_and_not_kept(tmp_path: Path, data: bytes, found: str) -> None:
    (tmp_path / THING.file).write_bytes(data)
    [error] = fetch(tmp_path / "d", PackageIndex(find_links=(str(tmp_path),), no_index=True), THING)
    assert isinstance(error, DigestMismatch)
    assert error.what == THING.file
    assert found in str(error)
    assert left(tmp_path / "d") == []


def test_what_the_disk_spoiled_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / THING.file).write_bytes(DATA)
    index = PackageIndex(find_links=(str(tmp_path),), no_index=True)
    [path] = fetch(tmp_path / "d", index, THING)
    assert isinstance(path, Path)
    path.write_bytes(b"spoiled")
    assert fetch(tmp_path / "d", index, THING) == [path]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == THING.sha256


def test_a_cancelled_download_leaves_nothing(tmp_path: Path) -> None:
    async def cut_short() -> None:
        sent = asyncio.Event()

        async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 11000\r\n\r\nsome")
            sent.set()
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()

        server = await asyncio.start_server(never, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        page = tmp_path / "page"
        async with server, Downloads(page, PackageIndex(index_url=f"{url}/simple")) as downloads:
            downloads._pages._made[f"{url}/simple/thing/"] = asyncio.create_task(_page(url))
            getting = asyncio.create_task(downloads.fetch("thing", THING))
            await asyncio.wait_for(sent.wait(), 10)
            await asyncio.sleep(0.05)
            assert any(name.startswith(".download-") for name in left(page))
            getting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await getting

    asyncio.run(cut_short())
    assert left(tmp_path) == []


async def _page(url: str) -> dict[str, str]:
    return {THING.file: f"{url}/{THING.file}"}


def test_pages_are_read_in_both_forms() -> None:
    base = "https://index.example/simple/thing/"
    wanted = {"thing-1.0.tar.gz": "https://index.example/simple/files/thing-1.0.tar.gz#sha256=0"}
    page = b'{"files": [{"filename": "thing-1.0.tar.gz", "url": "../files/thing-1.0.tar.gz#sha256=0"}]}'
    assert parse_json_page(page, base) == parse_html_page(PAGE.encode(), base) == wanted
    assert parse_html_page(b"\xff<a href='x'", base) == {}
