"""What is done inside a sandbox to install Python packages, step by step, with a log that is kept whole.

What runs the steps is given as a `Builder`: a fresh sandbox that reaches the package index and nothing else, since
packages' own build code runs in it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from shoal.errors import BuildFailed, InvalidRequest
from shoal.image.interpreter import Interpreter
from shoal.image.toolkit import UV
from shoal.types import Layer, Result

ENV = "/opt/env"
WORK = "/opt/shoal-build"
"""Beside the environment, so that uv's cache and the environment can share files by hard links."""

# A .pyc holds as long as it knows the time of its source. So every file gets one fixed time first and is
# compiled after that: the layer is the same whenever it is built, and a source that is edited counts at once.
_SETTLE = """
import compileall, contextlib, os, sys
with contextlib.suppress(OSError):
    os.unlink(os.path.join(sys.argv[1], ".lock"))  # uv's own, while it installs
for folder, folders, files in os.walk(sys.argv[1]):
    for name in files:
        os.utime(os.path.join(folder, name), (946684800, 946684800), follow_symlinks=False)
library = os.path.join(sys.argv[1], "lib")
try:
    compileall.compile_dir(library, maxlevels=100, quiet=2, workers=2)
except Exception:  # no semaphores here
    compileall.compile_dir(library, maxlevels=100, quiet=2)
for folder, folders, files in os.walk(sys.argv[1], topdown=False):
    for name in files:
        if name.endswith(".pyc"):
            os.utime(os.path.join(folder, name), (946684800, 946684800))
    os.utime(folder, (946684800, 946684800))
"""

_BLAMED = (
    r"[Ff]ailed to (?:build|download(?: and build)?|prepare|install|fetch|read)[: ]+`([^`]+)`",
    r"Because ([A-Za-z0-9._-]+(?:==[^\s,]+)?) (?:was not found|has no|is not)",
    r"there (?:is|are) no versions? of ([A-Za-z0-9._-]+(?:==[^\s,]+)?)",
    r"In `--require-hashes` mode[^:]*: `?([^`\n]+)`?",
    r"Hash mismatch for `([^`]+)`",
)


class EnvironmentSpec(Struct, frozen=True):
    """What an environment is made from."""

    requirements: tuple[str, ...]
    """Lines of a requirements file; `read` of this module makes them from one."""
    python: str = "3.11"
    """"3.11", or an exact "3.11.7"."""
    constraints: tuple[str, ...] = ()
    no_deps: bool = False
    """The requirements are everything: nothing they depend on is added."""
    no_build: bool = False
    """Only wheels: no build code of packages runs."""
    exclude_newer: str | None = None
    """A date, as 2024-05-01: what came to the index later isn't there."""

    @property
    def options(self) -> tuple[str, ...]:
        """Lines that are no requirements (`--no-binary numpy`)."""
        return tuple(line for line in self.requirements if line.startswith("--"))


class Index(Protocol):
    """Where packages come from, as this machine's settings say."""

    def uv_environment(self) -> dict[str, str]:
        """Variables that make uv use it."""

    def uv_arguments(self) -> tuple[str, ...]:
        """What uv takes only as an argument."""

    def local_paths(self) -> tuple[str, ...]:
        """Folders and files of this machine that a build must see at their own paths."""


class Builder(Protocol):
    """A fresh sandbox that reaches the package index only."""

    async def run(self, argv: list[str], *, env: dict[str, str], timeout: float) -> Result:
        """Run a command as root with this environment over the image's own."""

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, with missing parents."""

    def upper(self) -> int:
        """The open folder of its writable layer for "/", as the host sees it; the builder closes it."""


NewBuilder = Callable[[Sequence[Layer]], AbstractAsyncContextManager[Builder]]
"""Makes one, on the base image with these layers over it."""


def read_local(path: str) -> bytes:
    """A file of this machine that the index's settings name."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequest("index", f"{path} can't be read: {error.strerror}") from error


