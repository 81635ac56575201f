"""The node: what it resolves, refuses, gives to commands, and how sandboxes end."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

import shoal
from shoal.errors import InvalidRequest, NotFound, PermissionDenied, SandboxGone, Unsupported
from shoal.node.images import environment
from shoal.sdk.environments import publish_layer
from shoal.types import Image, Layer

# Leases and ends


def test_a_lease_that_ends_is_said_to_every_late_caller() -> None:
    box = shoal.Sandbox.create(ttl=0.5)
    running = box.commands.run("sleep 60", background=True)
    time.sleep(1)
    calls = (running.wait, lambda: box.commands.run("true"), lambda: box.files.read("/x"), box.info, box.changes)
    for late in (*calls, *calls):
        start = time.monotonic()
        with pytest.raises(SandboxGone) as caught:
            late()
        assert caught.value.reason == "lease_expired"
        assert time.monotonic() - start < 1
    assert box.id not in {info.id for info in shoal.Sandbox.list()}
    box.kill()


def test_a_command_is_cut_by_the_end_of_its_sandbox(box: shoal.Sandbox) -> None:
    running = box.commands.run("sleep 60", background=True)
    box.kill()
    with pytest.raises(SandboxGone) as caught:
        running.wait()
    assert caught.value.reason == "killed"
    box.kill()


def test_one_that_never_was_is_not_found() -> None:
    with pytest.raises(NotFound):
        shoal.Sandbox.connect("sb-0000000000000000")


# What is refused, and by which name

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a profile that is unknown": ({"profile": "huge"}, "profile"),
    "a profile that is no name": ({"profile": 5}, "profile"),
    "no processor": ({"profile": shoal.Profile(cpu=0)}, "profile.cpu"),
    "no memory": ({"profile": shoal.Profile(memory=0)}, "profile.memory"),
    "no process": ({"profile": shoal.Profile(processes=0)}, "profile.processes"),
    "too few files": ({"profile": shoal.Profile(open_files=1)}, "profile.open_files"),
    "an image that is unknown": ({"image": "debian:99"}, "image"),
    "a layer that is unknown": ({"layers": ["sha256:" + "0" * 64]}, "layers"),
    "a layer whose key makes no sense": ({"layers": ["../../etc"]}, "layers"),
    "layers as one text": ({"layers": "python:3.11"}, "layers"),
    "a layer that is none": ({"layers": [5]}, "layers"),
    "a workspace that is unknown": ({"workspace": "nothing-of-that-name"}, "workspace"),
    "a folder that is relative": ({"cwd": "w"}, "cwd"),
    "a time that has passed": ({"ttl": 0}, "ttl"),
    "a time that is none": ({"ttl": float("nan")}, "ttl"),
    "a variable without a name": ({"env": {"": "x"}}, "env"),
    "an environment that maps nothing": ({"env": "A=B"}, "env"),
    "an argument that there is not": ({"colour": "red"}, "colour"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name: str) -> None:
    arguments, field = WRONG[name]
    before = shoal.Sandbox.list()
    with pytest.raises(InvalidRequest) as caught:
        shoal.Sandbox.create(**arguments)
    assert caught.value.field == field
    assert shoal.Sandbox.list() == before


@pytest.mark.parametrize(
    "arguments",
    [
        {"tier": "microvm"},
        {"profile": "gpu_light"},
        {"volumes": ["x"]},
        {"snapshot": "x"},
        {"priority": 5},
        {"key": "x"},
    ],
)
def test_what_comes_later_says_so(arguments: dict[str, Any]) -> None:
    with pytest.raises(Unsupported) as caught:
        shoal.Sandbox.create(**arguments)
    assert next(iter(arguments)).split(".")[0] in str(caught.value)


def test_profiles_may_come_in_any_order() -> None:
    """Seats are made ready for the profile before; a larger or smaller one must fit in them all the same."""
    for profile in ("small", "basic", "small", "basic"):
        for _ in range(10):
            with shoal.Sandbox.create(profile=profile) as box:
                assert box.commands.run("true").ok


# Environment, working directory, user


def variable(box: shoal.Sandbox, name: str, **options: Any) -> str:
    return box.commands.run(["printenv", name], **options).stdout.rstrip("\n")


def test_a_call_may_set_variables_for_itself_only() -> None:
    with shoal.Sandbox.create(env={"A": "sandbox", "B": "kept"}) as box:
        assert variable(box, "A", env={"A": "call"}) == "call"
        assert variable(box, "B", env={"A": "call"}) == "kept"
        assert variable(box, "A") == "sandbox"


def test_values_are_taken_as_they_are() -> None:
    value = "  $HOME `id` \"'\\ \n\u2615 "
    with shoal.Sandbox.create(env={"A": value}) as box:
        assert box.commands.run(["python3", "-c", "import os; print(os.environ['A'], end='')"]).stdout == value


def test_working_directories(box: shoal.Sandbox) -> None:
    box.commands.run("mkdir -p a/b", check=True)
    assert box.commands.run("pwd").stdout == "/workspace\n"
    assert box.commands.run("pwd", cwd="a/b").stdout == "/workspace/a/b\n"
    assert box.commands.run("pwd", cwd="/tmp").stdout == "/tmp\n"
    with pytest.raises(NotFound, match="cwd"):
        box.commands.run("pwd", cwd="none")
    with pytest.raises(NotFound, match="cwd"):
        box.commands.run("pwd", cwd="/etc/passwd")


def test_a_working_directory_of_the_sandbox() -> None:
    with shoal.Sandbox.create(cwd="/tmp") as box:
        assert box.commands.run("pwd").stdout == "/tmp\n"
        box.files.write("x", "here")
        assert box.files.read("/tmp/x") == "here"


@pytest.mark.root
def test_users(box: shoal.Sandbox) -> None:
    box.commands.run("chmod 700 /workspace", check=True)
    assert box.commands.run("id -un; echo $HOME $USER", cwd="/").stdout == "root\n/root root\n"
    done = box.commands.run("id -un; id -g; echo $HOME $USER", user="user", cwd="/")
    assert done.stdout.startswith("user\n1000\n/home/user user")
    assert box.commands.run("id -u; id -g; echo $HOME", user=4321, cwd="/").stdout == "4321\n4321\n/\n"
    with pytest.raises(PermissionDenied, match="cwd"):
        box.commands.run("true", user="user")
    for user in ("nobody-here", "", True, 1.5, 70_000, -1):
        with pytest.raises(InvalidRequest) as caught:
            box.commands.run("true", user=user, cwd="/")  # type: ignore[arg-type]
        assert caught.value.field == "user"


@pytest.mark.root
def test_a_user_of_the_sandbox_holds_for_every_command() -> None:
    with shoal.Sandbox.create(user="user") as box:
        assert box.commands.run("id -un").stdout == "user\n"
        assert box.commands.run("id -un", user="root").stdout == "root\n"


def test_nothing_of_the_nodes_environment_comes_along(monkeypatch: pytest.MonkeyPatch, box: shoal.Sandbox) -> None:
    monkeypatch.setenv("SHOAL_TEST_SECRET", "zzz")
    assert "zzz" not in box.commands.run("env; cat /proc/*/environ | tr '\\0' '\\n'").stdout


# Layers and PATH


def test_a_higher_layer_comes_first_in_path_and_wins() -> None:
    image = Image("i", "sha256:0", (), {"PATH": "/usr/bin", "A": "image", "I": "image"})
    top = Layer(digest="a", source="/a", path=("/top/bin", "/top/sbin"), env={"A": "top"})
    low = Layer(digest="b", source="/b", path=("/low/bin",), env={"A": "low", "L": "low"})
    merged = environment(image, (top, low))
    assert merged == {"PATH": "/top/bin:/top/sbin:/low/bin:/usr/bin", "A": "top", "I": "image", "L": "low"}
    assert environment(Image("i", "d", ()), (top,))["PATH"] == "/top/bin:/top/sbin"


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory, shoal_home: Path) -> Layer:
    """A layer with /opt/x/bin/tool, which is in PATH."""
    tree = tmp_path_factory.mktemp("tool")
    (tree / "bin").mkdir()
    (tree / "bin" / "tool").write_text("#!/bin/sh\necho from the layer\n")
    (tree / "bin" / "tool").chmod(0o755)
    layer = asyncio.run(publish_layer(tree, "/opt/x"))
    return msgspec.structs.replace(layer, path=("/opt/x/bin",))


def test_a_tool_of_a_layer_is_found_by_name(tool: Layer) -> None:
    with shoal.Sandbox.create(layers=[tool]) as box:
        for command in ("tool", ["tool"]):
            assert box.commands.run(command).stdout == "from the layer\n"
        assert box.info().layers == (tool.digest,)
        assert box.commands.run("echo $PATH").stdout.startswith("/opt/x/bin:")


def test_the_sandbox_and_then_the_call_have_the_last_word_on_path(tool: Layer) -> None:
    with shoal.Sandbox.create(layers=[tool], env={"PATH": "/usr/bin:/bin"}) as box:
        with pytest.raises(NotFound, match="cmd"):
            box.commands.run(["tool"])
        assert box.commands.run(["tool"], env={"PATH": "/opt/x/bin"}).stdout == "from the layer\n"


def test_a_layer_by_its_digest_and_given_twice(tool: Layer) -> None:
    with shoal.Sandbox.create(layers=[tool.digest, tool.digest]) as box:
        assert box.commands.run("/opt/x/bin/tool").stdout == "from the layer\n"
        assert box.info().layers == (tool.digest,)


@pytest.mark.root
def test_a_layer_stays_as_it_is(tool: Layer) -> None:
    with shoal.Sandbox.create(layers=[tool]) as box:
        box.commands.run("echo 'echo changed' > /opt/x/bin/tool; rm -rf /usr/share/doc", check=True)
    with shoal.Sandbox.create(layers=[tool]) as box:
        assert box.commands.run("tool").stdout == "from the layer\n"
    assert Path("/usr/share/doc").is_dir()


# Listing


def test_metadata_finds_sandboxes() -> None:
    with shoal.Sandbox.create(metadata={"run": "7", "x": "y"}) as one, shoal.Sandbox.create(metadata={"run": "8"}):
        assert [info.id for info in shoal.Sandbox.list(metadata={"run": "7"})] == [one.id]
        assert shoal.Sandbox.list(metadata={"run": "9"}) == []
        assert shoal.Sandbox.kill_all(metadata={"run": "8"}) == 1
        assert shoal.Sandbox.list(metadata={"run": "8"}) == []
        assert one.commands.run("true").ok


def test_info(box: shoal.Sandbox) -> None:
    info = box.info()
    assert (info.id, info.state, info.tier) == (box.id, "running", "namespace")
    assert abs(info.created - time.time()) < 60
    assert info.image.startswith("sha256:")
