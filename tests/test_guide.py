"""The examples of the guide do what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shoal

GUIDE = Path(__file__).resolve().parents[1] / "docs" / "guide"


@pytest.mark.root
@pytest.mark.parametrize("page", ["commands.md"])
def test_the_examples_of_a_page_run_one_after_the_other(shoal_home: Path, page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (GUIDE / page).read_text(), re.DOTALL)
    assert len(blocks) > 3
    names: dict[str, object] = {}
    try:
        for number, block in enumerate(blocks, 1):
            exec(compile(block, f"{page}, example {number}", "exec"), names)
    finally:
        box = names.get("box")
        if isinstance(box, shoal.Sandbox):
            box.kill()
