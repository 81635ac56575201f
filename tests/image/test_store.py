"""The store: one name for one content, whole layers or none, one build for all who wait."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings

from shoal.errors import InvalidRequest, NotFound, PlatformError, StorageFull, Unsupported
from shoal.image import disk, tree
from shoal.image.manifest import Meta
from shoal.image.store import Store
from shoal.types import Layer

from . import trees


def fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def make(folder: Path, content: str = "content") -> Path:
    folder.mkdir()
    (folder / "file").write_text(content)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@settings(max_examples=20, deadline=None)
@given(trees.TREES)
def test_a_published_tree_comes_back_as_it_was(made: trees.Tree) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        trees.write(made, source)
        layer = Store(Path(folder, "store")).publish_directory(source, meta=Meta())
        fds = [tree.open_directory(path) for path in (source, Path(layer.source))]
        assert trees.listing(fds[0]) == trees.listing(fds[1])
        for fd in fds:
            os.close(fd)


def test_layers_are_found_by_digest_prefix_and_name(store: Store, tmp_path: Path) -> None:
    meta = Meta(target="/opt/x", path=("/opt/x/bin",), env={"A": "b"}, needs=("python:3.11.7",))
    layer = store.publish_directory(make(tmp_path / "a"), meta=meta, inputs=fingerprint("a"))
    assert layer.digest.startswith("sha256:")
    assert (layer.target, layer.path, layer.env, layer.needs) == ("/opt/x", *list(meta_fields(meta))[1:])
    bare = layer.digest.removeprefix("sha256:")
    store.bind_name("tools:1", layer.digest)
    for key in (layer.digest, bare, bare[:8], f"sha256:{bare[:12]}", "tools:1"):
        assert store.get(key) == layer
    assert store.find(fingerprint("a")) == layer
    assert store.find(fingerprint("b")) is None
    assert [manifest.digest for manifest in store.list()] == [layer.digest]
    manifest = store.manifest(bare)
    assert (manifest.inputs, manifest.bytes, manifest.entries) == (fingerprint("a"), 7, 1)


def meta_fields(meta: Meta) -> tuple[object, ...]:
    return meta.target, meta.path, meta.env, meta.needs


def test_wrong_keys_are_told_apart(store: Store, tmp_path: Path) -> None:
    layer = store.publish_directory(make(tmp_path / "a"), meta=Meta())
    store.bind_name("known", layer.digest)
    with pytest.raises(NotFound, match="known"):
        store.get("unknown")
    with pytest.raises(NotFound):
        store.get("0" * 64)
    for key in ("../../etc", "", "a/b", ".hidden"):
        with pytest.raises(InvalidRequest, match="layer"):
            store.get(key)
    for name in ("deadbeef", "a/b", "../x", ""):
        with pytest.raises(InvalidRequest, match="name"):
            store.bind_name(name, layer.digest)
    with pytest.raises(InvalidRequest, match="fingerprint"):
        store.find("../x")


def test_an_ambiguous_prefix_is_refused(store: Store, tmp_path: Path) -> None:
    layer = store.publish_directory(make(tmp_path / "a"), meta=Meta())
    bare = layer.digest.removeprefix("sha256:")
    other = bare[:10] + ("0" * 54 if bare[10:] != "0" * 54 else "1" * 54)
    (store.root / "layers-v1" / other).mkdir()
    with pytest.raises(InvalidRequest, match="2 digests"):
        store.get(bare[:8])
    assert store.get(bare) == layer


def test_the_same_content_is_kept_once_and_another_use_is_another_layer(store: Store, tmp_path: Path) -> None:
    first = store.publish_directory(make(tmp_path / "a"), meta=Meta())
    assert store.publish_directory(make(tmp_path / "b"), meta=Meta()) == first
    assert store.publish_directory(tmp_path / "b", meta=Meta(target="/x")).digest != first.digest
    assert len(store.list()) == 2


@pytest.mark.root
def test_the_digest_does_not_depend_on_the_format(tmp_path: Path) -> None:
    make(tmp_path / "a")
    one = Store(tmp_path / "one").publish_erofs(tmp_path / "a", meta=Meta())
    two = Store(tmp_path / "two").publish_directory(tmp_path / "a", meta=Meta())
    assert (one.format, two.format) == ("erofs", "directory")
    assert one.digest == two.digest
    assert Path(one.source).read_bytes()[1024:1028] == b"\xe2\xe1\xf5\xe0"


def test_publish_moves_what_was_staged_and_copies_what_was_not(store: Store, tmp_path: Path) -> None:
    with store.stage() as folder:
        layer = store.publish_directory(make(folder / "root"), meta=Meta())
        assert not (folder / "root").exists()
    assert (Path(layer.source) / "file").read_text() == "content"
    store.publish_directory(make(tmp_path / "a", "other"), meta=Meta())
    assert (tmp_path / "a/file").exists()
    assert os.listdir(store.root / "tmp") == []


def test_removing_a_layer(store: Store, tmp_path: Path) -> None:
    layer = store.publish_directory(make(tmp_path / "a"), meta=Meta(), inputs=fingerprint("a"))
    store.bind_name("name", layer.digest)
    store.remove("name")
    assert not store.exists(layer.digest)
    assert not store.exists("name")
    assert store.find(fingerprint("a")) is None
    assert not Path(layer.source).exists()


def test_a_store_of_a_newer_format_is_refused(store: Store) -> None:
    (store.root / "version").write_text("2\n")
    with pytest.raises(Unsupported, match="upgrade"):
        Store(store.root)


def test_a_damaged_manifest_is_named(store: Store, tmp_path: Path) -> None:
    layer = store.publish_directory(make(tmp_path / "a"), meta=Meta())
    Path(layer.source).with_name("manifest.json").write_text('{"digest": 3')
    with pytest.raises(PlatformError, match=r"manifest\.json"):
        store.get(layer.digest)


def test_strangers_cannot_enter_the_store(store: Store) -> None:
    assert store.root.stat().st_mode & 0o777 == 0o700


def test_too_little_room_is_told_with_numbers(store: Store) -> None:
    with pytest.raises(StorageFull, match=r"bytes free, 1,000,000,000,000,000,000 needed; remove layers"):
        store.check_room(10**18, 1)
    with pytest.raises(StorageFull, match="inodes free"):
        disk.check_room(Path("/tmp"), 1, 10**15)


_FULL = """
import subprocess, sys
from pathlib import Path
from shoal.errors import StorageFull
from shoal.image.manifest import Meta
from shoal.image.store import Store
root, source = Path(sys.argv[1]), Path(sys.argv[2])
subprocess.run(["mount", "-t", "tmpfs", "-o", sys.argv[3], "none", str(root)], check=True)
store = Store(root / "store")
kept = store.publish_directory(source / "small", meta=Meta())
try:
    with store.stage() as folder:
        for number in range(100_000):
            (folder / str(number)).write_bytes(b"x" * 5000)
