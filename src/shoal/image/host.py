"""The image `host`: this machine's own system directories, read-only, with a root made around them.

/usr (and /bin, /lib and so on, where they are not links into it) is used as it is. Everything else that a
sandbox sees is one small layer made here: the skeleton of a root, device nodes, and the /etc and /var of
`etc`. Nothing is downloaded, and no other file of the machine is part of it: not /home, /root, /opt, /srv or
/mnt.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from shoal.image import accounts, etc, skeleton
from shoal.image.manifest import Meta
from shoal.image.store import Store
from shoal.types import Image, Layer

_REVISION = 2
"""Goes up when the code here, in `etc` or in `accounts` makes something else of the same inputs."""
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def host(store: Store, environ: Mapping[str, str] | None = None) -> Image:
    """The image of this machine, made anew only if its inputs changed (under 2 s; else some milliseconds).

    `environ` (the process's own by default) is asked for CA files that programs here are told to trust.
    Installed packages are part of the digest; files put into /usr by hand are not.
    """
    environ = os.environ if environ is None else environ
    curated = _curated(store, environ)
    system = [Path("/", name) for name in _SYSTEM]
    layers = [_system_layer(path) for path in system if path.is_dir() and not path.is_symlink()]
    digests = "\n".join(layer.digest for layer in (*layers, curated))
    return Image(
        name="host",
        digest=f"sha256:{hashlib.sha256(digests.encode()).hexdigest()}",
        layers=(*layers, curated),
        env={"PATH": _PATH, "LANG": "C.UTF-8", **_ca_variables(curated, environ)},
    )


def _system_layer(path: Path) -> Layer:
    return Layer(digest=f"host:{path}", source=str(path), target=str(path))


def _ca_variables(curated: Layer, environ: Mapping[str, str]) -> dict[str, str]:
    """Those whose file came along."""
    found = etc.ca_variables(environ)
    return {
        name: path
        for name, path in found.items()
        if path.startswith("/usr/") or Path(curated.source, path.lstrip("/")).exists()
    }


def _curated(store: Store, environ: Mapping[str, str]) -> Layer:
    inputs = _fingerprint(environ)
    return store.find_or_build(inputs, lambda: _build(store, environ, inputs))


def _build(store: Store, environ: Mapping[str, str], inputs: str) -> Layer:
    with store.stage() as folder:
        root = folder / "root"
        root.mkdir(0o755)
        _write_root(root)
        etc.write(root, environ)
        return store.publish_directory(root, meta=Meta(), inputs=inputs)


def _fingerprint(environ: Mapping[str, str]) -> str:
    """By names, times and sizes, not by contents: this is asked for at every start."""
    facts = hashlib.sha256(f"host {_REVISION} {os.geteuid()}\n{etc.ca_variables(environ)}\n".encode())
    for path in (*(f"/{name}" for name in _SYSTEM), *etc.inputs(environ)):
        facts.update(os.fsencode(path) + _look(path))
    return facts.hexdigest()


def _look(path: str) -> bytes:
    try:
        found = os.lstat(path)
    except OSError:
        return b" -\n"
    return b" %o %d %d %d\n" % (found.st_mode, found.st_size, found.st_mtime_ns, found.st_ino)


def _write_root(root: Path) -> None:
    skeleton.write(root)
    for name in _SYSTEM:
        if Path("/", name).is_symlink():
            (root / name).symlink_to(Path("/", name).readlink())
        elif Path("/", name).is_dir():
            (root / name).mkdir()
    home = root / "home" / accounts.USER
    home.mkdir()
    if os.geteuid() == 0:
        os.chown(home, accounts.USER_ID, accounts.USER_ID)
