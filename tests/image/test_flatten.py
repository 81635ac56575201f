"""Merged layers show what the kernel's overlay shows of them, alone and over others."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.image import tree
from shoal.image.flatten import flatten, merge
from shoal.image.manifest import Meta
from shoal.image.store import Store

from . import trees

NAMES = [b"a", b"b", b"c"]
STACKS = 60

# Mounts each list of folders as an overlay and tells what it shows.
SHOW = """
import ctypes, json, os, sys
sys.path.insert(0, sys.argv[1])
from trees import listing
libc = ctypes.CDLL(None, use_errno=True)
os.unshare(0x20000) if hasattr(os, "unshare") else libc.unshare(0x20000)
libc.mount(None, b"/", None, 0x4000 | 0x40000, None)
shown = []
for lowers in json.load(sys.stdin):
    options = "userxattr,lowerdir=" + ":".join(lowers)
    if libc.mount(b"overlay", sys.argv[2].encode(), b"overlay", 1, options.encode()):
        raise OSError(ctypes.get_errno(), options)
    root = os.open(sys.argv[2], os.O_RDONLY)
    shown.append({path: [mode, repr(content)] for path, (mode, content) in listing(root).items()})
    os.close(root)
    libc.umount2(sys.argv[2].encode(), 2)
json.dump(shown, sys.stdout)
"""


def make(folder: Path, dice: random.Random, depth: int = 0) -> None:
    """A layer with files, links, folders (some opaque) and whiteouts under few names, so that they meet."""
    folder.mkdir(mode=dice.choice([0o755, 0o700]))
    for name in NAMES:
        path = folder / os.fsdecode(name)
        kind = dice.choice(["", "", "file", "link", "whiteout", "folder", "folder", "opaque"])
        if kind == "file":
            path.write_bytes(dice.randbytes(3))
        elif kind == "link":
            path.symlink_to(dice.choice(["a", "/etc/passwd"]))
        elif kind == "whiteout":
            os.mknod(path, 0o20000, 0)
        elif kind and depth < 3:
            make(path, dice, depth + 1)
            if kind == "opaque":
                os.setxattr(path, "user.overlay.opaque", b"y")


def show(stacks: list[list[Path]], folder: Path) -> list[dict[str, list[object]]]:
    """What the kernel shows of each stack, highest first."""
    place = folder / "shown"
    place.mkdir(exist_ok=True)
    (folder / "nothing").mkdir(exist_ok=True)
    lists = json.dumps([[*map(str, stack), str(folder / "nothing")] for stack in stacks])
    command = [sys.executable, "-c", SHOW, str(Path(trees.__file__).parent), str(place)]
    done = subprocess.run(command, input=lists, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def merged(layers: list[Path], target: Path, *, bottom: bool) -> Path:
    roots = [tree.open_directory(layer) for layer in layers]
    merge(roots, target, bottom=bottom)
    for root in roots:
        os.close(root)
    return target


@pytest.mark.root
@pytest.mark.parametrize("bottom", [True, False])
def test_it_shows_what_the_kernel_shows(tmp_path: Path, bottom: bool) -> None:
    dice = random.Random(7)
    originals, flat = [], []
    for number in range(STACKS):
        layers = []
        for height in range(dice.randint(2, 4)):
            layers.append(tmp_path / f"{number}-{height}")
            make(layers[-1], dice)
        base = [] if bottom else [layers.pop()]
        if not layers:
            continue
        originals.append([*layers, *base])
        flat.append([merged(layers, tmp_path / f"{number}-flat", bottom=bottom), *base])
    assert show(flat, tmp_path) == show(originals, tmp_path)
    if bottom:
        plain = [merged([stack[0]], tmp_path / f"again{index}", bottom=True) for index, stack in enumerate(flat)]
        assert not any(path.is_char_device() for stack in plain for path in stack.rglob("*"))


def test_layers_of_a_store(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    layers = []
    for number in range(3):
        source = tmp_path / f"source{number}"
        (source / "shared").mkdir(parents=True)
        (source / "shared" / f"file{number}").write_text(str(number))
        (source / "shared" / "same").write_text(str(number))
        layers.append(store.publish(source, meta=Meta(target="/opt/x")))
    flat = flatten(store, layers, bottom=True)
    assert (flat.target, store.manifest(flat.digest).entries) == ("/opt/x", 5)
    again = flatten(store, layers, bottom=True)
    assert again == flat
