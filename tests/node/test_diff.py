"""Diffs of real sandboxes, applied by git and by patch to what the sandbox started from."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

import shoal
from shoal.errors import InvalidRequest, LimitExceeded, NotFound
from shoal.node.diff import write_file_diff
from shoal.node.hunks import Effort
from shoal.node.versions import Pair, Version
from shoal.sdk.environments import publish_layer

pytestmark = pytest.mark.root

CHANGES = """
cd /base
sed -i 's/line 50/line fifty/; 3d; $ a last' text
printf 'now without' > text-end
printf 'with\\n' > text-none
rm gone; rm -r folder/deep
mkdir -p new/er; echo added > new/er/file; echo two >> 'a b'; echo x > "quo\\"te"
printf 'tab\\n' > "$(printf 'ta\\tb')"
printf 'caf\\351\\n' > latin
chmod 755 script; chmod 600 secret; chmod 755 text-mode; echo more >> text-mode
ln -sfn elsewhere link; ln -s target newlink; rm oldlink
rm was-link; echo file > was-link; rm was-file; ln -s gone was-file
: > emptied; : > empty-new; rm empty-old
rm -r remade; mkdir remade; echo other > remade/same; echo 1 > remade/only
touch -d 2001-01-01 touched; chown 1000 owned; cp text-keep k; cp k text-keep; rm k
echo cr > crlf; printf 'a\\r\\nb\\r\\n' > crlf
"""


KINDS = """
rm -r tree-to-file; echo flat > tree-to-file
rm file-to-tree; mkdir file-to-tree; echo deep > file-to-tree/f
"""


def make_base(root: Path) -> Path:
    files = {
        "text": "".join(f"line {n}\n" for n in range(100)), "text-end": "with\n", "text-none": "without",
        "gone": "gone\n", "folder/deep/er": "x\n", "folder/deep/b/c": "y\n", "folder/kept": "z\n", "a b": "one\n",
        "script": "#!\n", "secret": "s\n", "text-mode": "m\n", "was-file": "f\n", "emptied": "full\n", "empty-old": "",
        "tree-to-file/a": "a\n", "tree-to-file/b/c": "c\n", "file-to-tree": "f\n", "remade/same": "same\n",
        "remade/lost/x": "x\n", "touched": "t\n", "owned": "o\n", "text-keep": "k\n", "crlf": "a\nb\n",
    }  # fmt: skip
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
        (root / name).chmod(0o644)
    for name, target in (("link", "somewhere"), ("oldlink", "x"), ("was-link", "y")):
        (root / name).symlink_to(target)
    return root


def listing(root: Path) -> dict[str, tuple[int, bytes]]:
    """Files and links, with what git and patch know of modes."""
    found = {}
    for folder, folders, names in os.walk(root):
        for name in (*names, *(name for name in folders if Path(folder, name).is_symlink())):
            path = Path(folder, name)
            if ".git" in path.parts:
                continue
            data = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
            mode = 0 if path.is_symlink() else path.stat().st_mode & stat.S_IXUSR
            found[str(path.relative_to(root))] = (mode, data)
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(params=["published", "directory"])
def layer(request: pytest.FixtureRequest, base: Path, shoal_home: Path) -> shoal.Layer:
    """As it is stored, EROFS where that can be mounted; and a directory of the host used as it is."""
    if request.param == "directory":
        return shoal.Layer(digest=f"host:{base}", source=str(base), format="directory", target="/base")
    return asyncio.run(publish_layer(base, "/base"))


TOOLS = {"git": ["git", "apply", "--whitespace=nowarn"], "patch": ["patch", "-p1", "-s", "--binary", "-E"]}


@pytest.mark.parametrize("tool", TOOLS)
def test_it_makes_of_the_base_what_the_sandbox_made(layer: shoal.Layer, base: Path, tmp_path: Path, tool: str) -> None:
    """/base is a mount below the root: its upper and its layers are its own."""
    with shoal.Sandbox.create(layers=[layer]) as box:
        # One patch in which a file becomes a folder, or the other way round, is more than patch(1) can do.
        box.commands.run(CHANGES + (KINDS if tool == "git" else ""), check=True)
        diff = box.diff(path="/base")
        box.files.download("/base", tmp_path / "made")
    copy = tmp_path / "copy"
    shutil.copytree(base, copy, symlinks=True)
    done = subprocess.run(TOOLS[tool], input=diff.encode("utf-8", "surrogateescape"), cwd=copy, capture_output=True)
    assert done.returncode == 0, f"{done.stdout!r} {done.stderr!r}\n{diff}"
    made, found = listing(tmp_path / "made"), listing(copy)
    if tool == "patch":  # it removes files that a diff leaves empty
        made, found = ({name: entry for name, entry in tree.items() if entry[1]} for tree in (made, found))
    assert found == made
    for name in ("touched", "owned", "text-keep"):
        assert name not in diff


def test_the_head_of_each_kind_of_change(layer: shoal.Layer) -> None:
    with shoal.Sandbox.create(layers=[layer]) as box:
        box.commands.run(CHANGES + KINDS, check=True)
        diff = box.diff(path="/base")
        whole = box.diff()
    for line in (
        "old mode 100644\nnew mode 100755", "old mode 100644\nnew mode 100600", "new file mode 100644",
        "deleted file mode 100644", "deleted file mode 120000\n", "new file mode 120000\n",
        "\\ No newline at end of file", "--- a/a b\t\n+++ b/a b\t\n", "--- /dev/null\n", "+++ /dev/null\n",
        'diff --git "a/quo\\"te" "b/quo\\"te"', 'diff --git "a/ta\\tb" "b/ta\\tb"',
        "diff --git a/folder/deep/b/c b/folder/deep/b/c\ndeleted",
        "diff --git a/tree-to-file/b/c b/tree-to-file/b/c\ndeleted",
        "caf\udce9",
    ):  # fmt: skip
        assert line in diff, line
    assert "diff --git a/base/text b/base/text\n" in whole


def test_nothing_changed_is_no_diff(box: shoal.Sandbox) -> None:
    box.commands.run("mkdir -p a/b; mkdir /tmp/c", check=True)
    assert box.diff() == ""


def test_what_has_no_text_is_a_line(box: shoal.Sandbox) -> None:
    script = "head -c 50 /dev/zero > zeros; truncate -s 2M large; truncate -s 1T hole; mkfifo fifo; echo ok > ok"
    box.commands.run(f"{script}; printf '\\0' > /etc/hosts", check=True)
    diff = box.diff()
    for line in (
        "Binary files /dev/null and b/workspace/zeros differ\n", "Binary files a/etc/hosts and b/etc/hosts differ\n",
        f"Left out: workspace/large ({2 << 20} bytes)\n", f"Left out: workspace/hole ({1 << 40} bytes)\n",
        "Left out: workspace/fifo is neither a file nor a link\n", "+ok\n",
    ):  # fmt: skip
        assert line in diff


def test_its_size_is_bounded(box: shoal.Sandbox) -> None:
    box.commands.run(
        "for n in $(seq 60); do head -c 1000000 /dev/urandom | base64 -w 70 | head -c 1000000 > $n; done", check=True
    )
    with pytest.raises(LimitExceeded):
        box.diff(limit="1MiB")
    diff = box.diff(limit="64MiB")
    assert 10 < diff.count("Left out: ") < 60
    assert diff.count("diff --git") + diff.count("Left out: ") == 60


def test_since_a_mark(box: shoal.Sandbox) -> None:
    box.commands.run(
        "echo one > f; echo gone > g; echo same > s; rm /etc/hosts; rm -r /etc/ssl; mkdir d; echo x > d/x", check=True
    )
    mark = box.mark()
    assert box.changes(since=mark) == []
    assert box.diff(since=mark) == ""
    box.commands.run(
        "echo two >> f; rm g; echo new > n; rm -r d; echo back > /etc/hosts; echo h > /etc/hostname", check=True
    )
    kinds = {change.path: change.kind for change in box.changes(since=mark)}
    assert kinds == {
        "/workspace/f": "changed", "/workspace/g": "removed", "/workspace/n": "added", "/workspace/d": "removed",
        "/workspace/d/x": "removed", "/etc/hosts": "added", "/etc/hostname": "changed",
    }  # fmt: skip
    diff = box.diff(since=mark)
    assert "@@ -1 +1,2 @@\n one\n+two\n" in diff
    assert "--- a/workspace/g\n+++ /dev/null\n@@ -1 +0,0 @@\n-gone\n" in diff
    assert "--- /dev/null\n+++ b/etc/hosts\n@@ -0,0 +1 @@\n+back\n" in diff
    assert "-sandbox\n+h\n" in diff
    assert "deleted file mode 100644\nindex 587be6b4c3f93f93c489c0111bba5596147a26cb" in diff
    assert "etc/ssl" not in diff
    assert "workspace/s" not in diff


def test_a_directory_that_comes_back_after_a_mark(layer: shoal.Layer) -> None:
    with shoal.Sandbox.create(layers=[layer]) as box:
        box.commands.run("rm -r /base/folder", check=True)
        mark = box.mark()
        box.commands.run("mkdir -p /base/folder/deep; echo again > /base/folder/kept", check=True)
        assert box.diff(since=mark, path="/base").startswith("diff --git a/folder/kept b/folder/kept\nnew file")
        assert "deep" not in box.diff(since=mark)


def test_a_large_file_of_a_mark_is_left_out_and_not_taken_for_the_same(box: shoal.Sandbox) -> None:
    box.commands.run("head -c 2000000 /dev/zero > f; head -c 2000000 /dev/zero > same", check=True)
    mark = box.mark()
    box.commands.run("echo >> f", check=True)
    assert box.diff(since=mark) == "Left out: workspace/f (2000000 bytes and 2000001 bytes)\n"


def test_marks_are_few_and_of_their_sandbox(box: shoal.Sandbox) -> None:
    marks = [box.mark() for _ in range(5)]
    for look in (box.changes, box.diff):
        with pytest.raises(NotFound, match="mark"):
            look(since=marks[0])
        assert not look(since=marks[1])
    with shoal.Sandbox.create() as other, pytest.raises(InvalidRequest, match="since"):
        other.changes(since=marks[4])


def test_a_tree_that_changes_while_it_is_read(box: shoal.Sandbox) -> None:
    """Files become links to the host's, FIFOs and folders under the walk: their own text comes, or none."""
    loop = "echo mine > f; rm f; ln -s /etc/shadow f; rm f; mkfifo f; rm f; mkdir f; rmdir f"
    running = box.commands.run(f"while :; do {loop}; done", background=True)
    for _ in range(150):
        for line in box.diff().splitlines():
            assert not line.startswith("+") or line.startswith(("+++ ", "+mine", "+/etc/shadow")), line
    running.kill()


def test_a_set_uid_bit_alone_is_no_diff() -> None:
    """Git has no name for it; `changes` tells of it."""
    old, new = Version(stat.S_IFREG | 0o4755, 1, b"a"), Version(stat.S_IFREG | 0o755, 1, b"a")
    assert list(write_file_diff(b"f", Pair(old, new), Effort(1))) == []
