"""Trees that go in and come out. What comes out is hostile."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

import shoal
from shoal.errors import FileExists, InvalidRequest, LimitExceeded, NotFound
from shoal.sdk.embedded import call, engine


def listing(root: Path) -> dict[str, str]:
    """What is below a folder, and what each is."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        else:
            found[name] = "folder" if path.is_dir() else path.read_text()
    return found


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "sub" / "empty").mkdir(parents=True)
    (root / "a").write_text("a")
    (root / "sub" / "b").write_text("b")
    (root / "sub" / "b").chmod(0o750)
    (root / "link").symlink_to("sub/b")
    (root / "dangling").symlink_to("/not/there")
    (root / "to-folder").symlink_to("sub")
    return root


# Up


def test_a_tree_goes_in_with_modes_and_links(box: shoal.Sandbox, tree: Path) -> None:
    box.files.upload(tree, "/workspace/t")
    seen = box.commands.run("cd t; find . -mindepth 1 -printf '%p %y %m %l\\n' | sort").stdout.splitlines()
    plain = [line for line in seen if " l " not in line]
    assert [line.rstrip() for line in plain] == ["./a f 644", "./sub d 755", "./sub/b f 750", "./sub/empty d 755"]
    links = {line.split()[0]: line.split()[-1] for line in seen if " l " in line}
    assert links == {"./dangling": "/not/there", "./link": "sub/b", "./to-folder": "sub"}


def test_a_tree_goes_in_again_over_itself(box: shoal.Sandbox, tree: Path) -> None:
    box.files.upload(tree, "/workspace/t")
    (tree / "a").write_text("changed")
    (tree / "link").unlink()
    (tree / "link").symlink_to("a")
    box.files.upload(tree, "/workspace/t")
    assert box.files.read("/workspace/t/link") == "changed"


def test_a_file_goes_in_and_a_link_to_one_as_what_it_points_to(box: shoal.Sandbox, tree: Path) -> None:
    box.files.upload(tree / "link", "/workspace/new/b")
    info = box.files.stat("/workspace/new/b")
    assert (info.kind, info.mode) == ("file", 0o750)
    with pytest.raises(NotFound, match="local"):
        box.files.upload(tree / "none", "/workspace/x")


def test_a_fifo_goes_in_and_a_socket_does_not(box: shoal.Sandbox, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o640)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "socket"))
        with pytest.raises(InvalidRequest):
            box.files.upload(tmp_path / "fifo", "/workspace/x")
        box.files.upload(tmp_path, "/workspace/t")
    assert [(info.name, info.kind) for info in box.files.list("/workspace/t")] == [("fifo", "fifo")]


@pytest.mark.root
def test_owners_are_roots_or_the_users_or_as_they_are(box: shoal.Sandbox, tree: Path) -> None:
    os.chown(tree / "a", 1234, 567)
    (tree / "a").chmod(0o4755)
    box.files.upload(tree, "/workspace/plain")
    box.files.upload(tree, "/tmp/user", user="user")
    box.files.upload(tree, "/workspace/kept", owners=True)
    found = [box.files.stat(f"{folder}/a") for folder in ("/workspace/plain", "/tmp/user", "/workspace/kept")]
    assert [(info.uid, info.gid) for info in found] == [(0, 0), (1000, 1000), (1234, 567)]
    assert box.files.stat("/tmp/user/sub").uid == 1000
    assert {info.mode for info in found} == {0o4755}
    with pytest.raises(shoal.PermissionDenied, match="kept"):
        box.files.upload(tree, "/tmp/kept", user="user", owners=True)
    os.chown(tree / "a", 1 << 20, 0)
    with pytest.raises(InvalidRequest, match="owners"):
        box.files.upload(tree, "/workspace/kept", owners=True)


