"""The image `host`: complete enough to run things in, and silent about the machine it comes from."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.image import accounts, etc
from shoal.image.host import host
from shoal.image.store import Store
from shoal.types import Image

_ENVIRON = {"SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt"}
_PRIVATE = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_HASH = re.compile(rb":\$[0-9a-z]+\$[^:\s]+")
_CREDENTIAL_FILES = {
    ".netrc",
    "netrc",
    "auth.conf",
    "pip.conf",
    "npmrc",
    ".npmrc",
    "credentials",
    ".git-credentials",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("host") / "store")


@pytest.fixture(scope="module")
def image(store: Store) -> Image:
    return host(store, _ENVIRON)


@pytest.fixture(scope="module")
def root(image: Image) -> Path:
    return Path(image.layers[-1].source)


def files(root: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(root):
        yield from (Path(folder, name) for name in names)


def test_usr_is_used_as_it_is_and_the_rest_is_one_layer(image: Image) -> None:
    assert image.layers[0].digest == "host:/usr"
    assert [layer.target for layer in image.layers if layer.target == "/"] == ["/"]
    assert image.layers[-1].digest.startswith("sha256:")
    assert image.env["PATH"].split(":")[:3] == ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin"]
    assert image.env["SSL_CERT_FILE"] == "/etc/ssl/certs/ca-certificates.crt"
    assert image.env["LANG"] == "C.UTF-8"


def test_the_skeleton_of_a_root(root: Path) -> None:
    modes = {
        "tmp": 0o1777,
        "var/tmp": 0o1777,
        "root": 0o711,
        "run": 0o755,
        "dev/shm": 0o1777,
        "workspace": 0o777,
    }
    for name, mode in modes.items():
        assert stat.S_IMODE((root / name).stat().st_mode) == mode, name
    for name in ("proc", "sys", "home/user", "mnt", "opt", "srv", "dev/pts", "var/lib/apt/lists/partial"):
        assert (root / name).is_dir(), name
    for name in ("bin", "lib", "sbin", "lib64"):
        original = Path("/", name)
        if original.is_symlink():
            assert (root / name).readlink() == original.readlink()
    assert os.listdir(root / "root") == []
    assert os.listdir(root / "home") == ["user"]
    assert os.listdir(root / "home/user") == []


@pytest.mark.root
def test_devices_and_owners(root: Path) -> None:
    for name, numbers in {"null": (1, 3), "zero": (1, 5), "urandom": (1, 9), "tty": (5, 0)}.items():
        found = (root / "dev" / name).lstat()
        assert stat.S_ISCHR(found.st_mode)
        assert (os.major(found.st_rdev), os.minor(found.st_rdev)) == numbers
        assert stat.S_IMODE(found.st_mode) == 0o666
    assert (root / "home/user").stat().st_uid == accounts.USER_ID
    devices = {path.name for path in files(root) if stat.S_ISCHR(path.lstat().st_mode)}
    assert devices == {"null", "zero", "full", "random", "urandom", "tty"}


def test_no_key_password_or_credential_comes_along(root: Path) -> None:
    for path in files(root):
        assert path.name not in _CREDENTIAL_FILES, path
        assert not path.name.startswith("ssh_host_"), path
        if path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        assert not _PRIVATE.search(content), path
        if path.is_relative_to(root / "etc"):
            assert not _HASH.search(content), path
            assert not re.search(rb"://[^/\s:@]+:[^/\s@]+@", content), path


def test_nothing_comes_along_that_not_everybody_here_could_read(root: Path) -> None:
    made_anew = {"shadow", "gshadow"}
    for path in files(root / "etc"):
        original = Path("/", path.relative_to(root))
        if path.name not in made_anew and not path.is_symlink() and original.exists():
            assert original.stat().st_mode & stat.S_IROTH, path


def test_nothing_tells_which_machine_this_is(root: Path) -> None:
    assert (root / "etc/machine-id").read_text() == ""
    assert (root / "etc/hostname").read_text() == "sandbox\n"
    identity = {Path("/etc/machine-id").read_text().strip().encode()} if Path("/etc/machine-id").exists() else set()
    name = socket.gethostname()
    if len(name) > 4 and name not in ("localhost", "sandbox", "debian"):
        identity.add(name.encode())
    for path in files(root):
        if not path.is_symlink() and path.is_file():
            content = path.read_bytes()
            for mark in identity - {b""}:
                assert mark not in content, path


def test_names_resolve_locally(root: Path) -> None:
    hosts = (root / "etc/hosts").read_text()
    assert "127.0.0.1\tlocalhost" in hosts
    assert "10.0.2.15\tsandbox" in hosts
    assert (root / "etc/resolv.conf").read_text().startswith("nameserver 10.0.2.15\n")
    assert "hosts: files dns" in (root / "etc/nsswitch.conf").read_text()


def test_only_system_accounts_and_one_user(root: Path) -> None:
    lines = [line.split(":") for line in (root / "etc/passwd").read_text().splitlines()]
    assert lines[0] == ["root", "x", "0", "0", "", "/root", "/bin/bash"]
    assert lines[-1] == ["user", "x", "1000", "1000", "", "/home/user", "/bin/bash"]
    assert all(int(line[2]) < 1000 or int(line[2]) == 65534 for line in lines[:-1])
    assert all(line[4] == "" for line in lines)
    shadow = [line.split(":") for line in (root / "etc/shadow").read_text().splitlines()]
    assert [line[0] for line in shadow] == [line[0] for line in lines]
    assert {line[1] for line in shadow} == {"*"}
    assert stat.S_IMODE((root / "etc/shadow").stat().st_mode) == 0o640


def test_people_are_left_out_of_the_accounts(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    (old / "passwd").write_text(
        "root:$6$abc:0:0:Jane Root,,555:/root:/bin/zsh\nmail:x:8:8:mail:/var/mail:/bin/false\n"
        "jane:x:1000:1000:Jane Doe:/home/jane:/bin/bash\nbroken line\nnobody:x:65534:65534::/:/bin/false\n"
    )
    (old / "group").write_text("root:x:0:jane\nsudo:hash:27:jane,mail\njane:x:1000:\n")
    accounts.write(new, old)
    text = "".join((new / name).read_text() for name in os.listdir(new))
    assert "jane" not in text.lower()
    assert "$6$" not in text
    assert "sudo:x:27:mail" in text
    assert "nobody:x:65534" in text


def test_certificates_from_elsewhere_are_copied_and_named(tmp_path: Path) -> None:
    certificate = tmp_path / "corp.pem"
    certificate.write_text("-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----\n")
    environ = {"SSL_CERT_FILE": str(certificate), "REQUESTS_CA_BUNDLE": "/nonexistent", "CURL_CA_BUNDLE": ""}
    image = host(Store(tmp_path / "store"), environ)
    inside = image.env["SSL_CERT_FILE"]
    assert inside.startswith("/etc/ssl/shoal/")
    assert Path(image.layers[-1].source, inside.lstrip("/")).read_text() == certificate.read_text()
    assert "REQUESTS_CA_BUNDLE" not in image.env
    assert "CURL_CA_BUNDLE" not in image.env


def test_a_file_with_a_key_is_not_taken_for_a_certificate(tmp_path: Path) -> None:
    bundle = tmp_path / "both.pem"
    bundle.write_text("-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----\n")
    image = host(Store(tmp_path / "store"), {"SSL_CERT_FILE": str(bundle)})
    inside = Path(image.layers[-1].source, image.env.get("SSL_CERT_FILE", "none").lstrip("/"))
    assert not inside.exists()
    assert "SSL_CERT_FILE" not in image.env


def test_a_hit_is_quick_and_the_same(store: Store, image: Image) -> None:
    start = time.perf_counter()
    again = host(store, _ENVIRON)
    assert again == image
    assert time.perf_counter() - start < 0.1
    assert len(store.list()) == 1


def test_a_changed_input_makes_another_fingerprint(tmp_path: Path) -> None:
    certificate = tmp_path / "corp.pem"
    certificate.write_text("one")
    environ = {"SSL_CERT_FILE": str(certificate)}
    store = Store(tmp_path / "store")
    first = host(store, environ)
    certificate.write_text("another")
    assert host(store, environ).digest != first.digest


def test_every_input_that_is_listed_can_be_looked_at(root: Path) -> None:
    found = list(etc.inputs(_ENVIRON))
    assert "/etc/passwd" in found
    assert "/var/lib/dpkg/status" in found
    assert not any(path.startswith("/etc/ssl/private") or path == "/etc/shadow" for path in found)


@pytest.mark.root
def test_programs_run_in_it(image: Image, root: Path, tmp_path: Path) -> None:
    """On a plain overlay in a mount namespace of their own; the sandbox itself is tested where it is made."""
    work = [tmp_path / name for name in ("upper", "work", "merged")]
    for folder in work:
        folder.mkdir()
    usr = next(layer.source for layer in image.layers if layer.target == "/usr")
    script = (
        f"mount -t tmpfs none {tmp_path} && mkdir {' '.join(map(str, work))} && "
        f"mount -t overlay -o lowerdir={root},upperdir={work[0]},workdir={work[1]} none {work[2]} && "
        f"mount --bind {usr} {work[2]}/usr && mount -t proc none {work[2]}/proc && cd {work[2]} && "
        "exec chroot . /bin/sh -e -c '"
        'id user; getent hosts localhost; dpkg -s bash | head -2; perl -e "print qq(perl\\n)"; '
        "echo x > /dev/null; head -c 4 /dev/urandom | wc -c; cat /etc/os-release | head -1; "
        'python3 -c "import ssl; print(len(ssl.create_default_context().get_ca_certs()) > 50)"; '
        "echo int main\\(void\\){return 0\\;} | cc -x c - -o /tmp/a && /tmp/a && echo compiled'"
    )
    command = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=image.env)
    assert done.returncode == 0, done.stderr
    for word in ("uid=1000(user)", "localhost", "Package: bash", "perl\n", "4\n", "True\n", "compiled"):
        assert word in done.stdout, (word, done.stdout, done.stderr)
