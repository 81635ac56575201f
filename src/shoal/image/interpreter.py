"""The Python interpreters of this machine, and the layers that bring one into a sandbox at its own path.

Looked for: /usr and /usr/local, pyenv, uv, conda, and what the current environment is based on. What an
installation is stands in its files; a binary is run only where those don't tell its version.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from shoal.errors import InvalidRequest, NotFound, Unsupported
from shoal.types import Layer

_WANTED = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")
_BINARY = re.compile(r"python(\d+\.\d+)")
_CONDA_HOMES = ("miniconda3", "anaconda3", "miniforge3", "mambaforge")
# The extension modules that link against libraries which are most often kept elsewhere.
_LINKED = ("_bz2", "_ctypes", "_lzma", "_sqlite3", "_ssl", "zlib")
_SYSTEM = ("/usr/", "/lib", "/bin/")


class Interpreter(Struct, frozen=True):
    """One that is installed here."""

    version: str
    """Exact, as "3.11.7"."""
    path: str
    """The binary, on this machine and inside alike."""
    prefix: str
    layers: tuple[Layer, ...]
    """What a sandbox needs to have it: none if it is part of /usr."""

    @property
    def key(self) -> str:
        """How `Sandbox.create(layers=...)` calls it."""
        return f"python:{self.version}"

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(int(number) for number in self.version.split("."))


class Interpreters:
    """What is installed, looked at anew each time; what cost a process is kept while its file is the same."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """`environ`: where HOME, PYENV_ROOT, UV_PYTHON_INSTALL_DIR, XDG_DATA_HOME and CONDA_PREFIX point."""
        self._environ = environ
        self._versions: dict[tuple[str, int], str | None] = {}
        self._linked: set[tuple[str, int]] = set()

    def list(self) -> tuple[Interpreter, ...]:
        """All, the oldest version first; of two with the same version the one found first."""
        found: dict[str, Interpreter] = {}
        for binary in self._binaries():
            version = self._version(binary)
            if version is not None and version not in found:
                found[version] = _describe(binary, version)
        return tuple(sorted(found.values(), key=lambda each: each.numbers))

    def find(self, version: str) -> Interpreter:
        """The one for "3.11" (its newest patch) or "3.11.7" (that exactly).

        NotFound tells what there is, Unsupported which libraries it needs that no sandbox has.
        """
        wanted = _WANTED.fullmatch(version)
        if wanted is None:
            raise InvalidRequest("python", f"a version is '3.11' or '3.11.7', not {version!r}")
        numbers = tuple(int(number) for number in wanted.groups() if number is not None)
        there = self.list()
        fitting = [each for each in there if each.numbers[: len(numbers)] == numbers]
        if not fitting:
            known = ", ".join(each.version for each in there) or "none"
            raise NotFound(f"no Python {version} on this machine; found: {known}. Install one with pyenv or uv")
        self._check_linked(fitting[-1])
        return fitting[-1]

    def _binaries(self) -> Iterator[Path]:
        for prefix in self._prefixes():
            folder = prefix / "bin"
            with contextlib.suppress(OSError):
                names = sorted(name for name in os.listdir(folder) if _BINARY.fullmatch(name))
                yield from (folder / name for name in names if _is_installation(prefix, name))

    def _prefixes(self) -> Iterable[Path]:
        home = Path(self._environ.get("HOME", "/nonexistent"))
        pyenv = Path(self._environ.get("PYENV_ROOT") or home / ".pyenv")
        data = Path(self._environ.get("XDG_DATA_HOME") or home / ".local/share")
        uv = Path(self._environ.get("UV_PYTHON_INSTALL_DIR") or data / "uv/python")
        condas = [home / name for name in _CONDA_HOMES]
        if conda := self._environ.get("CONDA_PREFIX"):
            condas.insert(0, Path(conda))
        yield from (Path("/usr"), Path("/usr/local"), Path(sys.base_prefix))
        for folder in (pyenv / "versions", uv, *(each / "envs" for each in condas)):
            yield from _folders(folder)
        yield from condas

    def _version(self, binary: Path) -> str | None:
        """Exact version, or None if it can't be found out."""
        key = (str(binary), binary.stat().st_mtime_ns)
        if key not in self._versions:
            self._versions[key] = _read_version(binary) or _ask_version(binary)
        return self._versions[key]

    def _check_linked(self, found: Interpreter) -> None:
        """Unsupported if it needs a library that lies neither in /usr nor in its own prefix."""
        key = (found.path, Path(found.path).stat().st_mtime_ns)
        if not found.layers or key in self._linked:
            return
        foreign = sorted(_foreign_libraries(found))
        if foreign:
            way = "install it with `uv python install`, or keep its libraries in its prefix"
            raise Unsupported(f"{found.path} needs {', '.join(foreign)}, which no sandbox has: {way}")
        self._linked.add(key)


