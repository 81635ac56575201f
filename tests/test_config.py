from __future__ import annotations

from pathlib import Path

import pytest

from shoal import config


@pytest.mark.parametrize(
    ("environ", "uid", "data", "run"),
    [
        ({}, 0, "/var/lib/shoal", "/run/shoal"),
        ({"XDG_DATA_HOME": "/x", "XDG_RUNTIME_DIR": "/r"}, 0, "/var/lib/shoal", "/run/shoal"),
        ({"SHOAL_HOME": "/big/shoal"}, 0, "/big/shoal", "/run/shoal"),
        ({"SHOAL_HOME": "/big/shoal"}, 1000, "/big/shoal", "/big/shoal/run"),
        ({"HOME": "/home/a"}, 1000, "/home/a/.local/share/shoal", "/home/a/.local/share/shoal/run"),
        ({"HOME": "/home/a", "XDG_DATA_HOME": "/x"}, 1000, "/x/shoal", "/x/shoal/run"),
        (
            {"HOME": "/home/a", "XDG_RUNTIME_DIR": "/run/user/1000"},
            1000,
            "/home/a/.local/share/shoal",
            "/run/user/1000/shoal",
        ),
    ],
)
def test_folders(environ: dict[str, str], uid: int, data: str, run: str) -> None:
    assert config.data_dir(environ, uid) == Path(data)
    assert config.run_dir(environ, uid) == Path(run)


def test_relative_home_becomes_absolute() -> None:
    assert config.data_dir({"SHOAL_HOME": "here"}, 1000) == Path.cwd() / "here"


def test_nothing_is_made(tmp_path: Path) -> None:
    config.data_dir({"SHOAL_HOME": str(tmp_path / "a")}, 1000)
    config.run_dir({"SHOAL_HOME": str(tmp_path / "a")}, 1000)
    assert list(tmp_path.iterdir()) == []
