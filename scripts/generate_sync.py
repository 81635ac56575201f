"""Writes src/shoal/sdk/sync.py from sandbox.py: the blocking SDK is the async one with its awaits taken out.

`--check` fails if the file is not what would be written.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SDK = Path(__file__).resolve().parent.parent / "src" / "shoal" / "sdk"
RULES = (
    (
        r'^""".*?"""',
        '"""The blocking SDK. Generated from sandbox.py by scripts/generate_sync.py; do not edit."""',
    ),
    (r"\basync def __aiter__", "def __iter__"),
    (r"\basync def ", "def "),
    (r"\basync for ", "for "),
    (r"\basync with\b", "with"),
    (r"\bawait acall\(", "call("),
    (r"\bawait ", ""),
    (r"\bacall\b", "call"),
    (r"\b__aenter__\b", "__enter__"),
    (r"\b__aexit__\b", "__exit__"),
    (r"\bapieces_of\b", "pieces_of"),
    (r"\bAsyncIterator\b", "Iterator"),
    (r"\bAsync(Sandbox|Commands|Command|Files|Content|Watch)\b", r"\1"),
)


def generate() -> str:
    text = (SDK / "sandbox.py").read_text()
    for pattern, replacement in RULES:
        text = re.sub(pattern, replacement, text, flags=re.DOTALL if pattern.startswith("^") else 0)
    for command in (["check", "--select", "I", "--fix", "-q"], ["format", "-q"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(SDK / "sync.py"), "-"]
        text = subprocess.run(ruff, input=text, text=True, check=True, capture_output=True).stdout
    return text


def main() -> int:
    target = SDK / "sync.py"
    text = generate()
    if "--check" not in sys.argv:
        target.write_text(text)
    elif target.read_text() != text:
        print("src/shoal/sdk/sync.py is not what sandbox.py gives: run `make sync`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