def test_times_links_and_holes_both_ways(box: shoal.Sandbox, tree: Path, tmp_path: Path) -> None:
    """To the nanosecond, also before 1970; names of one file are that again; holes are holes."""
    os.link(tree / "sub/b", tree / "second")
    with (tree / "holes").open("wb") as file:
        for at in (1 << 20, 9 << 20, 1 << 30):
            file.seek(at)
            file.write(b"data at %d" % at)
        file.truncate(3 << 30)
    times = {"a": 1_234_567_890_123_456_789, "sub": -1_500_000_001, "link": 999_999_999, "holes": 1, "sub/empty": 0}
    for name, ns in times.items():
        os.utime(tree / name, ns=(ns, ns), follow_symlinks=False)
    box.files.upload(tree, "/workspace/t")
    seen = box.commands.run("cd t; stat -c '%h %b' second sub/b holes; tail -c +1073741825 holes | head -c 18").stdout
    second, first, holes, text = seen.splitlines()
    assert first == second == f"2 {first.split()[1]}"
    assert int(holes.split()[1]) * 512 < 1 << 20
    assert text == f"data at {1 << 30}"
    box.files.download("/workspace/t", tmp_path / "back", limit="4GiB")
    back = tmp_path / "back"
    for name, ns in times.items():
        assert os.lstat(back / name).st_mtime_ns == ns, name
        assert box.files.stat(f"/workspace/t/{name}").mtime == pytest.approx(ns / 1e9)
    assert (back / "second").samefile(back / "sub/b")
    assert (back / "holes").stat().st_blocks * 512 < 1 << 20
    assert (back / "holes").stat().st_size == 3 << 30
    with (back / "holes").open("rb") as file:
        file.seek(1 << 30)
        assert file.read(18) == b"data at %d" % (1 << 30)


def test_a_hole_of_a_terabyte_goes_both_ways_and_costs_nothing(box: shoal.Sandbox, tmp_path: Path) -> None:
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 40)
    box.files.upload(tmp_path / "hole", "/workspace/hole")
    assert box.files.stat("/workspace/hole").size == 1 << 40
    box.commands.run("printf end >> hole", check=True)
    box.files.download("/workspace/hole", tmp_path / "back", limit="2TiB")
    info = (tmp_path / "back").stat()
    assert (info.st_size, info.st_blocks * 512 < 1 << 20) == ((1 << 40) + 3, True)


def test_folders_that_are_there_keep_their_mode_and_what_is_in_them(box: shoal.Sandbox, tree: Path) -> None:
    box.commands.run("mkdir -p t/sub; chmod 711 t t/sub; echo keep > t/sub/keep", check=True)
    tree.chmod(0o700)
    box.files.upload(tree, "/workspace/t")
    assert {box.files.stat(path).mode for path in ("/workspace/t", "/workspace/t/sub")} == {0o711}
    assert box.files.read("/workspace/t/sub/keep") == "keep\n"


def test_what_is_in_the_way_of_a_tree(box: shoal.Sandbox, tree: Path) -> None:
    for script, place in (("echo > t", "t"), ("mkdir t; ln -s /etc t/sub", "sub"), ("mkdir -p t/a", "a")):
        box.commands.run(f"rm -rf t; {script}", check=True)
        with pytest.raises(FileExists, match=place):
            box.files.upload(tree, "/workspace/t")
    assert box.files.list("/etc") != []
    assert not box.files.exists("/etc/b")


