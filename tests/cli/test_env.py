"""`shoal env`: build once, find again, list, use."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from shoal.cli.env import _table
from shoal.image.manifest import Manifest

from .command import complaint, shoal

DIGEST = "sha256:" + "0123456789abcdef" * 4


def manifest(digest: str = DIGEST, size: int = 3 << 20) -> Manifest:
    return Manifest(
        digest=digest, format="erofs", target="/", path=("/opt/env/bin",), env={}, needs=("python:3.11.7",),
        tree="sha256:" + "0" * 64, bytes=size, entries=3, inputs=None, created=0.0,
    )  # fmt: skip


def show(found: list[Manifest], width: int) -> list[str]:
    console = Console(width=width)
    with console.capture() as text:
        console.print(_table(found))
    return text.get().splitlines()


def test_a_key_is_whole_on_the_narrowest_terminal() -> None:
    assert all(any("0123456789ab" in line for line in show([manifest()], width)) for width in (20, 40, 80, 200))


def test_sizes_end_below_each_other() -> None:
    lines = show([manifest(size=1 << 20), manifest(size=1000 << 20)], 80)
    assert len({line.index("MiB") for line in lines[1:]}) == 1


def test_an_empty_store_has_nothing_to_show(tmp_path: Path) -> None:
    environment = {**os.environ, "SHOAL_HOME": str(tmp_path / "home")}
    assert json.loads(shoal("env", "ls", "--json", env=environment).stdout) == []
    outcome = shoal("env", "ls", env=environment)
    assert (outcome.returncode, outcome.stdout.split()) == (0, b"key python size made".split())


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "nowhere.txt"), ("-e .\n", "-e"), ("--index-url http://x\n", "--index-url")],
)
def test_a_file_that_cannot_be_honoured_is_misuse(tmp_path: Path, content: str | None, told: str) -> None:
    file = tmp_path / "nowhere.txt"
    if content is not None:
        file.write_text(content)
    outcome = shoal("env", "build", "-r", file)
    assert outcome.returncode == 2
    assert told in complaint(outcome)


def test_an_interpreter_that_is_not_here_is_misuse(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("six\n")
    outcome = shoal("env", "build", "-r", tmp_path / "r.txt", "--python", "3.97")
    assert outcome.returncode == 2
    assert "3.97" in complaint(outcome)


@pytest.mark.index
def test_build_twice_list_and_use(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("six==1.16.0\n")
    first = shoal("env", "build", "-r", file)
    assert (first.returncode, first.stderr) == (0, b"")
    key = first.stdout.decode().removesuffix("\n")
    assert re.fullmatch("sha256:[0-9a-f]{64}", key)

    begin = time.monotonic()
    again = shoal("env", "build", "-r", file, "--json")
    assert json.loads(again.stdout)["digest"] == key
    assert time.monotonic() - begin < 15

    listed = json.loads(shoal("env", "ls", "--json").stdout)
    assert key in [entry["digest"] for entry in listed]
    table = shoal("env", "ls").stdout.decode()
    short = key.removeprefix("sha256:")[:12]
    assert short in table

    used = shoal("run", "--layer", short, "--", "python", "-c", "import six; print(six.__version__)")
    assert (used.returncode, used.stdout, used.stderr) == (0, b"1.16.0\n", b"")


@pytest.mark.index
def test_a_failed_build_names_the_package_and_its_log(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("six==99.99\n")
    outcome = shoal("env", "build", "-r", file)
    assert outcome.returncode == 4
    line = complaint(outcome)
    assert "six" in line
    assert "six==99.99" in Path(line.rpartition(" ")[2]).read_text()
