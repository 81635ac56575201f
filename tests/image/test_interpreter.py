"""Interpreters of this machine: found without running what needn't be, told apart by exact version."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from shoal.errors import InvalidRequest, NotFound, Unsupported
from shoal.image.interpreter import Interpreters, find

_HERE = Interpreters(os.environ)
_INSTALLED = [each.version for each in _HERE.list() if each.numbers >= (3, 8)]


def fake(prefix: Path, version: str, *, header: bool = True, binary: str = "#!/bin/sh\nexit 1\n") -> Path:
    """An installation as far as files go. Running it would fail, or leave a mark."""
    name = "python" + ".".join(version.split(".")[:2])
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / name).write_text(binary)
    (prefix / "bin" / name).chmod(0o755)
    (prefix / "lib" / name / "lib-dynload").mkdir(parents=True)
    (prefix / "lib" / name / "os.py").touch()
    if header:
        (prefix / "include" / name).mkdir(parents=True)
        (prefix / "include" / name / "patchlevel.h").write_text(f'#define PY_VERSION  "{version}"\n')
    return prefix


@pytest.mark.parametrize("version", _INSTALLED)
def test_what_is_installed_says_what_it_is(version: str) -> None:
    found = _HERE.find(version)
    said = subprocess.run(
        [found.path, "-I", "-c", "import sys; print(sys.version.split()[0], sys.prefix)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split() == [version, found.prefix]
    assert found.key == f"python:{version}"
    if found.prefix.startswith("/usr"):
        assert found.layers == ()
    else:
        (layer,) = found.layers
        assert layer.source == layer.target == found.prefix
        assert layer.digest.startswith(f"host:{found.prefix}@")


def test_the_newest_patch_of_a_minor_version(tmp_path: Path) -> None:
    for version in ("3.99.9", "3.99.10", "3.98.11"):
        fake(tmp_path / "versions" / version, version)
    (tmp_path / "versions/alias").symlink_to(tmp_path / "versions/3.99.9")
    there = Interpreters({"PYENV_ROOT": str(tmp_path), "HOME": "/nonexistent"})
    assert there.find("3.99").version == "3.99.10"
    assert there.find("3.99.9").version == "3.99.9"
    assert there.find("3.98").path == str(tmp_path / "versions/3.98.11/bin/python3.98")


def test_other_places(tmp_path: Path) -> None:
    fake(tmp_path / ".local/share/uv/python/cpython-3.97.1-linux", "3.97.1")
    fake(tmp_path / "miniconda3", "3.96.1")
    fake(tmp_path / "miniconda3/envs/mine", "3.95.1")
    fake(tmp_path / "active", "3.94.1")
    there = Interpreters({"HOME": str(tmp_path), "CONDA_PREFIX": str(tmp_path / "active")})
    assert {each.version for each in there.list()} >= {"3.97.1", "3.96.1", "3.95.1", "3.94.1"}


def test_virtual_environments_are_no_installations(tmp_path: Path) -> None:
    environment = fake(tmp_path / "versions/venv", "3.99.1")
    (environment / "pyvenv.cfg").touch()
    with pytest.raises(NotFound):
        Interpreters({"PYENV_ROOT": str(tmp_path)}).find("3.99")


def test_nothing_is_run_that_says_its_version_in_a_file(tmp_path: Path) -> None:
    mark = f"#!/bin/sh\ntouch {tmp_path}/ran\necho 3.99.3\n"
    fake(tmp_path / "versions/3.99.1", "3.99.1", binary=mark)
    there = Interpreters({"PYENV_ROOT": str(tmp_path)})
    assert there.find("3.99").version == "3.99.1"
    assert not (tmp_path / "ran").exists()
    fake(tmp_path / "versions/other", "3.99.3", header=False, binary=mark)
    assert there.find("3.99").version == "3.99.3"
    (tmp_path / "ran").unlink()
    assert there.find("3.99").version == "3.99.3"
    assert not (tmp_path / "ran").exists()


def test_a_replaced_installation_is_another_layer(tmp_path: Path) -> None:
    prefix = fake(tmp_path / "versions/3.99.1", "3.99.1")
    there = Interpreters({"PYENV_ROOT": str(tmp_path)})
    first = there.find("3.99").layers[0].digest
    os.utime(prefix / "lib/python3.99/os.py", (1, 1))
    assert there.find("3.99").layers[0].digest != first


def test_what_is_not_there_is_told_with_what_is() -> None:
    with pytest.raises(NotFound, match=_INSTALLED[0].replace(".", r"\.")):
        find("3.77")
    with pytest.raises(InvalidRequest, match="python"):
        find("three")


def test_libraries_from_elsewhere_are_named(tmp_path: Path) -> None:
    foreign = tmp_path / "elsewhere"
    foreign.mkdir()
    prefix = fake(tmp_path / "versions/3.99.1", "3.99.1")
    (tmp_path / "a.c").write_text("int a(void) { return 1; }\n")
    (tmp_path / "main.c").write_text("int a(void); int main(void) { return a(); }\n")
    commands = [
        ["cc", "-shared", "-fPIC", "-o", f"{foreign}/liba.so", f"{tmp_path}/a.c"],
        ["cc", "-o", f"{prefix}/bin/python3.99", f"{tmp_path}/main.c", f"{foreign}/liba.so"],
    ]
    for command in commands:
        subprocess.run(command, check=True)
    with pytest.raises(Unsupported, match=r"elsewhere/liba\.so"):
        Interpreters({"PYENV_ROOT": str(tmp_path)}).find("3.99")
