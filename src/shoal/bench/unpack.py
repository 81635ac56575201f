"""The same environment by others: files are made, one by one, each time it is wanted."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from uv import find_uv_bin

from shoal.bench.attach import REQUIREMENTS
from shoal.bench.figures import Sample
from shoal.bench.job import Job, Place, milliseconds
from shoal.bench.peers import spawn


@contextmanager
def uv_hardlink(place: Place) -> Iterator[Job]:
    """Everything is in uv's cache and on the same file system; nothing is compiled."""
    argv = install_arguments(place.folder / "site", place.folder / "cache")
    _download(argv)
    yield _repeated([*argv, "--offline"], place.folder / "site")


@contextmanager
def tar_unpack(place: Place) -> Iterator[Job]:
    """From a .tar.gz of the very tree that uv makes."""
    site, archive = place.folder / "site", place.folder / "site.tar.gz"
    _download(install_arguments(site, place.folder / "cache"))
    subprocess.run(["tar", "-czf", str(archive), "-C", str(place.folder), site.name], check=True)
    tar = shutil.which("tar") or "/bin/tar"
    yield _repeated([tar, "-xzf", str(archive), "-C", str(place.folder)], site)


def install_arguments(target: Path, cache: Path) -> list[str]:
    return [
        os.fsdecode(find_uv_bin()), "pip", "install", "--quiet", "--link-mode", "hardlink", "--cache-dir", str(cache),
        "--python", sys.executable, "--target", str(target), *REQUIREMENTS,
    ]  # fmt: skip


def _download(argv: list[str]) -> None:
    subprocess.run(argv, check=True)


def _repeated(argv: list[str], made: Path) -> Job:
    """Removing what it made is not timed."""

    def once() -> Sample:
        shutil.rmtree(made, ignore_errors=True)
        return milliseconds(lambda: spawn(argv))

    return Job(shlex.join(argv), once)