def test_many_small_files_both_ways(box: shoal.Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for number in range(3000):
        path = source / str(number % 30) / str(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(number) * (number % 7))
    box.files.upload(source, "/workspace/t")
    box.files.download("/workspace/t", tmp_path / "back")
    assert listing(tmp_path / "back") == listing(source)


def test_a_big_file_both_ways(box: shoal.Sandbox, tmp_path: Path) -> None:
    data = os.urandom(9 << 20)
    (tmp_path / "big").write_bytes(data)
    box.files.upload(tmp_path / "big", "/workspace/big")
    assert box.commands.run("sha256sum big").stdout.split()[0] == hashlib.sha256(data).hexdigest()
    box.files.download("/workspace/big", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data


def test_names_of_any_bytes_both_ways(box: shoal.Sandbox, tmp_path: Path) -> None:
    names = [b"\xff\xfe", b"a\nb", b"-rf", b"x" * 255, "\u2615".encode(), b"%2e%2e", b" ", b"...", b"a\\b"]
    source = tmp_path / "source"
    source.mkdir()
    for name in names:
        with open(os.fsencode(source) + b"/" + name, "wb") as file:
            file.write(name)
    box.files.upload(source, "/workspace/t")
    box.files.download("/workspace/t", tmp_path / "back")
    assert sorted(os.listdir(os.fsencode(tmp_path / "back"))) == sorted(names)
    for name in names:
        with open(os.fsencode(tmp_path / "back") + b"/" + name, "rb") as file:
            assert file.read() == name


# Down


def test_a_tree_comes_out(box: shoal.Sandbox, tree: Path, tmp_path: Path) -> None:
    box.files.upload(tree, "/workspace/t")
    box.files.download("/workspace/t", tmp_path / "back")
    assert listing(tmp_path / "back") == listing(tree)
    assert stat.S_IMODE((tmp_path / "back/sub/b").stat().st_mode) == 0o750


def test_a_file_comes_out_and_makes_its_folder(box: shoal.Sandbox, tmp_path: Path) -> None:
    box.files.write("/workspace/f", "x")
    box.files.download("/workspace/f", tmp_path / "new" / "f")
    assert (tmp_path / "new" / "f").read_text() == "x"
    with pytest.raises(NotFound):
        box.files.download("/workspace/none", tmp_path / "none")
    assert listing(tmp_path) == {"new": "folder", "new/f": "x"}


def test_set_uid_is_dropped_and_devices_stay_behind(box: shoal.Sandbox, tmp_path: Path) -> None:
    box.commands.run("mkdir -m 2777 t; cp /bin/true t/suid; chmod 6755 t/suid; mkfifo t/fifo; mkdir -m 1777 t/sticky")
    box.files.download("/workspace/t", tmp_path / "t")
    assert set(listing_names(tmp_path / "t")) == {"suid", "sticky"}
    for path in (tmp_path / "t", tmp_path / "t/suid", tmp_path / "t/sticky"):
        assert not path.stat().st_mode & 0o7000
        assert path.stat().st_uid == os.geteuid()


def listing_names(root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in root.rglob("*")]


def test_links_are_made_and_never_followed(box: shoal.Sandbox, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.mkdir()
    box.commands.run(f"mkdir t; ln -s {canary} t/out; ln -s ../canary t/up; ln -s /etc/passwd t/p; echo > t/f")
    box.files.download("/workspace/t", tmp_path / "t")
    box.commands.run(
        "rm t/out; mkdir t/out; echo stolen > t/out/f; rm t/p; echo stolen > t/p; rm t/f; ln -s ../canary/f t/f"
    )
    with pytest.raises(FileExists, match="in the way"):
        box.files.download("/workspace/t", tmp_path / "t")
    assert os.listdir(canary) == []
    assert "stolen" not in Path("/etc/passwd").read_text()


def test_a_file_replaces_a_link_and_not_what_it_points_to(box: shoal.Sandbox, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "f").symlink_to(precious)
    box.files.write("/workspace/t/f", "new")
    box.files.download("/workspace/t", tmp_path / "t")
    assert precious.read_text() == "precious"
    assert (tmp_path / "t" / "f").read_text() == "new"
    assert not (tmp_path / "t" / "f").is_symlink()


def test_a_file_that_is_more_than_the_caller_takes(box: shoal.Sandbox, tmp_path: Path) -> None:
    box.commands.run("mkdir t; truncate -s 1T t/hole; echo small > t/a")
    with pytest.raises(LimitExceeded):
        box.files.download("/workspace/t", tmp_path / "t", limit="1MiB")
    assert set(listing_names(tmp_path / "t")) <= {"a"}
    with pytest.raises(LimitExceeded):
        box.files.read("/workspace/t/hole", limit="1MiB")
    box.commands.run("rm t/hole; cd t; touch 1 2 3 4 5")
    with pytest.raises(LimitExceeded, match="entries"):
        box.files.download("/workspace/t", tmp_path / "few", entries=5)


def test_a_link_comes_out_as_what_it_points_to(box: shoal.Sandbox, tmp_path: Path) -> None:
    box.commands.run("mkdir t; echo x > t/f; ln -s t l; ln -s t/f m; ln -s none d; mkfifo p")
    box.files.download("/workspace/l", tmp_path / "t")
    box.files.download("/workspace/m", tmp_path / "f")
    assert ((tmp_path / "t/f").read_text(), (tmp_path / "f").read_text()) == ("x\n", "x\n")
    assert not (tmp_path / "t").is_symlink()
    with pytest.raises(NotFound):
        box.files.download("/workspace/d", tmp_path / "d")
    for path in ("/workspace/p", "/dev/zero"):
        with pytest.raises(InvalidRequest):
            box.files.download(path, tmp_path / "d")


def test_what_this_machine_refuses_is_typed(box: shoal.Sandbox, tmp_path: Path) -> None:
    box.commands.run("mkdir t; echo x > t/f", check=True)
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileExists):
        box.files.download("/workspace/t", tmp_path / "file")
    with pytest.raises(FileExists):
        box.files.download("/workspace/t/f", tmp_path / "folder")
    with pytest.raises(FileExists):
        box.files.download("/workspace/t/f", tmp_path / "file/below")
    with pytest.raises(NotFound):
        box.files.upload(tmp_path / "file/below", "/workspace/x")
    assert listing(tmp_path) == {"file": "x", "folder": "folder"}


def test_an_unreadable_file_is_named(box: shoal.Sandbox, tmp_path: Path) -> None:
    box.commands.run("mkdir t; echo x > t/secret; chmod 600 t/secret", check=True)
    if os.geteuid() == 0:
        pieces = call(_collect(box, "/workspace/t", user=1000))
        assert isinstance(pieces, shoal.PermissionDenied)
        assert "secret" in str(pieces)


async def _collect(box: shoal.Sandbox, path: str, user: int) -> bytes | shoal.ShoalError:
    try:
        return b"".join([piece async for piece in engine().node.pack_files(box.id, path, user)])
    except shoal.ShoalError as error:
        return error


def test_nothing_half_is_left_when_a_file_goes_away(box: shoal.Sandbox, tmp_path: Path) -> None:
    box.commands.run("mkdir t; echo x > t/a; mkfifo t/b")
    loop = "cd t; while :; do rm -f a; mkfifo a; rm a; echo x > a; done"
    running = box.commands.run(loop, background=True)
    for number in range(30):
        target = tmp_path / str(number)
        with suppress(shoal.ShoalError):
            box.files.download("/workspace/t", target)
        assert not [name for name in listing_names(target) if name.startswith(".shoal")]
    running.kill()


def test_deep_trees_end(box: shoal.Sandbox, tmp_path: Path) -> None:
    script = "import os\nos.mkdir('t'); os.chdir('t')\nfor i in range(1500):\n os.mkdir('d'); os.chdir('d')"
    box.commands.run(["python3", "-c", script], check=True)
    try:
        with pytest.raises(shoal.ShoalError):
            box.files.download("/workspace/t", tmp_path / "t")
    finally:
        # Python's own rmtree, with which pytest cleans up, goes by recursion and would fail on it.
        subprocess.run(["rm", "-rf", tmp_path / "t"], check=True)
    assert box.commands.run("true").ok
