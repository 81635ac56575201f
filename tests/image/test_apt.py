"""The machine's own way to Debian's archive is found in every form that apt reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.image.apt import AptSettings, read_apt_settings

LINES = "deb [arch=amd64 signed-by=/x.gpg] http://mirror.example/debian/ bookworm main\n# deb http://no/debian x y\n"
DEB822 = "Types: deb\nURIs: https://mirror.example:8443/debian\nSuites: bookworm\n\nURIs: http://sec.example/debian-security\n"


@pytest.mark.parametrize(
    ("files", "mirror", "security"),
    [
        ({"sources.list": LINES}, "http://mirror.example/debian", "http://deb.debian.org/debian-security"),
        ({"sources.list.d/x.sources": DEB822}, "https://mirror.example:8443/debian", "http://sec.example/debian-security"),
        ({"sources.list": "deb https://ppa.example/ubuntu noble main\n"}, "http://deb.debian.org/debian",
         "http://deb.debian.org/debian-security"),
        ({}, "http://deb.debian.org/debian", "http://deb.debian.org/debian-security"),
    ],
)  # fmt: skip
def test_mirrors(tmp_path: Path, files: dict[str, str], mirror: str, security: str) -> None:
    (tmp_path / "sources.list.d").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = read_apt_settings(tmp_path)
    assert (found.mirror, found.security) == (mirror, security)


def test_sources_and_hosts() -> None:
    settings = AptSettings("https://m.example/debian", options=('Acquire::http::Proxy "http://proxy.example:3128";',))
    assert settings.sources("bookworm") == (
        "deb https://m.example/debian bookworm main",
        "deb https://m.example/debian bookworm-updates main",
        "deb http://deb.debian.org/debian-security bookworm-security main",
    )
    assert settings.sources("sid") == ("deb https://m.example/debian sid main",)
    assert settings.hosts() == ("m.example:443", "deb.debian.org:80", "proxy.example:3128")
