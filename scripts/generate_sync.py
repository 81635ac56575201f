"""Writes src/shoal/sdk/sync*.py from sandbox.py, commands.py and shells.py.

The blocking SDK is the async one with its awaits taken out.

`--check` fails if a file is not what would be written.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SDK = Path(__file__).resolve().parent.parent / "src" / "shoal" / "sdk"
FILES = {"sandbox.py": "sync.py", "commands.py": "sync_commands.py", "shells.py": "sync_shells.py"}
RULES = (
    (
        r'^""".*?"""',
        '"""The blocking SDK. Generated from {source} by scripts/generate_sync.py; do not edit."""',
    ),
    (r"\bfrom shoal\.sdk\.(commands|shells) import", r"from shoal.sdk.sync_\1 import"),
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
    (r"\bAsync(Sandbox|Commands|Command|Content|Files|Shell|Ptys|Pty|Watch)\b", r"\1"),
)


def generate(source: str, target: str) -> str:
    text = (SDK / source).read_text()
    for pattern, replacement in RULES:
        flags = re.DOTALL if pattern.startswith("^") else 0
        text = re.sub(pattern, replacement.replace("{source}", source), text, flags=flags)
    for command in (["check", "--select", "I", "--fix", "-q"], ["format", "-q"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(SDK / target), "-"]
        text = subprocess.run(ruff, input=text, text=True, check=True, capture_output=True).stdout
    return text


def main() -> int:
    stale = []
    for source, target in FILES.items():
        text = generate(source, target)
        if "--check" not in sys.argv:
            (SDK / target).write_text(text)
        elif not (SDK / target).exists() or (SDK / target).read_text() != text:
            stale.append(target)
    if stale:
        print(f"src/shoal/sdk/: {', '.join(stale)} not as generated: run `make sync`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
