from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from shoal.errors import InvalidRequest
from shoal.network.index import PackageIndex, read_package_index

UV = Path(sysconfig.get_path("scripts")) / "uv"


class Machine:
    """A machine's settings in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "home/me"

    def write(self, path: str, text: str) -> Path:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return target

    def read(self, **environ: str) -> PackageIndex:
        return read_package_index(environ, self.home, self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_nothing_set(machine: Machine) -> None:
    index = machine.read()
    assert index == PackageIndex()
    assert index.hosts() == ("pypi.org:443", "files.pythonhosted.org:443")
    assert index.local_paths() == ()
    environment = index.uv_environment()
    assert environment["UV_DEFAULT_INDEX"] == "https://pypi.org/simple"
    assert environment["UV_INDEX_STRATEGY"] == "unsafe-best-match"


def test_every_place_of_pip_goes_before_the_ones_above(machine: Machine) -> None:
    places = ["etc/xdg/pip/pip.conf", "etc/pip.conf", "home/me/.pip/pip.conf", "home/me/.config/pip/pip.conf"]
    for number, place in enumerate(places):
        machine.write(place, f"[global]\nindex-url = https://{number}.example/simple\n")
        assert machine.read().index_url == f"https://{number}.example/simple"
    machine.write("venv/pip.conf", "[global]\nindex_url = https://venv.example/simple\n")
    virtual = str(machine.root / "venv")
    assert machine.read(VIRTUAL_ENV=virtual).index_url == "https://venv.example/simple"
    chosen = machine.write("chosen.conf", "[global]\nextra-index-url = https://chosen.example\n")
    index = machine.read(PIP_CONFIG_FILE=str(chosen))
    assert index.index_url == "https://1.example/simple"  # the user's files are left out
    assert index.extra_index_urls == ("https://chosen.example",)
    assert machine.read(PIP_CONFIG_FILE=os.devnull).index_url == "https://pypi.org/simple"
    assert machine.read(PIP_INDEX_URL="https://env.example").index_url == "https://env.example"


def test_the_section_install_goes_before_global(machine: Machine) -> None:
    machine.write("etc/pip.conf", "[install]\nindex-url = https://install.example\n")
    machine.write("home/me/.config/pip/pip.conf", "[global]\nindex-url = https://global.example\n")
    assert machine.read().index_url == "https://install.example"


def test_lists_and_folders(machine: Machine) -> None:
    machine.write("home/me/wheels/.keep", "")
    machine.write(
        "etc/pip.conf",
        "[global]\nfind-links =\n  ~/wheels\n  https://links.example:8443/page\n  /nowhere\n"
        "extra-index-url = http://a.example/simple file:///nowhere/simple\ntrusted-host = a.example\n"
        "constraint = /etc/limits.txt\ncert = /etc/ca.pem\nno-index = false\n",
    )
    index = machine.read()
    wheels = str(machine.home / "wheels")
    assert index.find_links == (wheels, "https://links.example:8443/page")
    assert index.extra_index_urls == ("http://a.example/simple",)
    assert index.hosts()[2:] == ("a.example:80", "links.example:8443")
    assert index.local_paths() == tuple(sorted(("/etc/ca.pem", "/etc/limits.txt", wheels)))
    environment = index.uv_environment()
    assert environment["UV_FIND_LINKS"] == f"{wheels},https://links.example:8443/page"
    assert environment["UV_CONSTRAINT"] == "/etc/limits.txt"
    assert environment["UV_INSECURE_HOST"] == "a.example"
    assert environment["SSL_CERT_FILE"] == "/etc/ca.pem"


def test_no_index(machine: Machine) -> None:
    index = machine.read(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(machine.root))
    assert index.hosts() == ()
    assert "UV_DEFAULT_INDEX" not in index.uv_environment()
    assert index.uv_arguments() == ("--no-index",)


def test_uv_goes_before_pip(machine: Machine) -> None:
    machine.write("etc/pip.conf", "[global]\nindex-url = https://pip.example\nextra-index-url = https://x.example\n")
    machine.write("etc/uv/uv.toml", 'index-url = "https://system.example"\n')
    assert machine.read().index_url == "https://system.example"
    machine.write(
        "home/me/.config/uv/uv.toml",
        '[[index]]\nname = "main"\nurl = "https://user.example"\ndefault = true\n'
        '[[index]]\nurl = "https://more.example"\n'
        '[[index]]\nurl = "https://torch.example"\nexplicit = true\n',
    )
    secrets = {"UV_INDEX_CORP_USERNAME": "me", "UV_INDEX_CORP_PASSWORD": "p/w"}
    index = machine.read(UV_INDEX="corp=https://corp.example", **secrets)
    assert index.index_url == "https://user.example"
    assert index.extra_index_urls == (
        "https://me:p%2Fw@corp.example",
        "https://more.example",
        "https://x.example",
    )
    assert machine.read(UV_DEFAULT_INDEX="https://env.example").index_url == "https://env.example"


def test_credentials_are_not_shown(machine: Machine) -> None:
    index = machine.read(
        PIP_INDEX_URL="https://me:secret%21@main.example/simple",
        PIP_EXTRA_INDEX_URL="https://token@more.example",
    )
    assert "secret" not in repr(index)
    assert "token" not in f"{index} {index.__rich_repr__()}"
    assert "main.example" in repr(index)
    assert index.hosts() == ("main.example:443", "more.example:443")
    environment = index.uv_environment()
    assert environment["UV_DEFAULT_INDEX"] == "shoal0=https://main.example/simple"
    assert environment["UV_INDEX_SHOAL0_USERNAME"] == "me"
    assert environment["UV_INDEX_SHOAL0_PASSWORD"] == "secret!"
    assert environment["UV_INDEX"] == "shoal1=https://more.example"
    assert environment["UV_INDEX_SHOAL1_USERNAME"] == "token"


@pytest.mark.parametrize(("path", "text"), [("etc/pip.conf", "no section"), ("etc/uv/uv.toml", "= 1")])
def test_settings_that_cannot_be_read_are_named(machine: Machine, path: str, text: str) -> None:
    machine.write(path, text)
    with pytest.raises(InvalidRequest, match=re.escape(path)):
        machine.read()


def test_uv_finds_a_local_index_by_these_variables(machine: Machine) -> None:
    wheel = "shoal_probe-1.0-py3-none-any.whl"
    page = machine.write("index/simple/shoal-probe/index.html", f'<a href="../../files/{wheel}">{wheel}</a>')
    machine.write(f"index/files/{wheel}", "")
    local = page.parents[1].as_uri()
    index = machine.read(PIP_INDEX_URL=local, PIP_CONSTRAINT=str(machine.write("limits", "shoal-probe<2\n")))
    assert index.hosts() == ()
    files, limits = str(machine.root / "index/files"), str(machine.root / "limits")
    assert index.local_paths() == (files, str(machine.root / "index/simple"), limits)
    command = [str(UV), "pip", "compile", "--no-deps", "--no-cache", "--python-version", "3.11", "-"]
    found = subprocess.run(
        [*command, "--emit-index-annotation"],
        input="shoal-probe",
        env={"PATH": os.environ["PATH"], "HOME": str(machine.home), **index.uv_environment()},
        capture_output=True,
        text=True,
    )
    assert "shoal-probe==1.0" in found.stdout, found.stderr
