"""What a sandbox changed, against the overlay of a real one on a layer of our own."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from shoal.errors import LimitExceeded
from shoal.node.changes import Trees, find_changes
from shoal.sdk.environments import publish_layer

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory, shoal_home: Path) -> tuple[shoal.Layer, shoal.Layer]:
    """Two trees at /base, the first on top: d/{a,b,sub/deep}, f, link -> f; and d/low, low below."""

    def publish(*files: str) -> shoal.Layer:
        tree = tmp_path_factory.mktemp("tree")
        for name in files:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(name)
        (tree / "link").symlink_to("f")
        return asyncio.run(publish_layer(tree, "/base"))

    return publish("d/a", "d/b", "d/sub/deep", "f"), publish("d/low", "low")


@pytest.fixture
def based(layers: tuple[shoal.Layer, shoal.Layer]) -> Iterator[shoal.Sandbox]:
    with shoal.Sandbox.create(layers=layers) as box:
        yield box


CASES = {
    "nothing": (": ", {}),
    "added": ("echo x > new", {"new": "added"}),
    "added below a new directory": ("mkdir -p n/m; echo > n/m/f", {"n": "added", "n/m": "added", "n/m/f": "added"}),
    "changed": ("echo more >> f", {"f": "changed"}),
    "removed": ("rm f", {"f": "removed"}),
    "removed from the lower of two": ("rm low d/low", {"low": "removed", "d/low": "removed"}),
    "written again with the same": ("cp f g; cp g f; rm g", {"f": "changed"}),
    "only the mode": ("chmod 600 f", {"f": "changed"}),
    "only the owner": ("chown 1000 f", {"f": "changed"}),
    "only the time": ("touch -d 2001-01-01 f", {"f": "changed"}),
    "only the mode of a directory and what is in it": (
        "chmod 700 d/sub; echo > d/sub/deep",
        {"d/sub": "changed", "d/sub/deep": "changed"},
    ),
    "only the mode of a directory": ("chmod 700 d/sub", {"d/sub": "changed"}),
    "a file in place of a link": ("rm link; echo > link", {"link": "changed"}),
    "a link in place of a file": ("ln -sf /etc/passwd f", {"f": "changed"}),
    "a directory in place of a file": ("rm f; mkdir f; echo > f/in", {"f": "changed", "f/in": "added"}),
    "a file in place of a directory": (
        "rm -r d/sub; echo > d/sub",
        {"d/sub": "changed", "d/sub/deep": "removed"},
    ),
    "a directory that is gone": ("rm -r d/sub", {"d/sub": "removed"}),
    "a directory made anew": (
        "rm -r d; mkdir d; echo > d/a; echo > d/new",
        {"d/a": "changed", "d/b": "removed", "d/sub": "removed", "d/low": "removed", "d/new": "added"},
    ),
    "a directory of the same name": ("rm -r d/sub; mkdir d/sub", {"d/sub/deep": "removed"}),
    "there and gone again": ("echo > t; rm t; mkdir u; rmdir u", {}),
    "removed and back": ("rm f; echo > f", {"f": "changed"}),
    "a fifo and a socket": (
        "mkfifo p; python3 -c \"import socket; socket.socket(1).bind('s')\"",
        {"p": "added", "s": "added"},
    ),
    "a hard link": ("ln f g", {"f": "changed", "g": "added"}),
}


@pytest.mark.parametrize("name", CASES)
def test_kinds(based: shoal.Sandbox, name: str) -> None:
    script, expected = CASES[name]
    based.commands.run(f"cd /base; {script}", check=True)
    found = {c.path.removeprefix("/base/"): c.kind for c in based.changes() if c.path.startswith("/base/")}
    if name == "a hard link":  # a copy-up that only adds a link may or may not count as a change of the old name
        found.setdefault("f", "changed")
    assert found == expected


def test_a_fresh_sandbox_has_changed_nothing(based: shoal.Sandbox) -> None:
    assert based.changes() == []


def test_sizes_and_order(based: shoal.Sandbox) -> None:
    based.commands.run("cd /base; printf 12345 > z; mkdir y; ln -s 123 x; rm f")
    changes = [change for change in based.changes() if change.path.startswith("/base/")]
    assert [(change.path[6:], change.size) for change in changes] == [("f", 0), ("x", 3), ("y", 0), ("z", 5)]


def test_scratch_of_the_kernel_is_no_change(based: shoal.Sandbox) -> None:
    based.commands.run("echo > /dev/shm/a; echo > /dev/null; touch /proc/self/comm")
    assert based.changes() == []


def test_names_of_any_bytes(based: shoal.Sandbox) -> None:
    script = (
        "import os; [os.close(os.open(b'/base/' + n, os.O_CREAT)) for n in (b'\\xff', b'a\\nb', b'-rf', b'x' * 255)]"
    )
    based.commands.run(["python3", "-c", script], check=True)
    found = {os.fsencode(change.path.removeprefix("/base/")) for change in based.changes()}
    assert found == {b"\xff", b"a\nb", b"-rf", b"x" * 255}


def test_links_lead_nowhere(based: shoal.Sandbox) -> None:
    """Neither out of the upper directory nor to something that is not there."""
    based.commands.run(
        "cd /base; ln -s / out; ln -s /etc deep; mkdir real; ln -s ../../../../../../etc real/up; ln -s loop loop"
    )
    found = {change.path for change in based.changes()}
    assert found == {f"/base/{name}" for name in ("out", "deep", "real", "real/up", "loop")}


def test_forged_marks_of_overlay_hide_nothing_of_others(based: shoal.Sandbox) -> None:
    """The sandbox may set `user.` attributes of its own; what overlay makes of them is what it sees itself."""
    script = """
