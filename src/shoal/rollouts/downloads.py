"""Release archives from the package index, each checked by its digest and kept on disk."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import html.parser
import os
import ssl
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO
from urllib.parse import urljoin, urlsplit

import httpx
import msgspec
from msgspec import Struct

from shoal.errors import DigestMismatch, NotFound, PlatformError
from shoal.rollouts.sharing import Once
from shoal.rollouts.tasks import Archive
from shoal.types import MiB

FORMAT = "v1"
ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
LONGEST_PAGE = 64 * MiB
ATTEMPTS = 3


class Index(Struct, frozen=True):
    """A package index by its simple API, and the CA file that vouches for it (None: the system's)."""

    url: str = "https://pypi.org/simple/"
    ca: str | None = None


def index_settings(environ: Mapping[str, str] = os.environ) -> Index:
    """The index that uv and pip would use here."""
    url = environ.get("UV_DEFAULT_INDEX") or environ.get("UV_INDEX_URL") or environ.get("PIP_INDEX_URL")
    ca = environ.get("SSL_CERT_FILE") or environ.get("PIP_CERT")
    return Index((url or Index().url).rstrip("/") + "/", ca)


class Downloads:
    """A folder of archives named by their digests. Several processes may use it at once."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder / FORMAT
        self._index = index
        self._pages: Once[str, dict[str, str]] = Once()
        self._client: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Downloads:
        self.folder.mkdir(parents=True, exist_ok=True)
        context = await asyncio.to_thread(ssl.create_default_context, cafile=self._index.ca)
        self._client = httpx.AsyncClient(verify=context, follow_redirects=True, timeout=60)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._pages.close()
        await self._http.aclose()

    async def fetch(self, package: str, archive: Archive) -> Path:
        """The archive on this machine. Raises NotFound, DigestMismatch (and keeps nothing) or PlatformError."""
        path = self.folder / f"{archive.sha256}-{archive.file}"
        async with _locked(self.folder / f"{archive.sha256}.lock"):
            if not await asyncio.to_thread(_is_intact, path, archive.sha256):
                await self._download(await self._url_of(package, archive.file), archive, path)
        return path

    async def _url_of(self, package: str, file: str) -> str:
        page = urljoin(self._index.url, f"{package}/")
        files = await self._pages.get(page, lambda: self._read_page(page))
        if file not in files:
            raise NotFound(f"{page} has no {file}")
        return files[file]

    async def _read_page(self, url: str) -> dict[str, str]:
        body = bytearray()
        async with self._stream(url, {"accept": ACCEPT}) as response:
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > LONGEST_PAGE:
                    raise PlatformError(f"{url}: more than {LONGEST_PAGE} bytes; is that a package index?")
        parse = parse_json_page if "json" in response.headers.get("content-type", "") else parse_html_page
        return parse(bytes(body), str(response.url))

    async def _download(self, url: str, archive: Archive, path: Path) -> None:
        fd, aside = tempfile.mkstemp(prefix=".download-", dir=self.folder)
        try:
            with os.fdopen(fd, "wb") as file:
                found = await self._receive(url, archive.bytes, file)
                os.fsync(file.fileno())
            if found != archive.sha256:
                raise DigestMismatch(f"{archive.file} from {urlsplit(url).hostname}", archive.sha256, found)
            os.rename(aside, path)
        except BaseException:
            os.unlink(aside)
            raise

    async def _receive(self, url: str, size: int, file: IO[bytes]) -> str:
        digest = hashlib.sha256()
        async with self._stream(url, {"accept-encoding": "identity"}) as response:
            async for piece in response.aiter_raw():
                digest.update(piece)
                file.write(piece)
                if file.tell() > size:
                    return f"more than the {size} bytes promised"
        return digest.hexdigest()

    @contextlib.asynccontextmanager
    async def _stream(self, url: str, headers: dict[str, str]) -> AsyncIterator[httpx.Response]:
        try:
            response = await self._send(url, headers)
            try:
                if response.status_code == httpx.codes.NOT_FOUND:
                    raise NotFound(f"the index has no {_without_password(url)}")
                response.raise_for_status()
                yield response
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise PlatformError(f"{_without_password(url)}: {error or type(error).__name__}") from error

    async def _send(self, url: str, headers: dict[str, str]) -> httpx.Response:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._http.send(
                    self._http.build_request("GET", url, headers=headers), stream=True
                )
            except httpx.TransportError:
                if attempt == ATTEMPTS:
                    raise
                await asyncio.sleep(attempt)
        raise AssertionError("unreachable")

    @property
    def _http(self) -> httpx.AsyncClient:
        assert self._client is not None, "use `async with Downloads(...)`"
        return self._client


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
        raise PlatformError(f"{_without_password(base)}: not a page of a package index: {error}") from error
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


@contextlib.asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    """Holds a lock that also other processes see. Asked for again and again: a blocked thread can't be cancelled."""
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(0.05)
        yield


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


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