except StorageFull as error:
    print("full:", error)
try:
    store.publish_directory(source / "large", meta=Meta())
except StorageFull as error:
    print("refused:", error)
assert store.get(kept.digest) == kept and len(store.list()) == 1
assert not list((root / "store/tmp").iterdir())
again = store.publish_directory(source / "small", meta=Meta(target="/again"))
assert (Path(again.source) / "file").read_text() == "content"
"""


@pytest.mark.root
@pytest.mark.parametrize("options", ["size=32m", "size=1g,nr_inodes=200"])
def test_a_full_disk_leaves_the_store_intact(tmp_path: Path, options: str) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "source").mkdir()
    make(tmp_path / "source/small")
    make(tmp_path / "source/large")
    for number in range(300):
        (tmp_path / f"source/large/{number}").write_bytes(b"x" * 200_000)
    command = ["unshare", "--mount", sys.executable, "-c", _FULL, str(tmp_path / "disk")]
    done = subprocess.run([*command, str(tmp_path / "source"), options], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "full:" in done.stdout
    assert "refused:" in done.stdout


# Building once


def test_tasks_that_want_the_same_build_it_once(store: Store, tmp_path: Path) -> None:
    built = 0

    async def build() -> Layer:
        nonlocal built
        built += 1
        await asyncio.sleep(0.05)
        return store.publish_directory(make(tmp_path / f"a{built}"), meta=Meta(), inputs=fingerprint("a"))

    async def main() -> list[Layer]:
        return await asyncio.gather(*(store.build_once(fingerprint("a"), build) for _ in range(20)))

    layers = asyncio.run(main())
    assert built == 1
    assert len({layer.digest for layer in layers}) == 1
    assert os.listdir(store.root / "locks-v1") == []


def test_a_failed_build_lets_the_next_one_try(store: Store, tmp_path: Path) -> None:
    async def fail() -> Layer:
        raise RuntimeError("no")

    async def build() -> Layer:
        return store.publish_directory(make(tmp_path / "a"), meta=Meta(), inputs=fingerprint("a"))

    async def main() -> None:
        first, second = await asyncio.gather(
            store.build_once(fingerprint("a"), fail),
            store.build_once(fingerprint("a"), build),
            return_exceptions=True,
        )
        assert isinstance(first, RuntimeError)
        assert isinstance(second, Layer)

    asyncio.run(main())


def test_a_cancelled_waiter_leaves_the_lock_alone(store: Store) -> None:
    async def wait() -> None:
        async with store.locked_async(fingerprint("a")):
            pass

    async def main() -> None:
        async with store.locked_async(fingerprint("a")):
            waiting = asyncio.create_task(wait())
            await asyncio.sleep(0.02)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await asyncio.wait_for(wait(), 5)

    asyncio.run(main())


_BUILD_ONCE = """
import asyncio, os, sys, time
from pathlib import Path
from shoal.image.manifest import Meta
from shoal.image.store import Store
root, inputs = Path(sys.argv[1]), sys.argv[2]
store = Store(root)
async def build():
    print("built")
    await asyncio.sleep(0.3)
    with store.stage() as folder:
        (folder / "root").mkdir()
        (folder / "root/pid").write_text(str(os.getpid()))
        return store.publish_directory(folder / "root", meta=Meta(), inputs=inputs)
