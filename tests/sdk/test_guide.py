"""The examples of the guide run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guide"


@pytest.mark.parametrize("page", ["files.md"])
def test_the_examples_of_a_page(page: str, shoal_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a page in one go, each from where the last one left off."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a").write_text("a")
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", (GUIDE / page).read_text(), re.DOTALL))
    assert code.count("box.") > 5
    exec(compile(code.replace("/tmp/docs-again", str(tmp_path / "again")), page, "exec"), {})
    assert (tmp_path / "again" / "a").read_text() == "a"
