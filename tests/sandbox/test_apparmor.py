"""The profile is used where it is loaded, and only there. What it does is not tried: no AppArmor here."""

from __future__ import annotations

from pathlib import Path

from shoal.sandbox import apparmor
from shoal.sandbox.compose import CAPABILITY_MASK
from shoal.sandbox.plan import Plan


def test_it_is_found_in_the_kernels_list(tmp_path: Path) -> None:
    listing = tmp_path / "profiles"
    listing.write_text("/usr/bin/man (enforce)\nshoal-sandbox (enforce)\n")
    assert apparmor.is_loaded(listing)
    listing.write_text("shoal-sandbox-other (enforce)\nlsb_release (complain)\n")
    assert not apparmor.is_loaded(listing)
    assert not apparmor.is_loaded(tmp_path / "absent")


def test_init_enters_it_by_one_write() -> None:
    plan = Plan()
    apparmor.confine(plan)
    assert str(plan) == "step 0, write(-1, '/proc/self/attr/apparmor/current', 'changeprofile shoal-sandbox')"


def test_the_profile_allows_the_capabilities_that_sandboxes_keep() -> None:
    lines = [line.strip(" ,") for line in apparmor.profile_file().read_text().splitlines()]
    kept = {line.split()[1] for line in lines if line.startswith("capability ")}
    assert len(kept) == CAPABILITY_MASK.bit_count()
    assert {"chown", "sys_chroot", "setfcap"} <= kept
    assert not {"sys_admin", "sys_ptrace", "sys_resource", "net_admin"} & kept
