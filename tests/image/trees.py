"""Random trees of files for Hypothesis, and how to write and read them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hypothesis import strategies

_NAMES = strategies.binary(min_size=1, max_size=12).filter(
    lambda name: name not in (b".", b"..") and b"/" not in name and b"\0" not in name
)
_MODES = strategies.sampled_from([0o644, 0o600, 0o4755, 0o444])
_FILES = strategies.tuples(strategies.just("file"), strategies.binary(max_size=300), _MODES)
_LINKS = strategies.tuples(strategies.just("link"), _NAMES, strategies.just(0))
_WHITEOUTS = strategies.tuples(strategies.just("whiteout"), strategies.just(b""), strategies.just(0))
_LEAVES = _FILES | _LINKS | (_WHITEOUTS if os.geteuid() == 0 else _LINKS)

Tree = dict[bytes, "Tree | tuple[str, bytes, int]"]
TREES = strategies.dictionaries(
    _NAMES,
    strategies.recursive(_LEAVES, lambda below: strategies.dictionaries(_NAMES, below, max_size=4), max_leaves=12),
    max_size=5,
)


def write(tree: Tree, folder: Path) -> None:
    """Make it in `folder`, in the order of the dictionary."""
    folder.mkdir(0o755)
    for name, what in tree.items():
        path = folder / os.fsdecode(name)
        if isinstance(what, dict):
            write(what, path)
            continue
        kind, content, mode = what
        if kind == "link":
            path.symlink_to(os.fsdecode(content))
        elif kind == "whiteout":
            os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
        else:
            path.write_bytes(content)
            path.chmod(mode)


def listing(root: int, prefix: str = "") -> dict[str, tuple[int, object]]:
    """Path to mode and content of everything below an open folder."""
    found: dict[str, tuple[int, object]] = {}
    for name in os.listdir(root):
        try:
            info = os.stat(name, dir_fd=root, follow_symlinks=False)
        except FileNotFoundError:  # overlay lists a whiteout that has nothing to hide, and says that it isn't there
            continue
        path = f"{prefix}/{name}"
        content: object = info.st_rdev
        if stat.S_ISDIR(info.st_mode):
            below = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=root)
            found |= listing(below, path)
            os.close(below)
        elif stat.S_ISREG(info.st_mode):
            fd = os.open(name, os.O_RDONLY, dir_fd=root)
            content = os.read(fd, 1 << 20)
            os.close(fd)
        elif stat.S_ISLNK(info.st_mode):
            content = os.readlink(name, dir_fd=root)
        found[path] = (info.st_mode, content)
    return found
