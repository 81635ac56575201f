"""The guest: QEMU without hardware acceleration, its console in a file, its report on a second serial line."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_MEMORY_MB: Final = 3072
_CONSOLE_TAIL: Final = 60


class Hung(Exception):
    """The guest was still running at its deadline, and was killed."""


def run(kernel: Path, initramfs: Path, disks: Sequence[Path], folder: Path, deadline: float) -> str:
    """Runs the guest to its end; what it wrote to the report's line. `deadline`: seconds until it is killed."""
    console, report = folder / "console.log", folder / "report.txt"
    command = [
        *("qemu-system-x86_64", "-machine", "q35", "-cpu", "max", "-smp", "2", "-m", str(_MEMORY_MB)),
        *("-nodefaults", "-no-reboot", "-display", "none", "-accel", "tcg,thread=multi"),
        *("-kernel", str(kernel), "-initrd", str(initramfs)),
        *("-append", "console=ttyS0 panic=-1 quiet mitigations=off cgroup_no_v1=all"),
        *("-serial", f"file:{console}", "-serial", f"file:{report}"),
    ]
    for number, disk in enumerate(disks):
        access = "off" if number == 0 else "on"
        command += ["-drive", f"file={disk},format=raw,if=none,id=d{number},readonly={access},cache=unsafe"]
        command += ["-device", f"virtio-blk-pci,drive=d{number}"]
    try:
        subprocess.run(command, check=True, timeout=deadline)
    except subprocess.TimeoutExpired:
        raise Hung(f"no end within {deadline:g} s; the console's last lines:\n{tail(console)}") from None
    return report.read_text(errors="replace")


def tail(console: Path) -> str:
    """The last lines that the guest wrote."""
    return "\n".join(console.read_text(errors="replace").splitlines()[-_CONSOLE_TAIL:])
