"""Builds `init/` into the package: the hatchling hook, and `python build_init.py` for development."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
SOURCES = (
    "init.c",
    "spawner.c",
    "setup.c",
    "mounts.c",
    "namespaces.c",
    "sandbox.c",
    "access.c",
    "stream.c",
    "session.c",
    "spawn.c",
    "files.c",
    "audit.c",
    "tar.c",
    "pack.c",
    "unpack.c",
    "watch.c",
    "frame.c",
    "util.c",
)
TARGET = ROOT / "src" / "shoal" / "_bin" / "init"
FLAGS = (
    "-std=gnu11", "-Os", "-s", "-static", "-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers",
    "-fstack-protector-strong", "-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections",
)  # fmt: skip


def compiler() -> list[str]:
    """musl where it is (50 kB resident, against 700 kB with glibc), else the system's compiler."""
    if override := os.environ.get("SHOAL_CC"):
        return override.split()
    triplet = sysconfig.get_config_var("MULTIARCH") or f"{platform.machine()}-linux-gnu"
    if musl := shutil.which("musl-gcc"):
        # musl-gcc hides the kernel's headers; they must come last so that musl's own win.
        return [musl, "-idirafter", "/usr/include", "-idirafter", f"/usr/include/{triplet}"]
    if cc := shutil.which("cc") or shutil.which("gcc"):
        return [cc]
    raise SystemExit("no C compiler: install musl-tools (Debian) or gcc, or set SHOAL_CC")


def build(target: Path = TARGET) -> None:
    """Compiles aside and renames, so that a running program never sees half a file."""
    sources = [ROOT / "init" / name for name in SOURCES]
    inputs = [*sources, *sorted((ROOT / "init").glob("*.h")), Path(__file__)]
    if target.exists() and all(path.stat().st_mtime <= target.stat().st_mtime for path in inputs):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".init.{os.getpid()}")
    subprocess.run([*compiler(), *FLAGS, "-o", str(aside), *map(str, sources)], check=True)
    aside.chmod(0o755)
    aside.rename(target)


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
else:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class InitHook(BuildHookInterface):  # type: ignore[misc]
        """Makes the wheel carry the compiled helper and the platform tag that goes with it."""

        def initialize(self, _version: str, build_data: dict[str, Any]) -> None:
            build()
            machine = platform.machine()
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-manylinux_2_17_{machine}.musllinux_1_1_{machine}"
