"""Access policies: what commands may read, change and execute, from the start and tightened later. Root or not."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

import shoal
from shoal import AccessPolicy, Audit, AuditRecord
from shoal.errors import InvalidRequest, PermissionDenied, ShoalError, Unsupported

SHELL = "/usr/bin/bash"
TOOLS = [SHELL, "/usr/bin/cat", "/usr/bin/cp", "/usr/bin/ls", "/usr/bin/chmod"]


def outcome(box: shoal.Sandbox, command: str) -> str:
    """What it printed, or what kept it from that, as the C library words it."""
    result = box.commands.run([SHELL, "-c", command], timeout=20)
    if result.exit_code == 0:
        return result.stdout.strip()
    for words in ("Permission denied", "Read-only file system", "No such file", "not permitted", "failed to map"):
        if words in result.stderr:
            return words
    return result.stderr or f"exit code {result.exit_code}"


@pytest.fixture
def policed() -> Callable[..., shoal.Sandbox]:
    def create(**policy: object) -> shoal.Sandbox:
        return shoal.Sandbox.create(access=AccessPolicy(**policy))  # type: ignore[arg-type]

    return create


def test_read_only_paths_refuse_every_change_and_nothing_else(policed: Callable[..., shoal.Sandbox]) -> None:
    with policed(read_only=["/etc", "/usr/bin/cat"]) as box:
        for command in (
            "echo x > /etc/hostname", "touch /etc/new", "rm /etc/hostname", "mkdir /etc/d", "chmod 600 /etc/hostname",
            "touch -d 2001-01-01 /etc/hostname", "ln -s x /etc/link", "mv /etc/hostname /etc/other", "> /usr/bin/cat",
            "chmod 700 /usr/bin/cat",
        ):  # fmt: skip
            assert outcome(box, command) == "Read-only file system", command
        assert outcome(box, "cat /etc/hostname") == "sandbox"
        assert outcome(box, "mv /usr/bin/cat /usr/bin/dog") != ""
        assert outcome(box, "touch /workspace/new /tmp/new && echo done") == "done"


def test_hidden_paths_cannot_be_used_in_any_way(policed: Callable[..., shoal.Sandbox]) -> None:
    with policed(hidden=["/var", "/etc/passwd", "/usr/bin/id"]) as box:
        for command in (
            "ls /var", "cat /etc/passwd", "stat /var/lib", "cd /var", "/usr/bin/id", "echo x > /var/new",
            "echo x > /etc/passwd", "cat /proc/self/root/etc/passwd", "ls /proc/$$/root/var", "ls /var/../var/lib",
        ):  # fmt: skip
            assert outcome(box, command) == "Permission denied", command
        for command in ("rm /etc/passwd", "mv /etc/passwd /etc/p", "rmdir /var", "mv /var /v", "chmod 777 /var"):
            assert box.commands.run(command).exit_code != 0, command
        assert box.commands.run("ln /etc/passwd /tmp/p").exit_code != 0
        assert outcome(box, "ls /etc | cat > /dev/null; echo fine") == "fine"
        with pytest.raises(PermissionDenied):
            box.commands.run(["/usr/bin/id"])
        with pytest.raises(PermissionDenied):
            box.commands.run(["/bin/true"], cwd="/var/lib")


def test_writable_paths_are_the_only_ones_that_are(policed: Callable[..., shoal.Sandbox]) -> None:
    with policed(writable=["/workspace", "/tmp"]) as box:
        assert outcome(box, "touch /workspace/a /tmp/b && rm /tmp/b && echo done") == "done"
        for place in ("/", "/root", "/etc", "/usr", "/dev/shm", "/dev"):
            assert outcome(box, f"touch {place}/new") == "Read-only file system", place
        assert outcome(box, "echo x > /dev/null; echo $$ > /proc/self/comm; echo done") == "done"
    with policed(writable=[]) as box:
        assert outcome(box, "touch /workspace/new") == "Read-only file system"


def test_the_longer_path_decides(box: shoal.Sandbox) -> None:
    box.files.make_dir("/workspace/a/b/c")
    read_only = ["/workspace/a", "/workspace/a/b/c"]
    box.set_access(AccessPolicy(read_only=read_only, writable=["/workspace", "/workspace/a/b"]))
    assert outcome(box, "touch /workspace/new /workspace/a/b/new && echo done") == "done"
    for place in ("/workspace/a", "/workspace/a/b/c", "/tmp"):
        assert outcome(box, f"touch {place}/new") == "Read-only file system", place


def test_only_programs_are_executed(policed: Callable[..., shoal.Sandbox]) -> None:
    with policed(programs=TOOLS) as box:
        assert outcome(box, "cat /etc/hostname") == "sandbox"
        for command in (
            "/usr/bin/id", "cp /usr/bin/id /tmp/id; /tmp/id", "cp /usr/bin/cat /tmp/cat; /tmp/cat /etc/hostname",
            "cp /usr/bin/id /dev/shm/id; /dev/shm/id", "exec id",
            "cp /dev/null /tmp/s; echo '#!/usr/bin/bash' > /tmp/s; chmod +x /tmp/s; /tmp/s",
            "echo x > /usr/bin/cat", "cp /usr/bin/id /usr/lib/id", "echo x > /usr/lib/new",
        ):  # fmt: skip
            assert outcome(box, command) in ("Permission denied", "Read-only file system"), command
        with pytest.raises(PermissionDenied):
            box.commands.run(["/usr/bin/id"])
        assert box.commands.run([SHELL, "-c", "mv /tmp /usr/bin/cat"]).exit_code != 0


def test_a_program_may_be_named_by_a_link_and_a_folder_stands_for_all_in_it(
    policed: Callable[..., shoal.Sandbox],
) -> None:
    with policed(programs=["/bin/sh", SHELL, "/usr/local", "/usr/bin/cat"]) as box:
        assert box.commands.run(["/bin/sh", "-c", "cat /etc/hostname"]).stdout == "sandbox\n"
        assert outcome(box, "/usr/bin/id") == "Permission denied"


def test_it_can_be_tightened_while_it_runs(box: shoal.Sandbox) -> None:
    running = box.commands.run(
        [SHELL, "-c", "read; cat /etc/passwd; touch /root/new; ls /; /usr/bin/id"], background=True
    )
    box.set_access(AccessPolicy(hidden=["/etc/passwd"]))
    box.set_access(AccessPolicy(hidden=["/etc"], writable=["/workspace"]))
    box.set_access(AccessPolicy(hidden=["/etc"], writable=["/workspace"], programs=[SHELL, "/usr/bin/cat"]))
    for command, refusal in (
        ("cat /etc/hostname", "Permission denied"),
        ("> /root/new", "Read-only file system"),
        ("/usr/bin/id", "Permission denied"),
        ("cat /usr/lib/os-release > /workspace/copy; echo done", "done"),
    ):
        assert outcome(box, command) == refusal, command
    running.send_stdin("go\n")
    result = running.wait()
    assert result.stdout == ""
    assert result.stderr.count("Permission denied") == 4, result.stderr


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ({"hidden": ["/srv"]}, {}, "access.hidden"),
        ({"hidden": ["/srv"]}, {"hidden": ["/srv/a"]}, "access.hidden"),
        ({"read_only": ["/etc"]}, {"read_only": ["/usr"]}, "access.read_only"),
        ({"read_only": ["/etc"]}, {"read_only": ["/etc"], "writable": ["/etc/apt", "/tmp"]}, "access.writable"),
        ({"writable": ["/tmp"]}, {"writable": ["/tmp", "/root"]}, "access.writable"),
        ({"writable": ["/tmp"]}, {}, "access.writable"),
        ({"programs": [SHELL]}, {"programs": [SHELL, "/usr/bin/id"]}, "access.programs"),
        ({"programs": [SHELL]}, {}, "access.programs"),
    ],
)
def test_it_cannot_be_loosened(old: dict[str, list[str]], new: dict[str, list[str]], field: str) -> None:
    with shoal.Sandbox.create(access=AccessPolicy(**old)) as box:
        with pytest.raises(InvalidRequest) as caught:
            box.set_access(AccessPolicy(**new))
        assert caught.value.field == field
        box.set_access(AccessPolicy(**old))


def test_the_policy_is_for_commands_and_not_for_their_owner() -> None:
    policy = AccessPolicy(read_only=["/etc"], hidden=["/root"])
    with shoal.Sandbox.create(access=policy) as box, shoal.Sandbox.create() as later:
        later.set_access(policy)
        for either in (box, later):
            either.files.write("/etc/new", "written")
            either.files.write("/root/answers", "secret")
            assert either.files.read("/root/answers") == "secret"
            assert outcome(either, "cat /etc/new") == "written"
            assert outcome(either, "cat /root/answers") == "Permission denied"
            assert {change.path for change in either.changes()} >= {"/etc/new", "/root/answers"}


def test_a_call_that_fails_leaves_the_owner_s_view_and_can_be_made_again(box: shoal.Sandbox) -> None:
    writer = box.commands.run([SHELL, "-c", "exec 9>/workspace/log; read"], background=True)
    while not box.files.exists("/workspace/log"):
        time.sleep(0.01)
    policy = AccessPolicy(hidden=["/etc"], writable=["/tmp"])
    with pytest.raises(InvalidRequest, match="open for writing"):
        box.set_access(policy)
    writer.kill()
    writer.wait()
    box.set_access(policy)
    box.files.write("/etc/new", "x")
    assert outcome(box, "touch /workspace/new") == "Read-only file system"


def test_it_can_be_tightened_a_number_of_times(box: shoal.Sandbox) -> None:
    names = [f"/workspace/{number}" for number in range(13)]
    for name in names:
        box.files.make_dir(name)
    for count in range(1, 13):
        box.set_access(AccessPolicy(hidden=names[:count]))
        box.set_access(AccessPolicy(hidden=names[:count]))
    assert outcome(box, "ls /workspace/11") == "Permission denied"
    with pytest.raises(Unsupported):
        box.set_access(AccessPolicy(hidden=names))
    assert outcome(box, "ls /workspace/12; echo fine") == "fine"


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ({"hidden": ["etc"]}, "access.hidden"),
        ({"hidden": "/etc"}, "access.hidden"),
        ({"hidden": ["/a\0b"]}, "access.hidden"),
        ({"hidden": ["/etc/../usr"]}, "access.hidden"),
        ({"hidden": ["/"]}, "access.hidden"),
        ({"hidden": ["/not/there"]}, "access.hidden"),
        ({"hidden": ["/et*"]}, "access.hidden"),
        ({"hidden": ["/proc/kcore"]}, "access.hidden"),
        ({"hidden": ["/x"] * 300}, "access.hidden"),
        ({"read_only": ["/not/there"]}, "access"),
        ({"read_only": [1]}, "access.read_only"),
        ({"read_only": ["/sys"]}, "access.read_only"),
        ({"read_only": ["/tmp"], "writable": ["/tmp"]}, "access.writable"),
        ({"hidden": ["/usr"], "writable": ["/usr/share"]}, "access.writable"),
        ({"hidden": ["/usr"], "programs": ["/usr/bin/cat"]}, "access.programs"),
        ({"programs": ["/"]}, "access.programs"),
        ({"programs": ["/opt"], "writable": ["/opt/x"]}, "access.writable"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_name(policy: dict[str, list[str]], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        shoal.Sandbox.create(access=AccessPolicy(**policy))
    assert caught.value.field == field


def test_what_is_for_later_says_so() -> None:
    with pytest.raises(Unsupported, match="sealed"):
        shoal.Sandbox.create(access=AccessPolicy(sealed=["/tests"]))
    with pytest.raises(InvalidRequest):
        shoal.Sandbox.create(access={"hidden": ["/etc"]})  # type: ignore[arg-type]


def test_a_command_that_is_refused_is_written_down(policed: Callable[..., shoal.Sandbox]) -> None:
    with policed(programs=[SHELL]) as box:
        before = time.time()
        for program in ("/usr/bin/id", "/usr/bin/env"):
            with pytest.raises(PermissionDenied):
                box.commands.run([program])
        assert outcome(box, "echo fine") == "fine"
        first, second = box.audit()
        assert (first.kind, first.program, first.allowed) == ("denied", "/usr/bin/id", False)
        assert before <= first.time <= second.time <= time.time()


# Files that are opened


def opened(records: list[AuditRecord]) -> dict[str, AuditRecord]:
    return {record.detail: record for record in records if record.kind == "file"}


@pytest.mark.root
def test_files_that_are_opened_are_written_down_on_request() -> None:
    with shoal.Sandbox.create(audit=Audit(files=True)) as box, shoal.Sandbox.create() as other:
        other.commands.run("cat /etc/group")
        box.files.write("/workspace/a name\nwith a line", "x")
        program = "cat /etc/hostname /workspace/*; echo x > /dev/shm/memory; echo; echo $$; sleep 0.2; :"
        pid = int(box.commands.run([SHELL, "-c", program]).stdout.split()[-1])
        records = opened(box.audit())
        assert records["open /etc/hostname"].allowed
        assert "open /workspace/a name\nwith a line" in records
        assert (records["open /dev/shm/memory"].pid, records["open /dev/shm/memory"].program) == (pid, "bash")
        assert "execute /usr/bin/cat" in records
        assert "open /etc/group" not in records
        assert other.audit() == []


@pytest.mark.root
def test_the_audit_is_bounded_and_counts_what_it_drops() -> None:
    with shoal.Sandbox.create(audit=Audit(files=True, records=50)) as box:
        box.commands.run("for n in $(seq 500); do : > /tmp/$n; done", check=True)
        first, *others = box.audit()
        assert len(others) == 50
        assert first.kind == "dropped"
        assert int(first.detail) >= 400
        assert box.audit(since=others[-2].time) == others[-1:]


def test_an_audit_of_nothing_costs_no_more_than_a_list() -> None:
    with shoal.Sandbox.create(audit=Audit()) as box:
        box.commands.run("cat /etc/hostname")
        assert box.audit() == []


@pytest.mark.parametrize("records", [0, -1, 10**9])
def test_limits_of_an_audit_are_checked(records: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        shoal.Sandbox.create(audit=Audit(records=records))
    assert caught.value.field == "audit.records"
    with pytest.raises(ShoalError):
        shoal.Sandbox.create(audit="files")  # type: ignore[arg-type]
