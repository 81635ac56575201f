"""Libraries that do not resolve: against programs made here, and against the system's own loader."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from shoal.node.doctor import image

gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no compiler")


def build(folder: Path, name: str, *flags: str, code: str = "int main(void) { return 0; }") -> str:
    source = folder / f"{name}.c"
    source.write_text(code)
    subprocess.run(["gcc", "-o", str(folder / name), str(source), "-Wl,--no-as-needed", *flags], check=True)
    return str(folder / name)


def library(folder: Path, name: str, *flags: str) -> None:
    build(
        folder,
        f"lib{name}.so",
        "-shared",
        "-fPIC",
        f"-L{folder}",
        *flags,
        code=f"int {name}(void) {{ return 1; }}",
    )


def missing(path: str, **environ: str) -> list[str]:
    return image.loader(environ).unresolved(path)


@gcc
def test_missing_library(tmp_path: Path) -> None:
    library(tmp_path, "absent")
    program = build(tmp_path, "program", f"-L{tmp_path}", "-labsent")
    assert missing(program) == ["libabsent.so"]
    assert missing(program, LD_LIBRARY_PATH=str(tmp_path)) == []


@gcc
@pytest.mark.parametrize("tags", ["--enable-new-dtags", "--disable-new-dtags"])
def test_folders_named_by_the_program(tmp_path: Path, tags: str) -> None:
    (tmp_path / "lib").mkdir()
    library(tmp_path / "lib", "near")
    program = build(tmp_path, "program", f"-L{tmp_path}/lib", "-lnear", f"-Wl,{tags}", "-Wl,-rpath,$ORIGIN/lib")
    assert missing(program) == []
    (tmp_path / "lib" / "libnear.so").unlink()
    assert missing(program) == ["libnear.so"]


@gcc
@pytest.mark.parametrize(("tags", "found"), [("--disable-new-dtags", True), ("--enable-new-dtags", False)])
def test_rpath_is_inherited_and_runpath_is_not(tmp_path: Path, tags: str, found: bool) -> None:
    library(tmp_path, "deep")
    library(tmp_path, "near", "-ldeep")
    options = (f"-L{tmp_path}", f"-Wl,-rpath-link,{tmp_path}", f"-Wl,{tags}", f"-Wl,-rpath,{tmp_path}")
    program = build(tmp_path, "program", *options, "-lnear")
    assert missing(program) == ([] if found else ["libdeep.so (for libnear.so)"])
    assert (subprocess.run([program], capture_output=True, check=False).returncode == 0) == found


@gcc
def test_a_library_of_another_machine_does_not_count(tmp_path: Path) -> None:
    library(tmp_path, "foreign")
    program = build(tmp_path, "program", f"-L{tmp_path}", "-lforeign")
    data = bytearray((tmp_path / "libforeign.so").read_bytes())
    data[18] ^= 0xFF
    (tmp_path / "libforeign.so").write_bytes(data)
    assert missing(program, LD_LIBRARY_PATH=str(tmp_path)) == ["libforeign.so"]


@pytest.mark.skipif(shutil.which("ldd") is None, reason="no ldd")
@pytest.mark.parametrize("name", ["sh", "git", "curl", "python3", "ssh", "gcc"])
def test_agrees_with_the_loader(name: str) -> None:
    path = shutil.which(name, path="/usr/bin:/bin")
    if path is None:
        pytest.skip(f"no {name}")
    told = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
    assert [line.split()[0] for line in told.splitlines() if "not found" in line] == missing(path)


def test_broken_files_are_no_programs(tmp_path: Path) -> None:
    whole, chance, path = Path("/bin/sh").read_bytes(), random.Random(7), tmp_path / "broken"
    search = image.loader({})
    for _ in range(400):
        data = bytearray(whole[: chance.choice([len(whole), chance.randrange(len(whole))])])
        for _ in range(chance.randrange(1, 40)):
            if data:
                data[chance.randrange(min(len(data), chance.choice([64, 1024, len(data)])))] = chance.randrange(256)
        path.write_bytes(data)
        search.unresolved(str(path))


def test_what_is_no_file_is_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.so")
    (tmp_path / "empty.so").touch()
    (tmp_path / "loop.so").symlink_to("loop.so")
    (tmp_path / "text.so").write_text("INPUT(libc.so.6)")
    libraries, _ = image.examine([str(tmp_path), str(tmp_path / "fifo.so")], {})
    assert libraries.status == "ok"


def test_a_path_that_is_not_there_is_named() -> None:
    libraries, _ = image.examine(["/no/such/program"], {})
    assert (libraries.status, libraries.fix != "") == ("warn", True)
    assert "/no/such/program: not there" in libraries.detail


def test_python_path() -> None:
    assert image.examine(["/bin/sh"], {})[1].status == "ok"
    finding = image.examine(["/bin/sh"], {"PYTHONPATH": "/usr/lib:/gone"})[1]
    assert finding.status == "warn"
    assert "not there: /gone" in finding.detail


def test_the_usual_programs_of_this_machine_resolve() -> None:
    assert image.examine((), dict(os.environ))[0].status == "ok"


def test_loader_configuration(tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "ld.so.conf").write_text("include conf.d/*.conf\n/opt/one # why\ninclude ld.so.conf\ninclude /\n")
    (tmp_path / "conf.d" / "a.conf").write_text("/opt/two\n")
    search = image.loader({"LD_LIBRARY_PATH": "/first:"}, str(tmp_path / "ld.so.conf"))
    assert search.first == ("/first",)
    assert search.last[:2] == ("/opt/two", "/opt/one")
