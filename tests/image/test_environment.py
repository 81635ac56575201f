"""Environments: built once from what decides them, kept as a layer, and plain about what went wrong."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import uv

from shoal.errors import BuildFailed, InvalidRequest, NotFound, Unsupported
from shoal.image import tree
from shoal.image.environment import EnvironmentSpec, blame, build, fingerprint, read_spec
from shoal.image.interpreter import Interpreter, find
from shoal.image.store import Store
from shoal.image.toolkit import publish_uv
from shoal.types import Image, Layer, Result

_BASE = Image(name="host", digest="sha256:base", layers=())


class PublicIndex(msgspec.Struct, frozen=True):
    """What this machine's own settings make of the public index, or a test of another."""

    settings: dict[str, str] = {}
    paths: tuple[str, ...] = ()

    def uv_environment(self) -> dict[str, str]:
        certificates = os.environ.get("SSL_CERT_FILE")
        return {
            "UV_NO_CONFIG": "1",
            **({"SSL_CERT_FILE": certificates} if certificates else {}),
            **self.settings,
        }

    def uv_arguments(self) -> tuple[str, ...]:
        return ()

    def local_paths(self) -> tuple[str, ...]:
        return self.paths


class HostBuilder:
    """Runs the build on this machine, in a mount namespace where /opt is a folder of the test."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.commands: list[list[str]] = []
        (root / "opt/shoal/bin").mkdir(parents=True)
        shutil.copy(uv.find_uv_bin(), root / "opt/shoal/bin/uv")
        self._fd = tree.open_directory(root)

    async def run(self, argv: list[str], *, env: dict[str, str], timeout: float) -> Result:
        self.commands.append(argv)
        script = f'mount --bind {self._root}/opt /opt && exec "$@"'
        process = await asyncio.create_subprocess_exec(
            *("unshare", "--mount", "sh", "-c", script, "sh", *argv),
            env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", **env},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), timeout)
        return Result(exit_code=process.returncode, stdout_bytes=out, stderr_bytes=err)

    async def write(self, path: str, data: bytes) -> None:
        assert path.startswith("/opt/shoal-build/"), path
        file = self._root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    def upper(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


class Site:
    """Makes builders in a folder and counts them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.layers: list[Sequence[Layer]] = []
        self.builders: list[HostBuilder] = []

    @asynccontextmanager
    async def new_builder(self, layers: Sequence[Layer]) -> AsyncIterator[HostBuilder]:
        self.layers.append(layers)
        builder = HostBuilder(self._folder / f"root{len(self.layers)}")
        self.builders.append(builder)
        try:
            yield builder
        finally:
            builder.close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture(scope="module")
def interpreter() -> Interpreter:
    return find("3.11")


def test_the_fingerprint_covers_all_that_decides(interpreter: Interpreter) -> None:
    spec, index = EnvironmentSpec(("six==1.16.0",)), PublicIndex()
    first = fingerprint(spec, "base", interpreter, "x86_64", index)
    replace = msgspec.structs.replace
    others = [
        fingerprint(replace(spec, requirements=("six==1.15.0",)), "base", interpreter, "x86_64", index),
        fingerprint(replace(spec, no_deps=True), "base", interpreter, "x86_64", index),
        fingerprint(replace(spec, constraints=("a==1",)), "base", interpreter, "x86_64", index),
        fingerprint(spec, "other", interpreter, "x86_64", index),
        fingerprint(spec, "base", replace(interpreter, version="3.11.99"), "x86_64", index),
        fingerprint(spec, "base", interpreter, "aarch64", index),
        fingerprint(spec, "base", interpreter, "x86_64", PublicIndex({"UV_DEFAULT_INDEX": "https://x.example"})),
    ]
    assert len({first, *others}) == len(others) + 1
    assert fingerprint(replace(spec, python="3.11.7"), "base", interpreter, "x86_64", index) == first


def test_passwords_and_certificates_are_no_part_of_it(interpreter: Interpreter) -> None:
    spec = EnvironmentSpec(("six",))
    secrets = {"UV_INDEX_SHOAL0_USERNAME": "u", "UV_INDEX_SHOAL0_PASSWORD": "p", "SSL_CERT_FILE": "/other"}
    plain, secret = (fingerprint(spec, "b", interpreter, "x", PublicIndex(own)) for own in ({}, secrets))
    assert plain == secret


def test_the_contents_of_constraints_are_part_of_it(interpreter: Interpreter, tmp_path: Path) -> None:
    file = tmp_path / "constraints.txt"
    index = PublicIndex({"UV_CONSTRAINT": str(file)}, (str(file),))
    digests = set()
    for text in ("six==1.16.0", "six==1.15.0"):
        file.write_text(text)
        digests.add(fingerprint(EnvironmentSpec(("six",)), "b", interpreter, "x", index))
    assert len(digests) == 2
    file.unlink()
    with pytest.raises(InvalidRequest, match=r"constraints\.txt"):
        fingerprint(EnvironmentSpec(("six",)), "b", interpreter, "x", index)


