"""What every image needs of the machine that it runs on: a name, a name server, and whom to trust.

For images made elsewhere it is one small layer on top of theirs; the image `host` has it among its /etc.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from shoal.image.manifest import Meta
from shoal.image.store import Store
from shoal.types import Layer

HOSTNAME = "sandbox"
ADDRESS = "10.0.2.15"
"""The sandbox's own address, and that of its name server: nobody answers unless something listens there."""
NAMES = {
    "hostname": f"{HOSTNAME}\n",
    "hosts": f"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n{ADDRESS}\t{HOSTNAME}\n",
    "resolv.conf": f"nameserver {ADDRESS}\noptions timeout:2 attempts:2\n",
}
"""Files of /etc."""

CA_FILES = (
    "AWS_CA_BUNDLE",
    "CARGO_HTTP_CAINFO",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    "HTTPLIB2_CA_CERTS",
    "NIX_SSL_CERT_FILE",
    "NODE_EXTRA_CA_CERTS",
    "PIP_CERT",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_FILE",
)
"""Variables that name a file of certificates which programs of this machine are told to trust."""
CA_FOLDER = "/etc/ssl/shoal"
_REVISION = 1


def publish_locality(store: Store, environ: Mapping[str, str]) -> Layer:
    """The layer for this machine as it is now, with the variables that lead to the certificates."""
    certificates, variables = _certificates(environ)
    facts = (_REVISION, NAMES, sorted(certificates.items()), os.geteuid() == 0)
    inputs = hashlib.sha256(b"locality" + msgspec.json.encode(facts, order="deterministic")).hexdigest()
    layer = store.find_or_build(inputs, lambda: _build(store, certificates, inputs))
    return msgspec.structs.replace(layer, env=variables)


def _certificates(environ: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Content by name of its file inside, and variables with the path that theirs has there."""
    contents: dict[str, str] = {}
    variables: dict[str, str] = {}
    for name in CA_FILES:
        file = Path(environ.get(name, ""))
        if (
            file.is_absolute()
            and file.is_file()
            and "PRIVATE KEY-----" not in (text := file.read_text(errors="replace"))
        ):
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            contents[f"{digest}.pem"] = text
            variables[name] = f"{CA_FOLDER}/{digest}.pem"
    return contents, variables


def _build(store: Store, certificates: Mapping[str, str], inputs: str) -> Layer:
    with store.stage() as folder:
        root = folder / "root"
        for place in (root, root / "etc", root / "etc/ssl", root / CA_FOLDER.lstrip("/")):
            place.mkdir(mode=0o755)
            place.chmod(0o755)
        files = {f"etc/{name}": text for name, text in NAMES.items()}
        files |= {f"{CA_FOLDER.lstrip('/')}/{name}": text for name, text in certificates.items()}
        for name, text in files.items():
            (root / name).write_text(text)
            (root / name).chmod(0o644)
        return store.publish_directory(root, meta=Meta(), inputs=inputs)
