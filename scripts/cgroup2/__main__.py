"""`make test-cgroup2`: boots a guest with pure cgroup v2 and runs the tests of limits, kill and leftovers in it."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import images
import kernel
import machine
import verdict

DEADLINE = 900.0
TESTS = (
    "tests/sandbox/test_cgroup.py",
    "tests/sandbox/test_cgroup_unified.py",
    "tests/sandbox/test_delegation.py",
    "tests/sandbox/test_leftovers.py",
    "tests/sandbox/test_spawner.py",
    "tests/security/test_limits.py",
    "tests/conformance/test_execution.py",
)
ELSEWHERE = "not (t01 or t02 or t03 or t07 or t08 or t19 or b007)"
"""Left out: what no cgroup has a part in, and takes half a minute each without hardware acceleration."""
NEEDED = ("tests.sandbox.test_cgroup_unified.test_every_limit_is_on_the_unified_tree",)
"""Without it nobody knows that version 2 was what limited the sandboxes."""
LEAST = 90


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    options.cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    start = time.monotonic()
    report = _run(options)
    found = verdict.judge(report, 0 if options.command else options.least, () if options.command else NEEDED)
    print(report if options.command or not found.passed else "", end="")
    for name, why in found.failed.items():
        print(f"\nFAILED {name}\n{why}")
    for name, why in found.skipped.items():
        print(f"skipped {name}: {why.splitlines()[0]}")
    print(f"{len(found.passed)} passed in {time.monotonic() - start:.0f} s")
    for problem in found.problems:
        print(problem, file=sys.stderr)
    return 1 if found.problems else 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make test-cgroup2", description=__doc__)
    parser.add_argument("tests", nargs="*", default=TESTS)
    parser.add_argument("--suite", default="trixie-backports", help="Debian suite whose cloud kernel the guest runs")
    parser.add_argument("--cache", type=Path, default=images.PROJECT / ".cgroup2")
    parser.add_argument("--deadline", type=float, default=DEADLINE, metavar="SECONDS")
    parser.add_argument("--least", type=int, default=LEAST, help="tests that must have passed")
    parser.add_argument("--command", help="run this in place of the tests, and show what it says")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> str:
    found = kernel.fetch(options.suite, options.cache)
    packed = images.make(options.cache)
    disk, ram = options.cache / "scratch.img", options.cache / "initramfs.cpio"
    images.scratch(disk)
    images.initramfs(ram, kernel.modules(found), packed, _command(options))
    try:
        disks = [disk, *(image.file for image in packed)]
        return machine.run(found.image, ram, disks, options.cache, options.deadline)
    finally:
        disk.unlink()


def _command(options: argparse.Namespace) -> str:
    """In shell, in the guest. The report is read from the second serial line."""
    tests = " ".join(map(shlex.quote, options.tests))
    pytest = f"python -m pytest -m 'not slow' -k '{ELSEWHERE}' --junit-xml=/tmp/junit.xml {tests}"
    what = f"{{ {options.command or pytest}; }} >/dev/tty{'S1' if options.command else 'S0'} 2>&1; s=$?"
    what += "" if options.command else "; cat /tmp/junit.xml >/dev/ttyS1"
    path = f"{Path(sys.prefix) / 'bin'}:$PATH"
    source = images.PROJECT / "src"
    setting = f"cd {images.PROJECT}; export PYTHONPATH={source} PYTHONDONTWRITEBYTECODE=1 PATH={path}"
    return f'{setting}\n{what}\necho "\nexit $s" >/dev/ttyS1\n'


if __name__ == "__main__":
    if shutil.which("qemu-system-x86_64") is None:
        sys.exit("qemu-system-x86_64 is not here; `make test-cgroup2` as root installs it")
    sys.exit(main(sys.argv[1:]))
