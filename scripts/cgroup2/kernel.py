"""A Debian kernel for the guest: fetched by apt and unpacked into the cache, never installed on this machine."""

from __future__ import annotations

import lzma
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
MIRROR = "http://deb.debian.org/debian"
META = "linux-image-cloud-amd64"
WANTED = (
    "virtio_pci", "virtio_blk", "crc32c-intel", "erofs", "overlay", "ext4", "loop",
    "nf_tables", "nft_ct", "nft_chain_nat", "nft_redir", "nft_reject_inet",
    "nft_connlimit", "nft_limit", "nft_nat", "nft_masq", "inet_diag", "tcp_diag",
)  # fmt: skip
"""What the guest's disks and the tests need, where it is not built in."""


class Kernel(NamedTuple):
    """An unpacked kernel."""

    image: Path
    modules: Path


def fetch(suite: str, cache: Path) -> Kernel:
    """The cloud kernel of a suite, as it is in the mirror on first use."""
    folder = cache / f"kernel-{suite}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _download(suite, folder)
        (folder / "complete").touch()
    (image,) = (path for path in folder.rglob("vmlinuz*") if path.is_file())
    (modules,) = (path.parent for path in folder.rglob("modules/*/kernel"))
    return Kernel(image, modules)


def _download(suite: str, folder: Path) -> None:
    options = _own_index(suite, folder / "apt")
    subprocess.run(["apt-get", *options, "update", "-qq"], check=True)
    names = _names(options)
    subprocess.run(["apt-get", *options, "download", "-qq", *names], check=True, cwd=folder)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True)
        package.unlink()
    shutil.rmtree(folder / "apt")


def _own_index(suite: str, folder: Path) -> list[str]:
    """Options by which apt knows that suite and nothing of this machine, nor this machine of it."""
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "sources.list").write_text(f"deb [signed-by={KEYRING}] {MIRROR} {suite} main\n")
    (folder / "status").touch()
    settings = {
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": folder / "lists",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "root",
    }
    return [f"-o{name}={value}" for name, value in settings.items()]


def _names(options: list[str]) -> list[str]:
    """The packages that the newest one of the suite consists of: it was one, and is several since Linux 7."""
    found, left = set(), [META]
    while left:
        name = left.pop()
        text = subprocess.run(["apt-cache", *options, "depends", name], check=True, capture_output=True, text=True)
        needed = re.findall(r"Depends: (linux-(?:image|binary|modules)-\d\S+)", text.stdout)
        left += [each for each in needed if each not in found and not each.endswith("-unsigned")]
        found |= set(needed)
    return sorted(found)


def modules(kernel: Kernel) -> list[tuple[str, bytes]]:
    """(name, content) of the wanted modules and of what they depend on, in the order of loading."""
    files = {path.name.partition(".")[0].replace("-", "_"): path for path in kernel.modules.rglob("*.ko*")}
    loaded: dict[str, bytes] = {}

    def load(name: str) -> None:
        if name in loaded or name not in files:
            return
        content = _read(files[name])
        found = re.search(rb"\0depends=([^\0]*)\0", content)
        for needed in found[1].decode().split(",") if found else []:
            load(needed.replace("-", "_"))
        loaded[name] = content

    for name in WANTED:
        load(name.replace("-", "_"))
    return list(loaded.items())


def _read(path: Path) -> bytes:
    return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
