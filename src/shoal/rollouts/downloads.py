"""Release archives from the package index, each checked by its digest and kept on disk."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import html.parser
import os
import ssl
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urljoin, urlsplit

import httpx
import msgspec
from msgspec import Struct

from shoal.errors import DigestMismatch, NotFound, PlatformError
from shoal.image.lock import locked_async
from shoal.network.index import PackageIndex, local_path
from shoal.rollouts.sharing import Once
from shoal.rollouts.tasks import Archive
from shoal.types import MiB

FORMAT = "v1"
ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
LONGEST_PAGE = 64 * MiB
ATTEMPTS = 3


class Downloads:
    """A folder of archives named by their digests. Several processes may use it at once."""

    def __init__(self, folder: Path, index: PackageIndex) -> None:
        self.folder = folder / FORMAT
        self._index = index
        self._pages: Once[str, dict[str, str]] = Once()
        self._client: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._client = await asyncio.to_thread(_client_for, self._index)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._pages.close()
        await self._http.aclose()

    async def fetch(self, package: str, archive: Archive) -> Path:
        """The archive's path. Raises NotFound, DigestMismatch (then nothing is kept) or PlatformError."""
        path = self.folder / f"{archive.sha256}-{archive.file}"
        async with locked_async(self.folder / f"{archive.sha256}.lock"):
            if not await asyncio.to_thread(_is_intact, path, archive.sha256):
                await self._download(await self._find(package, archive.file), archive, path)
        return path

    async def _find(self, package: str, file: str) -> str:
        """A path on this machine or an address; folders of `find_links` go first, for they cost nothing."""
        for link in self._index.find_links:
            folder = local_path(link)
            if folder is not None and Path(folder, file).is_file():
                return str(Path(folder, file))
        for index in self._index.indexes:
            page = urljoin(index.rstrip("/") + "/", f"{package}/")
            files = await self._pages.get(page, lambda page=page: self._read_page(page))  # type: ignore[misc]
            if file in files:
                return files[file]
        raise NotFound(f"{file} is in none of the package indexes: {', '.join(map(_shown, self._index.indexes))}")

    async def _read_page(self, url: str) -> dict[str, str]:
        """File names and addresses; nothing for a package that the index does not have."""
        body = bytearray()
        async with self._stream(url, {"accept": ACCEPT}) as response:
            if response.status_code == httpx.codes.NOT_FOUND:
                return {}
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > LONGEST_PAGE:
                    raise PlatformError(f"{_shown(url)}: more than {LONGEST_PAGE} bytes; is it a package index?")
        parse = parse_json_page if "json" in response.headers.get("content-type", "") else parse_html_page
        return parse(bytes(body), str(response.url))

    async def _download(self, source: str, archive: Archive, path: Path) -> None:
        fd, aside = tempfile.mkstemp(prefix=".download-", dir=self.folder)
        try:
            with os.fdopen(fd, "wb") as file:
                found = hashlib.sha256()
                async for piece in self._pieces(source):
                    found.update(piece)
                    file.write(piece)
                    _check_size(archive, file.tell())
                os.fsync(fd)
            if found.hexdigest() != archive.sha256:
                raise DigestMismatch(archive.file, archive.sha256, found.hexdigest())
            Path(aside).rename(path)
        except BaseException:
            Path(aside).unlink()
            raise

    async def _pieces(self, source: str) -> AsyncIterator[bytes]:
        if source.startswith("/"):
            yield await asyncio.to_thread(Path(source).read_bytes)
            return
        async with self._stream(source, {"accept-encoding": "identity"}) as response:
            response.raise_for_status()
            async for piece in response.aiter_raw():
                yield piece

    @contextlib.asynccontextmanager
    async def _stream(self, url: str, headers: dict[str, str]) -> AsyncIterator[httpx.Response]:
        """The response, of status 404 or a good one. Whatever goes wrong on the way is a PlatformError."""
        try:
            response = await self._send(url, headers)
            try:
                if response.status_code != httpx.codes.NOT_FOUND:
                    response.raise_for_status()
                yield response
            finally:
                await response.aclose()
        except httpx.HTTPStatusError as error:  # its own text has the address, and so maybe a password
            answer = error.response
            raise PlatformError(f"{_shown(url)}: {answer.status_code} {answer.reason_phrase}") from None
        except httpx.HTTPError as error:
            raise PlatformError(f"{_shown(url)}: {type(error).__name__}: {error}") from error

    async def _send(self, url: str, headers: dict[str, str]) -> httpx.Response:
        for attempt in range(1, ATTEMPTS):
            try:
                return await self._http.send(self._http.build_request("GET", url, headers=headers), stream=True)
            except httpx.TransportError:
                await asyncio.sleep(attempt)
        return await self._http.send(self._http.build_request("GET", url, headers=headers), stream=True)

    @property
    def _http(self) -> httpx.AsyncClient:
        assert self._client is not None, "use `async with Downloads(...)`"
        return self._client


def _client_for(index: PackageIndex) -> httpx.AsyncClient:
    context = ssl.create_default_context(cafile=index.ca_bundle)
    trusted = {f"all://{host}": httpx.AsyncHTTPTransport(verify=False) for host in index.trusted_hosts}
    return httpx.AsyncClient(verify=context, mounts=trusted, follow_redirects=True, timeout=60)


def _check_size(archive: Archive, size: int) -> None:
    """Ends a download early that can't be the right one any more."""
    if size > archive.bytes:
        raise DigestMismatch(archive.file, archive.sha256, f"more than the {archive.bytes} bytes promised")


class _File(Struct):
    filename: str
    url: str


class _Page(Struct):
    files: list[_File]


def parse_json_page(body: bytes, base: str) -> dict[str, str]:
    """File names and addresses of a page of the simple API in JSON (PEP 691)."""
    try:
        page = msgspec.json.decode(body, type=_Page)
    except msgspec.DecodeError as error:
        raise PlatformError(f"{_shown(base)}: not a page of a package index: {error}") from error
    return {file.filename: urljoin(base, file.url) for file in page.files}


def parse_html_page(body: bytes, base: str) -> dict[str, str]:
    """The same of a page in HTML (PEP 503)."""
    anchors = _Anchors()
    anchors.feed(body.decode("utf-8", "replace"))
    return {text.strip(): urljoin(base, href) for text, href in anchors.found if text.strip()}


class _Anchors(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self._href: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self._href = dict(attrs).get("href")

    def handle_data(self, data: str) -> None:
        if self._href is not None:
            self.found.append((data, self._href))

    def handle_endtag(self, tag: str) -> None:
        if tag == "a":
            self._href = None


def _is_intact(path: Path, sha256: str) -> bool:
    """Whether the file is there as published; what a failing disk spoiled is taken away."""
    try:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
                return True
    except FileNotFoundError:
        return False
    path.unlink()
    return False


def _shown(url: str) -> str:
    """Without the password that may be in it."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
