"""The /etc and /var of the image `host`: what programs need to run, and nothing that tells whose machine this
is.

Three sieves, one after the other: a list of what may come along; of that, only what every user of the machine
can read anyway; and of that, no file that holds a private key or a password in a URL. What identifies the
machine or its network is written anew.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from shoal.image import accounts
from shoal.image.locality import CA_FILES, CA_FOLDER, NAMES

# Patterns below /etc. Left out on purpose, though readable: environment, profile.d, gitconfig, npmrc,
# pip.conf, xdg, wgetrc, ssh keys, maven's settings, anything of services: people put names, addresses and
# tokens there.
_ETC = (
    "ImageMagick-*", "OpenCL", "adduser.conf", "alpine-release", "alternatives", "apk", "apt/apt.conf.d",
    "apt/keyrings", "apt/preferences.d", "apt/sources.list", "apt/sources.list.d", "apt/trusted.gpg",
    "apt/trusted.gpg.d", "bash.bashrc", "bash_completion.d", "bindresvport.blacklist", "ca-certificates",
    "ca-certificates.conf", "centos-release", "crypto-policies", "debconf.conf", "debian_version",
    "default/locale", "default/useradd", "deluser.conf", "dpkg", "fedora-release", "fonts", "gai.conf",
    "gdb", "glvnd", "groff", "gss", "gtk-2.0", "gtk-3.0", "host.conf", "inputrc", "iproute2", "issue",
    "issue.net", "java", "java-*", "ld-musl-*", "ld.so.cache", "ld.so.conf", "ld.so.conf.d",
    "libaudit.conf", "libnl-3", "locale.alias", "locale.conf", "locale.gen", "localtime", "login.defs",
    "lsb-release", "magic", "magic.mime", "mailcap", "mailcap.order", "manpath.config", "maven/logging",
    "maven/m2.conf", "maven/toolchains.xml", "mime.types", "mke2fs.conf", "mtab", "netconfig", "networks",
    "os-release", "pam.conf", "pam.d", "perl", "pki/ca-trust", "pki/java", "pki/tls/cert.pem",
    "pki/tls/certs", "pki/tls/openssl.cnf", "postgresql-common", "protocols", "python2*",
    "python3*", "redhat-release", "rmt", "rpc", "rpm", "security/limits.conf", "security/limits.d",
    "security/namespace.conf", "security/pam_env.conf", "services", "sgml", "shells", "skel",
    "ssh/ssh_config", "ssl/certs", "ssl/openssl.cnf", "system-release", "terminfo", "timezone",
    "ucf.conf", "vim", "vulkan", "xattr.conf", "xml",
)  # fmt: skip
_LEFT_OUT = ("ssl-cert-snakeoil*",)
"""Made by a package on installation with the machine's name in it."""
_VAR_EMPTY = (
    "cache/apt/archives/partial", "lib/apt/lists/partial", "lib/dpkg/updates", "lib/misc", "local",
    "log/apt", "mail", "opt", "spool",
)  # fmt: skip
# Below /var/lib: what package managers need to know what is installed.
_VAR_LIB = ("apt/extended_states", "dpkg", "pam", "python", "sgml-base", "ucf", "xml-core")
_VAR_LIB_LEFT_OUT = ("*-old", "*lock*", "available", "updates")
# Of login shells. Distributions set PATH there; here it is the sandbox's, its layers' and the call's, and stays.
_PROFILE = """\
if [ -z "${PATH-}" ]; then
  export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
fi
if [ "${PS1-}" ] && [ "${BASH-}" ] && [ "$BASH" != /bin/sh ]; then
  for i in /etc/bash.bashrc /etc/bashrc; do
    if [ -r "$i" ]; then . "$i"; fi
  done
elif [ "${PS1-}" ]; then
  if [ "$(id -u)" -eq 0 ]; then PS1='# '; else PS1='$ '; fi
fi
for i in /etc/profile.d/*.sh; do
  if [ -r "$i" ]; then . "$i"; fi
done
unset i
"""
_SECRET = re.compile(rb"PRIVATE KEY-----|://[^/\s:@\"'<>]*:[^/\s:@\"'<>$]+@")