def find(version: str) -> Interpreter:
    """`Interpreters.find` for this process's environment, without keeping anything."""
    return Interpreters(os.environ).find(version)


def _folders(folder: Path) -> Iterator[Path]:
    """The real folders in it: pyenv and uv add links for aliases, and environments made of them."""
    with contextlib.suppress(OSError):
        yield from sorted(each for each in folder.iterdir() if each.is_dir() and not each.is_symlink())


def _is_installation(prefix: Path, name: str) -> bool:
    """Whether bin/`name` is an interpreter of its own, with its library; a virtual environment is not."""
    library = prefix / "lib" / name / "os.py"
    return (prefix / "bin" / name).is_file() and library.is_file() and not (prefix / "pyvenv.cfg").exists()


def _read_version(binary: Path) -> str | None:
    """From the header that most installations carry."""
    prefix, name = binary.parent.parent, binary.name
    for folder in (name, f"{name}m"):  # 3.7 and older have an "m"
        with contextlib.suppress(OSError):
            text = (prefix / "include" / folder / "patchlevel.h").read_text()
            if match := re.search(r'#define\s+PY_VERSION\s+"(\d+\.\d+\.\d+)', text):
                return match[1]
    return None


def _ask_version(binary: Path) -> str | None:
    command = [str(binary), "-I", "-S", "-c", "import platform; print(platform.python_version())"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, env={}, cwd="/")
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.match(r"\d+\.\d+\.\d+", done.stdout)
    return match[0] if match else None


def _describe(binary: Path, version: str) -> Interpreter:
    prefix = binary.parent.parent
    layers: tuple[Layer, ...] = ()
    if not prefix.is_relative_to("/usr"):
        digest = f"host:{prefix}@{_fingerprint(binary, version)}"
        layers = (Layer(digest=digest, source=str(prefix), target=str(prefix), path=(f"{prefix}/bin",)),)
    return Interpreter(version=version, path=str(binary), prefix=str(prefix), layers=layers)


def _fingerprint(binary: Path, version: str) -> str:
    """Changes when the installation is replaced or packages are put into it."""
    library = binary.parent.parent / "lib" / binary.name
    facts = [version]
    for path in (binary, library, library / "os.py", library / "lib-dynload", library / "site-packages"):
        with contextlib.suppress(OSError):
            found = path.stat()
            facts.append(f"{path} {found.st_mtime_ns} {found.st_size} {found.st_ino}")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _foreign_libraries(found: Interpreter) -> set[str]:
    """Libraries that the loader finds elsewhere, or nowhere. `ldd` runs the loader, not the program."""
    modules = Path(found.prefix, "lib", Path(found.path).name, "lib-dynload")
    files = [str(file) for name in _LINKED for file in modules.glob(f"{name}.*.so")]
    command = ["ldd", found.path, *files]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env={})
    except (OSError, subprocess.SubprocessError):
        return set()  # no ldd (musl): the build in the sandbox will tell
    needed = re.findall(r"^\s+(?:(\S+) => )?(not found|/\S+)", done.stdout, re.MULTILINE)
    inside = (*_SYSTEM, f"{found.prefix}/")
    return {name if path == "not found" else path for name, path in needed if not path.startswith(inside)}
