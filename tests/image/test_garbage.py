"""What is removed to make room: never what has a name, is needed, or is in use by any process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InvalidRequest, NotFound
from shoal.image.garbage import Item, Policy, choose, collect, look
from shoal.image.manifest import Meta
from shoal.image.store import Store
from shoal.types import Layer


def item(digest: str, size: int = 10, used: float = 0.0, **facts: object) -> Item:
    return Item(digest=digest, size=size, used=used, **facts)  # type: ignore[arg-type]


def chosen(items: list[Item], policy: Policy, now: float = 100.0) -> list[str]:
    return [each.digest for each in choose(items, policy, now)]


def test_what_was_not_used_for_long_goes() -> None:
    items = [item("old", used=10), item("new", used=90), item("named", used=10, pinned=True)]
    assert chosen(items, Policy(unused_for=50)) == ["old"]
    assert chosen(items, Policy()) == []


def test_the_longest_unused_go_until_the_rest_fits() -> None:
    items = [item("c", used=3), item("a", used=1), item("b", used=2), item("named", used=0, pinned=True)]
    assert chosen(items, Policy(keep_bytes=40)) == []
    assert chosen(items, Policy(keep_bytes=39)) == ["a"]
    assert chosen(items, Policy(keep_bytes=20)) == ["a", "b"]
    assert chosen(items, Policy(keep_bytes=0)) == ["a", "b", "c"]


def test_what_one_that_stays_needs_stays() -> None:
    items = [item("base", used=1), item("env", used=99, needs=("base",)), item("other", used=1)]
    assert chosen(items, Policy(unused_for=50)) == ["other"]
    pinned = [
        item("base", used=1),
        item("mid", used=1, needs=("base",)),
        item("top", 5, 1, pinned=True, needs=("mid",)),
    ]
    assert chosen(pinned, Policy(keep_bytes=0)) == []


ITEMS = st.lists(
    st.builds(
        item,
        st.sampled_from("abcdefgh"),
        st.integers(0, 100),
        st.floats(0, 100),
        pinned=st.booleans(),
        needs=st.lists(st.sampled_from("abcdefgh"), max_size=3).map(tuple),
    ),
    unique_by=lambda each: each.digest,
)


@given(ITEMS, st.none() | st.floats(0, 100), st.none() | st.integers(0, 500))
def test_whatever_stays_has_all_it_needs(items: list[Item], unused: float | None, keep: int | None) -> None:
    gone = set(chosen(items, Policy(unused_for=unused, keep_bytes=keep)))
    for each in items:
        if each.digest not in gone:
            assert not gone & set(each.needs)
        if each.pinned:
            assert each.digest not in gone


# On disk


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def publish(store: Store, tmp_path: Path, name: str) -> Layer:
    source = tmp_path / name
    source.mkdir()
    (source / "file").write_text(name * 5000)
    return store.publish_directory(source, meta=Meta(), inputs=f"{len(name):064x}")


def age(store: Store, layer: Layer, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(store.folder(layer.digest), (then, then))
    manifest = store.folder(layer.digest) / "manifest.json"
    manifest.write_text(
        manifest.read_text().replace(f'"created":{store.manifest(layer.digest).created}', f'"created":{then}')
    )
    os.utime(store.folder(layer.digest), (then, then))


def test_a_collection_removes_files_names_and_inputs(store: Store, tmp_path: Path) -> None:
    old, new = publish(store, tmp_path, "a"), publish(store, tmp_path, "bb")
    age(store, old, 1000)
    size = {each.digest: each.size for each in look(store)}
    dry = collect(store, Policy(unused_for=100), dry_run=True)
    assert (dry.removed, store.exists(old.digest)) == ((old.digest,), True)
    done = collect(store, Policy(unused_for=100))
    assert (done.removed, done.freed, done.in_use, done.kept) == ((old.digest,), size[old.digest], (), size[new.digest])
    assert not store.exists(old.digest)
    assert store.find(f"{1:064x}") is None
    assert store.find(f"{2:064x}") == new
    assert not list((store.root / "tmp").iterdir())


def test_what_is_held_stays_until_it_is_let_go(store: Store, tmp_path: Path) -> None:
    layer = publish(store, tmp_path, "a")
    holds = store.holds()
    holds.take([layer])
    holds.take([layer, Layer(digest="host:/usr", source="/usr")])
    assert collect(store, Policy(keep_bytes=0)).in_use == (layer.digest,)
    with pytest.raises(InvalidRequest, match="in use"):
        store.remove(layer.digest)
    holds.give([layer])
    assert holds.idle() == []
    holds.give([layer])
    assert holds.idle() == [layer.digest]
    assert collect(store, Policy(keep_bytes=0)).removed == ()
    holds.release(holds.idle())
    assert collect(store, Policy(keep_bytes=0)).removed == (layer.digest,)
    with pytest.raises(NotFound, match="removed"):
        holds.take([layer])
    holds.close()


HOLDER = """
import sys, time
from pathlib import Path
from shoal.image.store import Store
store = Store(Path(sys.argv[1]))
store.holds().take([store.get(sys.argv[2])])
print("held", flush=True)
time.sleep(60)
"""


def test_what_another_process_holds_stays_until_it_dies(store: Store, tmp_path: Path) -> None:
    layer = publish(store, tmp_path, "a")
    command = [sys.executable, "-c", HOLDER, str(store.root), layer.digest]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert collect(store, Policy(keep_bytes=0)).in_use == (layer.digest,)
        holder.send_signal(signal.SIGKILL)
    assert collect(store, Policy(keep_bytes=0)).removed == (layer.digest,)


def test_a_use_makes_a_layer_young_again(store: Store, tmp_path: Path) -> None:
    layer = publish(store, tmp_path, "a")
    age(store, layer, 5000)
    holds = store.holds()
    holds.take([layer])
    holds.close()
    assert time.time() - look(store)[0].used < 100
    assert collect(store, Policy(unused_for=1000)).removed == ()