import os
os.mkdir('/base/mine')
for name in ('opaque', 'whiteout', 'redirect', 'metacopy', 'origin'):
    for path in ('/base/mine', '/base/f', '/base/d'):
        try:
            os.setxattr(path, 'user.overlay.' + name, b'y')
        except OSError:
            pass
"""
    based.commands.run(["python3", "-c", script])
    seen = set(based.commands.run("cd /base; find . -mindepth 1").stdout.split())
    assert {"./d/a", "./d/sub/deep", "./f", "./mine"} <= seen
    assert "removed" not in {change.kind for change in based.changes()}


def test_a_swap_under_the_walk_is_survived(based: shoal.Sandbox) -> None:
    loop = "cd /base; while :; do mkdir s; mkdir s/t; rm -rf s; ln -s /etc s; rm s; echo > s; rm s; done"
    running = based.commands.run(loop, background=True)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        for change in based.changes():
            assert change.path.startswith(("/base/s", "/workspace")), change
    running.kill()


def test_five_thousand_files(based: shoal.Sandbox) -> None:
    script = (
        "import os\nfor i in range(50):\n os.mkdir(f'/base/n{i}')\n for j in range(100): open(f'/base/n{i}/{j}', 'w')"
    )
    based.commands.run(["python3", "-c", script], check=True)
    start = time.monotonic()
    changes = based.changes()
    assert len(changes) == 5050
    assert time.monotonic() - start < 5


def test_a_tree_deeper_than_we_walk_is_said(based: shoal.Sandbox) -> None:
    script = "import os\nos.chdir('/base')\nfor i in range(700):\n os.mkdir('d%d' % i); os.chdir('d%d' % i)"
    based.commands.run(["python3", "-c", script], check=True)
    with pytest.raises(LimitExceeded, match="levels of directories"):
        based.changes()
    assert based.commands.run("true").ok


def test_many_names_in_one_directory(based: shoal.Sandbox) -> None:
    based.commands.run("cd /base; seq 20000 | xargs touch", check=True)
    assert len(based.changes()) == 20_000


def test_an_upper_that_is_not_there_is_no_change(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        assert find_changes(Trees(descriptor, ["/", "/opt"], [[], []])) == {}
    finally:
        os.close(descriptor)