class Installation:
    """One environment being made in one sandbox."""

    def __init__(
        self, spec: EnvironmentSpec, interpreter: Interpreter, index: Index, builder: Builder, timeout: float
    ) -> None:
        """`timeout`: seconds for each step."""
        self._spec = spec
        self._interpreter = interpreter
        self._index = index
        self._builder = builder
        self._timeout = timeout
        self._log: list[str] = []
        self._env = {
            "HOME": f"{WORK}/home",
            "UV_CACHE_DIR": f"{WORK}/cache",
            "UV_LINK_MODE": "hardlink",
            "UV_NO_PROGRESS": "1",
            "UV_PYTHON_DOWNLOADS": "never",
            **index.uv_environment(),
        }

    async def prepare(self) -> None:
        """Brings in what the steps read, and makes the empty environment."""
        await self._builder.write(f"{WORK}/home/.keep", b"")
        await self._write_lines("requirements.txt", self._spec.requirements)
        await self._write_lines("constraints.txt", self._spec.constraints)
        for path in self._index.local_paths():
            if Path(path).is_file():
                await self._builder.write(path, await asyncio.to_thread(read_local, path))
        await self._step([UV, "venv", ENV, "--python", self._interpreter.path])

    async def resolve(self) -> tuple[str, ...]:
        """The exact packages that the requirements stand for, as lines of a requirements file."""
        output = f"{WORK}/resolved.txt"
        command = [UV, "pip", "compile", "--python", f"{ENV}/bin/python", "--no-header", "--no-annotate", "--quiet"]
        command += ["--output-file", output, f"{WORK}/requirements.txt", *self._options()]
        command += ["--generate-hashes"] if any("--hash" in line for line in self._spec.requirements) else []
        await self._step(command)
        result = await self._builder.run(["/bin/cat", output], env=self._env, timeout=self._timeout)
        return tuple(line.strip() for line in result.stdout.replace("\\\n", " ").splitlines() if line.strip())

    async def install(self, lines: Sequence[str] | None = None) -> None:
        """All requirements; or exactly these packages and nothing that they depend on."""
        name, options = "requirements.txt", self._options()
        if lines is not None:
            name = "chosen.txt"
            await self._write_lines(name, [*self._spec.options, *lines])
            options += [] if self._spec.no_deps else ["--no-deps"]
        command = [UV, "pip", "install", "--python", f"{ENV}/bin/python", "-r", f"{WORK}/{name}", *options]
        await self._step(command)

    async def settle(self) -> None:
        """One time for every file, and everything compiled."""
        await self._step([f"{ENV}/bin/python", "-I", "-c", _SETTLE, ENV])

    async def _write_lines(self, name: str, lines: Sequence[str]) -> None:
        await self._builder.write(f"{WORK}/{name}", "".join(f"{line}\n" for line in lines).encode())

    def _options(self) -> list[str]:
        spec = self._spec
        options = ["-c", f"{WORK}/constraints.txt", *self._index.uv_arguments()]
        options += ["--no-deps"] if spec.no_deps else []
        options += ["--no-build"] if spec.no_build else []
        options += ["--exclude-newer", spec.exclude_newer] if spec.exclude_newer else []
        return options

    async def _step(self, argv: list[str]) -> None:
        result = await self._builder.run(argv, env=self._env, timeout=self._timeout)
        self._log += [f"$ {' '.join(argv[:3])} ...", result.stdout, result.stderr]
        if result.ok:
            return
        log = "\n".join(part.rstrip() for part in self._log if part)
        raise BuildFailed(self._explain(result), log)

    def _explain(self, result: Result) -> str:
        """One line: which package, for which Python, and how it ended."""
        if result.limit == "timeout":
            how = f"took more than {self._timeout:g} s"
        elif result.limit is not None:
            how = f"was ended by the limit on {result.limit}"
        else:
            how = f"failed (exit code {result.exit_code})"
        package = blame(result.stderr + result.stdout)
        what = f"could not install {package}" if package else "could not be built"
        return f"environment for Python {self._interpreter.version} {what}: the build {how}"


def blame(log: str) -> str | None:
    """The package that uv's words are about, if they name one."""
    for pattern in _BLAMED:
        if match := re.search(pattern, log):
            return match[1]
    return None
