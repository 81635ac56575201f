import json
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from shoal.bench import peers
from shoal.errors import PlatformError, Unsupported
from shoal.types import PROFILES, Layer

USR = Layer(digest="host:/usr", source="/usr", target="/usr")


def config():
    """As the runtime reads it."""
    made = peers.oci_config(Path("/root/of/it"), [USR], PROFILES["basic"], "group-1")
    return json.loads(msgspec.json.encode(made))


def test_a_bundle_has_all_namespaces_and_ids_of_its_own():
    linux = config()["linux"]
    assert {space["type"] for space in linux["namespaces"]} == {
        "pid", "network", "ipc", "uts", "mount", "user", "cgroup",
    }  # fmt: skip
    (ids,) = linux["uidMappings"]
    assert ids["containerID"] == 0
    assert ids["hostID"] > 0
    assert ids["size"] == 65_536


def test_a_bundle_has_the_limits_of_the_profile():
    resources = config()["linux"]["resources"]
    basic = PROFILES["basic"]
    assert resources["memory"]["limit"] == basic.memory
    assert resources["cpu"]["quota"] / resources["cpu"]["period"] == basic.cpu
    assert resources["pids"]["limit"] == basic.processes


def test_a_bundle_binds_the_hosts_directories_read_only():
    found = config()
    assert found["root"] == {"path": "/root/of/it", "readonly": True}
    usr = next(mount for mount in found["mounts"] if mount["destination"] == "/usr")
    assert usr["source"] == "/usr"
    assert "ro" in usr["options"]
    assert found["process"]["noNewPrivileges"]


@pytest.mark.skipif(shutil.which("crun") is None, reason="crun is not installed")
def test_a_bundle_is_built_like_the_runtimes_own(tmp_path):
    subprocess.run(["crun", "spec"], cwd=tmp_path, check=True)
    own = json.loads((tmp_path / "config.json").read_text())
    made = config()
    assert set(made) <= set(own)
    assert set(made["process"]) <= set(own["process"])
    assert set(made["linux"]) <= {*own["linux"], "uidMappings", "gidMappings", "cgroupsPath"}


def test_bubblewrap_gets_the_same_namespaces_and_the_filter():
    argv = peers.bwrap_arguments(Path("/root/of/it"), [USR], 7)
    assert {f"--unshare-{name}" for name in ("user", "pid", "net", "ipc", "uts", "cgroup")} <= set(argv)
    assert argv[argv.index("--seccomp") + 1] == "7"
    assert argv[argv.index("/usr") - 1 : argv.index("/usr") + 2] == ["--ro-bind", "/usr", "/usr"]
    assert argv[-1] == "true"


def test_a_missing_program_is_named_with_its_package(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Unsupported, match=r"bwrap is not installed.*bubblewrap"):
        peers.find_program("bwrap")


def test_a_failing_program_is_no_measurement():
    with pytest.raises(PlatformError, match="ended with 1"):
        peers.spawn([shutil.which("false") or "/bin/false"])