sys.stdin.readline()
print(asyncio.run(store.build_once(inputs, build)).digest)
"""


def test_two_processes_build_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _BUILD_ONCE, str(tmp_path / "store"), fingerprint("a")]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    output = "".join(process.communicate(timeout=60)[0] for process in processes).split()
    assert output.count("built") == 1
    assert len(set(output) - {"built"}) == 1


# Killed builds

_BUILD_FOREVER = """
import random, sys
from pathlib import Path
from shoal.image.manifest import Meta
from shoal.image.store import Store
store = Store(Path(sys.argv[1]))
print("ready", flush=True)
number = int(sys.argv[2])
while True:
    number += 1
    with store.stage() as folder:
        root = folder / "root"
        for part in range(10):
            (root / f"part{part}").mkdir(parents=True)
            (root / f"part{part}/file").write_text(f"{number} {part}" * 100)
        layer = store.publish(root, meta=Meta(), inputs=f"{number:064x}")
        store.bind_name("latest", layer.digest)
        if random.random() < 0.3:
            store.remove(layer.digest)
"""


def kill_at_random(root: Path, rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    for number in range(rounds):
        command = [sys.executable, "-c", _BUILD_FOREVER, str(root), str(number * 1_000_000)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(chance.uniform(0.0, 0.15))
            process.send_signal(signal.SIGKILL)
        check_whole(open_swept(root))


def open_swept(root: Path) -> Store:
    """A child of the killed process that was just being started may hold its files for a moment longer."""
    deadline = time.monotonic() + 5
    while True:
        store = Store(root)
        if not os.listdir(root / "tmp") or time.monotonic() > deadline:
            return store
        time.sleep(0.02)


def check_whole(store: Store) -> None:
    for manifest in store.list():
        layer = store.get(manifest.digest)
        assert os.path.exists(layer.source)
        if layer.format == "directory":
            root = tree.open_directory(layer.source)
            assert tree.identify(root).digest == manifest.tree
            os.close(root)
    assert os.listdir(store.root / "tmp") == []


def test_killed_builds_leave_nothing_that_counts(tmp_path: Path) -> None:
    kill_at_random(tmp_path / "store", rounds=6, seed=1)


@pytest.mark.slow
def test_two_hundred_killed_builds_leave_nothing_that_counts(tmp_path: Path) -> None:
    kill_at_random(tmp_path / "store", rounds=200, seed=2)


def test_what_a_living_build_has_staged_is_not_swept(store: Store) -> None:
    with store.stage() as folder:
        (folder / "file").touch()
        command = [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from shoal.image.store import Store",
        ]
        command[-1] += "; Store(Path(sys.argv[1]))"
        subprocess.run([*command, str(store.root)], check=True, timeout=60)
        assert (folder / "file").exists()
    (store.root / "tmp/left").mkdir()
    Store(store.root)
    assert os.listdir(store.root / "tmp") == []
