"""Debian's archive as this machine is set to reach it: mirrors, and the settings of apt that lead there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

_MIRROR: Final = "http://deb.debian.org/debian"
_SECURITY: Final = "http://deb.debian.org/debian-security"
_SETTINGS: Final = re.compile(r"Acquire::(?:https?|Retries|ForceIPv4|ForceIPv6)\b")
_WITHOUT_SECURITY: Final = ("sid", "unstable", "experimental")


class AptSettings(Struct, frozen=True):
    """Where packages come from."""

    mirror: str = _MIRROR
    security: str = _SECURITY
    options: tuple[str, ...] = ()
    """Lines of apt.conf about proxies and certificates."""

    def sources(self, suite: str, components: Iterable[str] = ("main",)) -> tuple[str, ...]:
        """Lines of a sources.list."""
        parts = " ".join(components)
        lines = [f"deb {self.mirror} {suite} {parts}"]
        if suite not in _WITHOUT_SECURITY:
            lines.append(f"deb {self.mirror} {suite}-updates {parts}")
            lines.append(f"deb {self.security} {suite}-security {parts}")
        return tuple(lines)

    def hosts(self) -> tuple[str, ...]:
        """Entries of a network policy, `host:port`, that are enough."""
        proxies = [match[1] for line in self.options if (match := re.search(r'Proxy "?(https?://[^";]+)', line))]
        return tuple(dict.fromkeys(_entry(url) for url in (self.mirror, self.security, *proxies)))


def _entry(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


def read_apt_settings(folder: Path = Path("/etc/apt")) -> AptSettings:
    """Of this machine; Debian's own mirror where it has none, as on another distribution."""
    urls = [url for url in _source_urls(folder) if url.startswith(("http://", "https://"))]
    mirrors = [url for url in urls if url.rstrip("/").endswith("/debian")]
    security = [url for url in urls if url.rstrip("/").endswith("/debian-security")]
    return AptSettings(
        mirror=(mirrors or [_MIRROR])[0].rstrip("/"),
        security=(security or [_SECURITY])[0].rstrip("/"),
        options=tuple(_options()),
    )


def _source_urls(folder: Path) -> Iterator[str]:
    """From one-line files (`deb [options] URL suite`) and deb822 ones (`URIs: URL URL`)."""
    for file in [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))]:
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            if match := re.match(r"deb\s+(?:\[[^\]]*\]\s*)?(\S+)\s", line):
                yield match[1]
            elif match := re.match(r"URIs:\s*(.*)", line, re.IGNORECASE):
                yield from match[1].split()


def _options() -> Iterator[str]:
    """What apt itself says its settings are."""
    try:
        dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, timeout=30, check=False).stdout
    except OSError:
        return
    for line in dump.splitlines():
        if _SETTINGS.match(line) and not line.endswith('"";'):
            yield line
