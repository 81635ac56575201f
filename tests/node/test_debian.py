"""Debian as an image: made of its packages inside a sandbox, found again, and a system that works."""

from __future__ import annotations

import pytest

import shoal
from shoal.errors import BuildFailed, InvalidRequest
from shoal.image.debian import DebianSpec, spec_of
from shoal.sdk.embedded import call, engine

pytestmark = [pytest.mark.root, pytest.mark.index]
MIRROR = shoal.NetworkPolicy(allow=("deb.debian.org:80",))


@pytest.fixture(scope="module")
def debian() -> str:
    return call(engine().builds.debian(DebianSpec(), "debian:bookworm"))


def test_it_is_a_debian_and_nothing_of_this_machine(debian: str) -> None:
    with shoal.Sandbox.create(image="debian:bookworm") as box:
        assert box.info().image == debian
        run = box.commands.run
        assert "VERSION_CODENAME=bookworm" in run("cat /etc/os-release").stdout
        assert run("test -c /dev/null && echo x > /dev/null && test -w /workspace && mount -t tmpfs x /mnt").exit_code
        assert not run("which python3 git curl").stdout
        assert "10.0.2.15" in run("getent hosts sandbox").stdout
        assert not run("find / -xdev -newermt 2001-01-02 -type f -size +0 -path '*/var/log/*'").stdout
        assert run("find /dev /tmp /run -type f").stdout == ""
        assert run("dpkg --verify").stdout == ""


def test_packages_can_be_installed_in_a_sandbox_of_it(debian: str) -> None:
    with shoal.Sandbox.create(image=debian, network=MIRROR) as box:
        command = "apt-get update -q && apt-get install -q -y --no-install-recommends jq && echo '{}' | jq -c ."
        result = box.commands.run(command, timeout=300, check=True)
        assert result.stdout.endswith("{}\n")


def test_it_is_found_again(debian: str) -> None:
    assert call(engine().builds.debian(DebianSpec(), "again")) == debian


def test_a_package_that_does_not_exist_is_named() -> None:
    with pytest.raises(BuildFailed, match="no-such-package-here") as caught:
        call(engine().builds.debian(DebianSpec(packages=("no-such-package-here",)), "x"))
    assert "apt" in caught.value.log


@pytest.mark.parametrize("spec", [DebianSpec("Book worm"), DebianSpec(packages=("a b",)), DebianSpec(packages=("-o",))])
def test_what_is_no_name_is_refused(spec: DebianSpec) -> None:
    with pytest.raises(InvalidRequest):
        call(engine().builds.debian(spec, "x"))


def test_names_of_what_can_be_built() -> None:
    assert spec_of("debian:trixie", ("git",)) == DebianSpec("trixie", ("git",))
    assert "git" in spec_of("shoal-base").packages
    with pytest.raises(InvalidRequest, match="shoal-base"):
        spec_of("ubuntu:24.04")