def ca_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The CA variables of this machine, each with the path that its file has inside."""
    return {name: _path_inside(Path(environ[name])) for name in CA_FILES if _is_file(environ.get(name, ""))}


def _is_file(name: str) -> bool:
    return name.startswith("/") and Path(name).is_file()


def _path_inside(file: Path) -> str:
    """Its own path where the image shows that, else a copy's."""
    there = file.is_relative_to("/etc/ssl/certs") or file.is_relative_to("/usr")
    real = file.resolve()
    if there and (real.is_relative_to("/etc/ssl/certs") or real.is_relative_to("/usr")):
        return str(file)
    return f"{CA_FOLDER}/{'_'.join(file.parts[1:])}"


def inputs(environ: Mapping[str, str]) -> Iterator[str]:
    """Everything that decides what `write` makes, to be looked at by lstat."""
    yield from ("/etc/passwd", "/etc/group")
    for found in _listed():
        yield from _below(found)
    for name in _VAR_LIB:
        yield from (f"/var/lib/{name}{part}" for part in ("", "/status", "/info", "/alternatives"))
    yield from (environ[name] for name in ca_variables(environ))


def _listed() -> list[str]:
    """What the patterns match. This runs at every start, and `Path.glob` takes four times as long."""
    names = os.listdir("/etc")
    found: list[str] = []
    for pattern in _ETC:
        if "*" in pattern:
            found += (f"/etc/{name}" for name in fnmatch.filter(names, pattern))
        elif pattern in names or "/" in pattern:
            found.append(f"/etc/{pattern}")
    return sorted(path for path in found if os.path.lexists(path))


def _below(path: str) -> Iterator[str]:
    yield path
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
    except OSError:  # a file, or not for everybody to read
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _below(entry.path)
        else:
            yield entry.path


def write(root: Path, environ: Mapping[str, str]) -> None:
    """Make `etc` and `var` in the new root."""
    etc = root / "etc"
    etc.mkdir()
    for found in map(Path, _listed()):
        target = root / found.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy(found, target, _LEFT_OUT, screen=True)
    _write_own(etc)
    accounts.write(etc, Path("/etc"))
    for name, path in ca_variables(environ).items():
        _copy_certificates(Path(environ[name]), root / path.lstrip("/"))
    _write_var(root / "var")


def _write_own(etc: Path) -> None:
    """What would name the machine or its network, made anew."""
    own = {
        "environment": "",
        "fstab": "",
        **NAMES,
        "machine-id": "",
        "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\ngshadow: files\nhosts: files dns\n"
        "networks: files\nprotocols: files\nservices: files\nrpc: files\n",
    }
    for name, text in own.items():
        (etc / name).write_text(text)
        (etc / name).chmod(0o644)
    (etc / "profile").write_text(_PROFILE)
    (etc / "profile").chmod(0o644)
    for name in ("opt", "profile.d"):
        (etc / name).mkdir()


def _copy_certificates(file: Path, target: Path) -> None:
    if target.exists() or target.is_symlink() or file.is_relative_to("/usr"):
        return
    content = file.read_bytes()
    if not _SECRET.search(content):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod(0o644)


def _write_var(var: Path) -> None:
    for name in _VAR_EMPTY:
        (var / name).mkdir(parents=True, exist_ok=True)
    for name in _VAR_LIB:
        source = Path("/var/lib", name)
        if source.exists():
            (var / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
            _copy(source, var / "lib" / name, _VAR_LIB_LEFT_OUT, screen=False)
    (var / "tmp").mkdir()
    (var / "tmp").chmod(0o1777)
    (var / "run").symlink_to("/run")
    (var / "lock").symlink_to("/run/lock")


def _copy(source: Path, target: Path, left_out: tuple[str, ...], *, screen: bool) -> None:
    """Copy what everybody may read. `screen`: and that holds no secret."""
    found = source.lstat()
    if any(source.match(pattern) for pattern in left_out):
        return
    if stat.S_ISLNK(found.st_mode):
        target.symlink_to(source.readlink())
    elif stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IROTH:
        target.mkdir(exist_ok=True)
        for name in sorted(os.listdir(source)):
            _copy(source / name, target / name, left_out, screen=screen)
    elif stat.S_ISREG(found.st_mode) and found.st_mode & stat.S_IROTH:
        content = source.read_bytes()
        if not (screen and _SECRET.search(content)):
            target.write_bytes(content)
            target.chmod(stat.S_IMODE(found.st_mode) & 0o755)
            os.utime(target, ns=(found.st_mtime_ns, found.st_mtime_ns))
