"""What the guest sees of this machine: its /usr, /etc, the Python and the project, each a read-only EROFS image."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parents[2]
LARGE = 8 << 20
"""No program that the tests run is larger than this."""
NEEDLESS = (
    r"^(share/(doc|man|locale|icons|fonts|info)|include|src|games|lib/(jvm|google-cloud-sdk|gcc)"
    r"|local/(cuda[^/]*|share)|lib/python3\.[0-9]+/test)(/|$)"
)
SECRETS = r"^(shadow|gshadow|ssh|ssl/private|kubernetes)"
NOT_PYTHON = r"^(lib/python3\.[0-9]+/(test|site-packages|config-[^/]*)|share|include)(/|$)"
NOT_PROJECT = r"^(\.git|\.venv|\.cgroup2|\.mypy_cache|\.ruff_cache|fuzz/build)(/|$)"


class Image(NamedTuple):
    """A file system for the guest, and where it is mounted there."""

    file: Path
    place: str


def make(cache: Path) -> list[Image]:
    """All of them. Those of the system and of Python are made anew only when packages have changed."""
    python, base = Path(sys.prefix), Path(sys.base_prefix)
    images = [
        _kept(cache, Path("/usr"), NEEDLESS, Path("/var/lib/dpkg/status")),
        _fresh(cache, Path("/etc"), SECRETS),
        _kept(cache, python, "^$", next(python.glob("lib/python3*/site-packages"))),
        _fresh(cache, PROJECT, NOT_PROJECT),
    ]
    if not base.is_relative_to("/usr"):
        images.insert(2, _kept(cache, base, NOT_PYTHON, base / "bin"))
    return sorted(images, key=lambda image: image.place)  # one below another is mounted after it


def _kept(cache: Path, source: Path, without: str, witness: Path) -> Image:
    """`witness`: its time changes with the content."""
    state = f"{source} {without} {witness.stat().st_mtime_ns} {LARGE}"
    file = cache / f"{source.name}-{hashlib.sha256(state.encode()).hexdigest()[:16]}.erofs"
    if not file.exists():
        for old in cache.glob(f"{source.name}-*.erofs"):
            old.unlink()
        _pack(source, file, without)
    return Image(file, str(source))


def _fresh(cache: Path, source: Path, without: str) -> Image:
    file = cache / f"{source.name}.erofs"
    _pack(source, file, without)
    return Image(file, str(source))


def _pack(source: Path, file: Path, without: str) -> None:
    large = (f"--exclude-path={path.relative_to(source)}" for path in _large(source))
    part = file.with_suffix(".part")
    part.unlink(missing_ok=True)
    command = ["mkfs.erofs", "-d0", f"--exclude-regex={without}", *large, str(part), str(source)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    part.rename(file)


def _large(source: Path) -> Iterable[Path]:
    for folder, _, names in os.walk(source):
        for name in names:
            path = Path(folder, name)
            if not path.is_symlink() and path.stat().st_size > LARGE and ".so" not in name:
                yield path


def scratch(file: Path) -> None:
    """A disk for the guest to write on: Shoal's data folder must be on a real file system."""
    file.unlink(missing_ok=True)
    with file.open("wb") as disk:
        disk.truncate(4 << 30)
    subprocess.run(["mkfs.ext4", "-qF", str(file)], check=True)


def initramfs(file: Path, modules: Iterable[tuple[str, bytes]], images: Iterable[Image], command: str) -> None:
    """Modules, mounts and the command in files that `start.sh` reads."""
    root = file.with_suffix(".root")
    shutil.rmtree(root, ignore_errors=True)
    for name in ("bin", "modules", "proc", "sys", "dev", "new"):
        (root / name).mkdir(parents=True)
    order = []
    for number, (name, content) in enumerate(modules):
        (root / "modules" / name).write_bytes(content)
        order.append(f"{number} {name}\n")
    (root / "modules.txt").write_text("".join(order))
    (root / "mounts.txt").write_text("".join(f"{image.place}\n" for image in images))
    (root / "links.txt").write_text("".join(_links()))
    (root / "command").write_text(command)
    for script, name in (("start.sh", "init"), ("guest.sh", "guest")):
        shutil.copyfile(Path(__file__).with_name(script), root / name)
        (root / name).chmod(0o755)
    shutil.copy(shutil.which("busybox") or "busybox", root / "bin" / "busybox")
    names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
    with file.open("wb") as packed:
        subprocess.run(["cpio", "-oH", "newc", "--quiet"], cwd=root, input=names.encode(), stdout=packed, check=True)
    shutil.rmtree(root)


def _links() -> Iterable[str]:
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            yield f"{name} {path.readlink()}\n"