def test_specs_from_files(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("six==1.16.0\n-c c.txt\n")
    (tmp_path / "c.txt").write_text("attrs==23.1.0\n")
    spec = read_spec(tmp_path / "r.txt", "3.12", no_deps=True)
    assert spec == EnvironmentSpec(("six==1.16.0",), "3.12", ("attrs==23.1.0",), no_deps=True)


@pytest.mark.parametrize(
    "spec",
    [
        EnvironmentSpec(("./local",)),
        EnvironmentSpec(("six",), constraints=("--index-url x",)),
        EnvironmentSpec(("six",), exclude_newer="yesterday"),
    ],
)
def test_wrong_specs_are_refused_before_anything_is_made(
    spec: EnvironmentSpec, store: Store, site: Site, interpreter: Interpreter
) -> None:
    with pytest.raises(InvalidRequest):
        asyncio.run(build(spec, store, _BASE, interpreter, PublicIndex(), site.new_builder))
    assert site.layers == []


def test_an_index_with_a_password_is_kept_from_build_code(store: Store, site: Site, interpreter: Interpreter) -> None:
    index = PublicIndex({"UV_INDEX_SHOAL0_PASSWORD": "secret"})
    with pytest.raises(Unsupported, match="password"):
        asyncio.run(build(EnvironmentSpec(("six",)), store, _BASE, interpreter, index, site.new_builder))
    assert site.layers == []


@pytest.mark.parametrize(
    ("log", "package"),
    [
        ("  x Failed to build `pycairo==1.20`\n", "pycairo==1.20"),
        ("  x Failed to download and build `a==1`\n", "a==1"),
        ("  x No solution found\n  Because nosuch was not found in the package registry and", "nosuch"),
        ("  Because there is no version of six==99.0 and you require six==99.0", "six==99.0"),
        ("error: something else", None),
    ],
)
def test_the_package_to_blame(log: str, package: str | None) -> None:
    assert blame(log) == package


def test_the_toolkit_is_made_once(store: Store) -> None:
    layer = publish_uv(store)
    assert publish_uv(store) == layer
    assert layer.target == "/"
    assert len(store.list()) == 1


@pytest.mark.root
@pytest.mark.index
def test_an_environment_is_built_once_and_works(
    store: Store, site: Site, interpreter: Interpreter, tmp_path: Path
) -> None:
    spec = EnvironmentSpec(("six==1.16.0", "markupsafe==2.1.5"), no_deps=True)

    async def main() -> list[Layer]:
        return await asyncio.gather(
            *(build(spec, store, _BASE, interpreter, PublicIndex(), site.new_builder) for _ in range(4))
        )

    layers = asyncio.run(main())
    assert len(site.layers) == 1
    assert {layer.digest for layer in layers} == {layers[0].digest}
    layer = layers[0]
    assert (layer.format, layer.path, layer.env) == ("stack", ("/opt/env/bin",), {"VIRTUAL_ENV": "/opt/env"})
    assert layer.needs[-1] == interpreter.key
    assert [each.digest for each in site.layers[0]][1:] == [each.digest for each in interpreter.layers]
    again = asyncio.run(build(spec, store, _BASE, interpreter, PublicIndex(), site.new_builder))
    assert again == layer
    assert len(site.layers) == 1
    parts = [store.get(key) for key in layer.needs[:-1]]
    assert len(parts) == 3
    check_environment(parts, tmp_path)


def check_environment(parts: list[Layer], tmp_path: Path) -> None:
    """It imports from its fixed place, and its compiled files hold: nothing is compiled again."""
    mounts, folders = [], []
    for index, part in enumerate(parts):
        folder = tmp_path / f"part{index}"
        folder.mkdir()
        how = "-t erofs" if part.format == "erofs" else "--bind"
        mounts.append(f"mount {how} {part.source} {folder}")
        folders.append(str(folder))
    (tmp_path / "merged").mkdir()
    mounts.append(f"mount -t overlay overlay -o lowerdir={':'.join(folders)} {tmp_path}/merged")
    script = (
        f"{' && '.join(mounts)} && mount --bind {tmp_path}/merged/opt /opt && /opt/env/bin/python -v -c "
        "'import six, markupsafe; print(six.__file__, six.__cached__)'"
    )
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("/opt/env/lib/python3.11/site-packages/six.py")
    assert "/opt/env/lib/python3.11/site-packages/__pycache__/six.cpython-311.pyc matches" in done.stderr


@pytest.mark.root
@pytest.mark.index
def test_an_unseen_set_of_known_packages_is_put_together_without_a_build(
    store: Store, site: Site, interpreter: Interpreter
) -> None:
    def make(*pins: str) -> Layer:
        spec = EnvironmentSpec(pins, no_deps=True)
        return asyncio.run(build(spec, store, _BASE, interpreter, PublicIndex(), site.new_builder))

    both = make("six==1.16.0", "markupsafe==2.1.5")
    six, iniconfig = make("six==1.16.0"), make("six==1.16.0", "iniconfig==2.0.0")
    assert len(site.layers) == 2
    installed = [command for builder in site.builders for command in builder.commands if "install" in command]
    assert len(installed) == 2
    assert set(six.needs) < set(both.needs)
    assert set(six.needs) < set(iniconfig.needs)
    assert len({both.digest, six.digest, iniconfig.digest}) == 3


@pytest.mark.root
@pytest.mark.index
def test_open_requirements_are_made_exact_first(store: Store, site: Site, interpreter: Interpreter) -> None:
    async def make(*requirements: str) -> Layer:
        spec = EnvironmentSpec(requirements)
        return await build(spec, store, _BASE, interpreter, PublicIndex(), site.new_builder)

    wide = asyncio.run(make("python-dateutil<2.9", "six<1.17"))
    exact = asyncio.run(make("python-dateutil==2.8.2", "six==1.16.0"))
    assert exact.needs == wide.needs
    assert not any("install" in command for command in site.builders[-1].commands)


@pytest.mark.root
@pytest.mark.index
def test_a_package_from_source_is_a_part_like_others(store: Store, site: Site, interpreter: Interpreter) -> None:
    spec = EnvironmentSpec(("docopt==0.6.2",), no_deps=True)  # published as source only
    layer = asyncio.run(build(spec, store, _BASE, interpreter, PublicIndex(), site.new_builder))
    assert (layer.format, len(layer.needs)) == ("stack", 3)


@pytest.mark.root
@pytest.mark.index
def test_what_no_package_brought_keeps_an_environment_whole(
    store: Store, tmp_path: Path, interpreter: Interpreter
) -> None:
    class Untidy(HostBuilder):
        async def run(self, argv: list[str], *, env: dict[str, str], timeout: float) -> Result:
            done = await super().run(argv, env=env, timeout=timeout)
            if "install" in argv:
                (self._root / "opt/env/lib/python3.11/site-packages/stray.py").write_text("")
            return done

    @asynccontextmanager
    async def new_builder(_: Sequence[Layer]) -> AsyncIterator[HostBuilder]:
        builder = Untidy(tmp_path / "root")
        yield builder
        builder.close()

    spec = EnvironmentSpec(("six==1.16.0",), no_deps=True)
    layer = asyncio.run(build(spec, store, _BASE, interpreter, PublicIndex(), new_builder))
    assert layer.format in ("erofs", "directory")
    assert layer.needs == (interpreter.key,)


@pytest.mark.root
@pytest.mark.index
def test_what_cannot_be_installed_is_named_with_the_whole_log(
    store: Store, site: Site, interpreter: Interpreter
) -> None:
    spec = EnvironmentSpec(("six==99.99",), no_deps=True)
    with pytest.raises(BuildFailed, match=r"six==99\.99") as caught:
        asyncio.run(build(spec, store, _BASE, interpreter, PublicIndex(), site.new_builder))
    assert "six==99.99" in caught.value.log
    assert "$ /opt/shoal/bin/uv venv" in caught.value.log
    assert [manifest.needs for manifest in store.list()] == [()]  # the toolkit alone


@pytest.mark.root
def test_an_environment_of_nothing_needs_no_index(store: Store, site: Site, interpreter: Interpreter) -> None:
    layer = asyncio.run(build(EnvironmentSpec(()), store, _BASE, interpreter, PublicIndex(), site.new_builder))
    assert store.get(layer.digest) == layer
    assert not any("install" in command for command in site.builders[0].commands)


@pytest.mark.root
def test_a_build_that_leaves_a_link_in_place_of_the_environment_reaches_nothing(
    store: Store, tmp_path: Path, interpreter: Interpreter
) -> None:
    """What runs in a build may replace /opt/env by anything; the host must not follow it."""

    class Hostile(HostBuilder):
        async def run(self, argv: list[str], *, env: dict[str, str], timeout: float) -> Result:
            target = self._root / "opt/env"
            if not target.is_symlink():
                target.symlink_to("/etc")
            return Result(exit_code=0)

    @asynccontextmanager
    async def new_builder(_: Sequence[Layer]) -> AsyncIterator[HostBuilder]:
        builder = Hostile(tmp_path / "root")
        yield builder
        builder.close()

    with pytest.raises(NotFound):
        asyncio.run(build(EnvironmentSpec(()), store, _BASE, interpreter, PublicIndex(), new_builder))
    assert len(store.list()) == 1
