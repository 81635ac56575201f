"""The package index that this machine's pip and uv are set to use, and what a build needs to use the same.

Read in pip's order (global, user and site files, PIP_CONFIG_FILE, environment; a section [install] goes
before [global]) and in uv's (environment, the user's uv.toml, the system's). uv's index, where one is set,
goes before pip's; lists are joined.
"""

from __future__ import annotations

import configparser
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from msgspec import Struct

from shoal.errors import InvalidRequest

PYPI = "https://pypi.org/simple"


class PackageIndex(Struct, frozen=True):
    """Where packages come from. URLs may carry credentials; `repr` hides them."""

    index_url: str = PYPI
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    """Folders (absolute) and URLs of pages that link to archives."""
    trusted_hosts: tuple[str, ...] = ()
    """`host` or `host:port`, whose certificates are not checked."""
    ca_bundle: str | None = None
    """A PEM file; None: the client's own."""
    constraints: tuple[str, ...] = ()
    """Paths or URLs of files that limit versions."""
    no_index: bool = False
    """Only `find_links` are used."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={_masked(getattr(self, name))!r}" for name in self.__struct_fields__)
        return f"PackageIndex({shown})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [(name, _masked(getattr(self, name))) for name in self.__struct_fields__]

    @property
    def indexes(self) -> tuple[str, ...]:
        return () if self.no_index else (self.index_url, *self.extra_index_urls)

    def hosts(self) -> tuple[str, ...]:
        """The entries of a network policy (`host:port`) that the preset "pypi" stands for."""
        found: dict[str, None] = {}
        for url in (*self.indexes, *self.find_links, *self.constraints):
            entry = _policy_entry(url)
            if entry is not None:
                found[entry] = None
            if entry == "pypi.org:443":
                found["files.pythonhosted.org:443"] = None
        return tuple(found)

    def local_paths(self) -> tuple[str, ...]:
        """Folders and files of this machine that a build must see, read-only and at their own paths."""
        folders = [path for url in (*self.indexes, *self.find_links) if (path := local_path(url)) is not None]
        linked = [place for folder in folders for place in _linked_folders(folder)]
        files = [path for path in self.constraints if local_path(path) is not None]
        files += [self.ca_bundle] if self.ca_bundle is not None else []
        return _outermost([*folders, *linked, *files])

    def uv_environment(self) -> dict[str, str]:
        """Environment variables that make uv use the same index, and choose among its parts as pip does.

        Credentials of an index stand in variables of their own, so that a printed URL does not show them.
        """
        environment = {"UV_NO_CONFIG": "1", "UV_INDEX_STRATEGY": "unsafe-best-match"}
        named = [_named_index(f"shoal{number}", url) for number, url in enumerate(self.indexes)]
        for _, credentials in named:
            environment |= credentials
        if named:
            environment["UV_DEFAULT_INDEX"] = named[0][0]
        lists = {
            "UV_INDEX": " ".join(entry for entry, _ in named[1:]),
            "UV_FIND_LINKS": ",".join(self.find_links),
            "UV_CONSTRAINT": " ".join(self.constraints),
            "UV_INSECURE_HOST": " ".join(self.trusted_hosts),
            "SSL_CERT_FILE": self.ca_bundle or "",
        }
        return environment | {name: value for name, value in lists.items() if value}

    def uv_arguments(self) -> tuple[str, ...]:
        """What uv takes only as an argument."""
        return ("--no-index",) if self.no_index else ()


def read_package_index(
    environ: Mapping[str, str] | None = None, home: Path | None = None, root: Path = Path("/")
) -> PackageIndex:
    """This machine's settings, of the user whose environment and home these are. `root` is where /etc is.

    Raises InvalidRequest, naming the file, for settings that can't be read. Local folders that don't exist
    are left out: pip only warns of them, uv fails.
    """
    environ = os.environ if environ is None else environ
    home = Path.home() if home is None else home
    pip = _pip_settings(environ, home, root)
    uv = _uv_settings(environ, home, root)
    find_links = [_absolute(link, home) for link in (*uv["find-links"], *pip.get("find-links", "").split())]
    extras = (*uv["extra-index-url"], *pip.get("extra-index-url", "").split())
    constraints = (*uv["constraint"], *pip.get("constraint", "").split())
    return PackageIndex(
        index_url=next(iter([*uv["index-url"], *pip.get("index-url", "").split(), PYPI])),
        extra_index_urls=_unique(filter(_present, extras)),
        find_links=_unique(filter(_present, find_links)),
        trusted_hosts=_unique((*uv["allow-insecure-host"], *pip.get("trusted-host", "").split())),
        ca_bundle=environ.get("SSL_CERT_FILE") or pip.get("cert") or environ.get("REQUESTS_CA_BUNDLE") or None,
        constraints=_unique(_absolute(path, home) for path in constraints),
        no_index=pip.get("no-index", "").lower() in ("1", "true", "yes", "on", "y", "t") or uv["no-index"] == ["true"],
    )


# -- pip -----------------------------------------------------------------------------------------------------


def _pip_settings(environ: Mapping[str, str], home: Path, root: Path) -> dict[str, str]:
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}}
    for path in _pip_files(environ, home, root):
        for name, values in _read_ini(path).items():
            sections.setdefault(name, {}).update(values)
    from_environment = {
        _option(name.removeprefix("PIP_")): value
        for name, value in environ.items()
        if name.startswith("PIP_") and value
    }
    return sections["global"] | sections["install"] | from_environment


def _pip_files(environ: Mapping[str, str], home: Path, root: Path) -> list[Path]:
    chosen = environ.get("PIP_CONFIG_FILE")
    if chosen == os.devnull:
        return []
    files = [folder / "pip/pip.conf" for folder in _system_folders(environ, root)] + [root / "etc/pip.conf"]
    if not (chosen and Path(chosen).exists()):  # pip leaves out the user's files then
        files += [home / ".pip/pip.conf", _user_folder(environ, home) / "pip/pip.conf"]
    if virtual := environ.get("VIRTUAL_ENV"):
        files.append(Path(virtual) / "pip.conf")
    return files + ([Path(chosen)] if chosen else [])


def _read_ini(path: Path) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser()
    try:
        parser.read(path)
    except (configparser.Error, UnicodeDecodeError, PermissionError) as error:
        raise InvalidRequest("network", f"{path} can't be read as pip's settings: {error}") from None
    return {name: {_option(key): value for key, value in parser.items(name)} for name in parser.sections()}


def _option(name: str) -> str:
    return name.lower().replace("_", "-").removeprefix("--")


# -- uv ------------------------------------------------------------------------------------------------------

_UV_KEYS = ("index-url", "extra-index-url", "find-links", "constraint", "allow-insecure-host", "no-index")
_UV_VARIABLES = (
    ("index-url", "UV_DEFAULT_INDEX", None),
    ("index-url", "UV_INDEX_URL", None),
    ("extra-index-url", "UV_INDEX", None),
    ("extra-index-url", "UV_EXTRA_INDEX_URL", None),
    ("find-links", "UV_FIND_LINKS", ","),
    ("constraint", "UV_CONSTRAINT", None),
    ("allow-insecure-host", "UV_INSECURE_HOST", None),
)
"""(setting, variable, what separates its values; None: spaces)."""


def _uv_settings(environ: Mapping[str, str], home: Path, root: Path) -> dict[str, list[str]]:
    """Each setting with its values, the most important first."""
    settings: dict[str, list[str]] = {key: [] for key in _UV_KEYS}
    for key, variable, separator in _UV_VARIABLES:
        settings[key] += [_unnamed(value, environ) for value in environ.get(variable, "").split(separator) if value]
    for path in _uv_files(environ, home, root):
        for key, values in _read_toml(path).items():
            settings[key] += values
    return settings


def _uv_files(environ: Mapping[str, str], home: Path, root: Path) -> list[Path]:
    if environ.get("UV_NO_CONFIG"):
        return []
    if chosen := environ.get("UV_CONFIG_FILE"):
        return [Path(chosen)]
    system = [folder / "uv/uv.toml" for folder in _system_folders(environ, root)] + [root / "etc/uv/uv.toml"]
    return [_user_folder(environ, home) / "uv/uv.toml", *(path for path in system if path.exists())][:2]


def _read_toml(path: Path) -> dict[str, list[str]]:
    try:
        document = tomllib.loads(path.read_text()) if path.exists() else {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, PermissionError) as error:
        raise InvalidRequest("network", f"{path} can't be read as uv's settings: {error}") from None
    found: dict[str, list[str]] = {key: [] for key in _UV_KEYS}
    for index in document.get("index", []):
        if not index.get("explicit", False):
            found["index-url" if index.get("default", False) else "extra-index-url"].append(str(index["url"]))
    for table in (document.get("pip", {}), document):
        for key in _UV_KEYS:
            found[key] += _texts(table.get(key, []))
    return found


def _texts(value: Any) -> list[str]:
    if isinstance(value, bool):
        return ["true"] if value else []
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _unnamed(entry: str, environ: Mapping[str, str]) -> str:
    """The URL of `name=url`, with the credentials that uv would take from the environment for that name."""
    named = re.fullmatch(r"([A-Za-z0-9._-]+)=(.+)", entry)
    if named is None:
        return entry
    key = re.sub(r"[^A-Z0-9]", "_", named[1].upper())
    user, secret = environ.get(f"UV_INDEX_{key}_USERNAME", ""), environ.get(f"UV_INDEX_{key}_PASSWORD", "")
    if not user and not secret:
        return named[2]
    parts = urlsplit(named[2])
    return urlunsplit(parts._replace(netloc=f"{quote(user, safe='')}:{quote(secret, safe='')}@{parts.netloc}"))


# -- places --------------------------------------------------------------------------------------------------


def local_path(url: str) -> str | None:
    """The path on this machine that a `file:` URL or a plain path stands for."""
    if url.startswith("file:"):
        return unquote(urlsplit(url).path)
    return None if "://" in url else url


def _present(url: str) -> bool:
    path = local_path(url)
    return path is None or Path(path).exists()


def _absolute(link: str, home: Path) -> str:
    if "://" in link or link.startswith("file:"):
        return link
    expanded = str(home) + link[1:] if link == "~" or link.startswith("~/") else link
    return str(Path(expanded).absolute())


def _user_folder(environ: Mapping[str, str], home: Path) -> Path:
    return Path(environ.get("XDG_CONFIG_HOME") or home / ".config")


def _system_folders(environ: Mapping[str, str], root: Path) -> list[Path]:
    chosen = [Path(folder) for folder in environ.get("XDG_CONFIG_DIRS", "").split(":") if folder]
    return chosen or [root / "etc/xdg"]


def _linked_folders(folder: str) -> set[str]:
    """Where the pages of a local index, or symlinks, lead to. Looks at the first 400 entries."""
    entries = sorted(Path(folder).iterdir())[:400] if Path(folder).is_dir() else []
    places = {str(entry.resolve().parent) for entry in entries if entry.is_symlink()}
    for page in (entry / "index.html" for entry in entries):
        if page.is_file():
            places |= {str(place) for place in _targets(page)}
    return places


def _targets(page: Path) -> set[Path]:
    found = set()
    for link in re.findall(r"""href=["']([^"'#?]+)""", page.read_text(errors="replace")[: 1 << 20]):
        path = local_path(unquote(link))
        if path is not None:
            found.add(Path(os.path.normpath(page.parent / path)).parent)
    return found


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Without what lies below another of them, sorted."""
    kept: list[Path] = []
    for path in sorted(Path(os.path.normpath(path)) for path in paths):
        if not any(path.is_relative_to(parent) for parent in kept):
            kept.append(path)
    return tuple(str(path) for path in kept)


def _unique(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


def _policy_entry(url: str) -> str | None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


def _named_index(name: str, url: str) -> tuple[str, dict[str, str]]:
    """The URL, or `name=url` without its credentials and the variables from which uv takes them."""
    parts = urlsplit(url)
    if parts.username is None and parts.password is None:
        return url, {}
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    keys = f"UV_INDEX_{name.upper()}_USERNAME", f"UV_INDEX_{name.upper()}_PASSWORD"
    return f"{name}={bare}", dict(
        zip(keys, (unquote(parts.username or ""), unquote(parts.password or "")), strict=True)
    )


def _masked(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_masked(item) for item in value)
    return re.sub(r"//[^/@\s]*@", "//***@", value) if isinstance(value, str) else value
