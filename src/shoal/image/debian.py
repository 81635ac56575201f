"""Debian as an image, made of its packages by mmdebstrap inside a sandbox that reaches the mirrors and nothing else.

Packages bring scripts that run as root when they are installed; here that is root of a sandbox.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from shoal.errors import BuildFailed, InvalidRequest, Unsupported
from shoal.image import capture, tree
from shoal.image.apt import AptSettings
from shoal.image.catalog import Record
from shoal.image.install import Builder
from shoal.image.manifest import Meta
from shoal.image.store import Store
from shoal.types import GiB, Layer, NetworkPolicy

_REVISION: Final = 3
_WORK: Final = "/opt/shoal-build"
_ROOM: Final = (3 * GiB, 200_000)
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SKIPPED: Final = "chroot/mount,check/qemu,output/mknod"
"""Steps of mmdebstrap that a sandbox may not do. Devices are in the skeleton; no package of Debian needs the mounts."""
_SUITE: Final = re.compile(r"[a-z][a-z0-9-]{1,40}")
_PACKAGE: Final = re.compile(r"[a-z0-9][a-z0-9+.-]*(=[A-Za-z0-9.+:~-]+)?")

# What tells when and where it was made, and would make every build another layer; and what the skeleton brings.
_LEFT_OVER: Final = (
    "dev", "etc/hostname", "etc/machine-id", "etc/resolv.conf", "proc", "run", "sys", "tmp",
    "var/cache/ldconfig/aux-cache", "var/lib/dbus/machine-id", "var/log/alternatives.log", "var/log/bootstrap.log",
    "var/log/dpkg.log",
)  # fmt: skip

_EMPTIED: Final = ("var/lib/apt/lists", "var/log/apt")
"""Folders of packages, which stay without their files."""

REFERENCE_PACKAGES: Final = (
    "bash", "build-essential", "bzip2", "ca-certificates", "cmake", "curl", "diffutils", "file", "gdb", "git", "jq",
    "less", "locales-all", "make", "nodejs", "npm", "patch", "pkg-config", "procps", "python3", "python3-dev",
    "python3-pip", "python3-pytest", "python3-venv", "ripgrep", "rsync", "strace", "sudo", "tree", "unzip", "vim-tiny",
    "wget", "xz-utils", "zip",
)  # fmt: skip
"""Of the reference image `shoal-base`."""


class DebianSpec(Struct, frozen=True):
    """What an image of Debian consists of."""

    suite: str = "bookworm"
    packages: tuple[str, ...] = ()
    """Beyond the essential ones and apt; `name` or `name=version`."""


def spec_of(name: str, packages: tuple[str, ...] = ()) -> DebianSpec:
    """Of "debian:bookworm", "debian" or "shoal-base". InvalidRequest for another name."""
    if name == "shoal-base":
        return DebianSpec(packages=(*REFERENCE_PACKAGES, *packages))
    distribution, _, suite = name.partition(":")
    if distribution != "debian":
        raise InvalidRequest("image", f"what is built here is debian:SUITE or shoal-base, not {name!r}")
    return DebianSpec(suite or DebianSpec().suite, packages)


NewMirrorBuilder = Callable[[Sequence[Layer], NetworkPolicy], AbstractAsyncContextManager[Builder]]
"""Makes a sandbox on the image `host` with these layers and this network."""


async def build(
    spec: DebianSpec, store: Store, settings: AptSettings, new_builder: NewMirrorBuilder, *, timeout: float = 3600
) -> Record:
    """The image: a look-up, or one build for all who ask at the same time. It stays as it was first built.

    BuildFailed carries the whole log; InvalidRequest; StorageFull; Unsupported without mmdebstrap.
    """
    spec = _check(spec)
    inputs = _fingerprint(spec, settings)

    async def make() -> Layer:
        _find_mmdebstrap()
        store.check_room(*_ROOM)
        async with new_builder((), NetworkPolicy(allow=settings.hosts())) as builder:
            await _run(spec, settings, builder, timeout)
            return await asyncio.to_thread(_freeze, store, builder.upper(), inputs)

    layer = await store.build_once(inputs, make)
    return Record(
        layers=(layer.digest,),
        env={"PATH": _PATH, "LANG": "C.UTF-8"},
        source=f"debian {spec.suite} from {settings.mirror}",
    )


def _check(spec: DebianSpec) -> DebianSpec:
    if _SUITE.fullmatch(spec.suite) is None:
        raise InvalidRequest("suite", f"a name like bookworm, not {spec.suite!r}")
    for package in spec.packages:
        if _PACKAGE.fullmatch(package) is None:
            raise InvalidRequest("packages", f"names of packages, as git or git=1:2.39.5-0+deb12u2, not {package!r}")
    return msgspec.structs.replace(spec, packages=tuple(sorted(set(spec.packages))))


def _fingerprint(spec: DebianSpec, settings: AptSettings) -> str:
    facts = ("debian", _REVISION, spec, settings.sources(spec.suite), os.uname().machine, os.geteuid() == 0)
    return hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).hexdigest()


def _find_mmdebstrap() -> None:
    found = shutil.which("mmdebstrap")
    if found is None or not Path(found).resolve().is_relative_to("/usr"):
        raise Unsupported("an image of Debian is made by mmdebstrap: install it with `apt install mmdebstrap`")


async def _run(spec: DebianSpec, settings: AptSettings, builder: Builder, timeout: float) -> None:
    sources = "".join(f"{line}\n" for line in settings.sources(spec.suite))
    await builder.write(f"{_WORK}/sources.list", sources.encode())
    await builder.write(f"{_WORK}/apt.conf", "".join(f"{line}\n" for line in settings.options).encode())
    command = [
        "mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory", f"--skip={_SKIPPED}",
        f"--aptopt={_WORK}/apt.conf", *([f"--include={','.join(spec.packages)}"] if spec.packages else []),
        spec.suite, f"{_WORK}/root", f"{_WORK}/sources.list",
    ]  # fmt: skip
    env = {"TMPDIR": _WORK, "SOURCE_DATE_EPOCH": "946684800", "HOME": _WORK, "LC_ALL": "C.UTF-8"}
    result = await builder.run(command, env=env, timeout=timeout)
    if not result.ok:
        raise BuildFailed(_explain(spec, result.stderr, result.limit), result.stderr + result.stdout)


def _explain(spec: DebianSpec, log: str, limit: str | None) -> str:
    if limit is not None:
        return f"debian {spec.suite} could not be built: ended by the limit on {limit}"
    errors = [line for line in log.splitlines() if line.startswith("E: ")]
    blamed = next((line for line in errors if "nable to locate" in line or "no installation candidate" in line), None)
    return (
        f"debian {spec.suite} could not be built: {(blamed or (errors or ['no reason given'])[0]).removeprefix('E: ')}"
    )


def _freeze(store: Store, upper: int, inputs: str) -> Layer:
    prefix = f"{_WORK}/root".lstrip("/").encode()
    size = tree.measure_below(upper, prefix)
    store.check_room(2 * size.bytes, size.entries + 100)
    with store.stage() as folder:
        root = folder / "root"
        capture.capture(upper, prefix, root)
        _clean(root)
        root.chmod(0o755)
        return store.publish(root, meta=Meta(), inputs=inputs)


def _clean(root: Path) -> None:
    """In our own copy, which nobody else can change; and still no link in it is followed."""
    for name in _LEFT_OVER:
        place = _place(root, name)
        if place is not None and place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        elif place is not None:
            place.unlink(missing_ok=True)
    for name in _EMPTIED:
        if (folder := _place(root, name)) is not None and not folder.is_symlink():
            for below, _, files in os.walk(folder):
                for file in files:
                    Path(below, file).unlink()


def _place(root: Path, name: str) -> Path | None:
    """None if a link is on the way."""
    place = root
    for part in name.split("/"):
        if place.is_symlink():
            return None
        place = place / part
    return place
