"""The audit of system calls: what it tells, and that a hostile sandbox can neither blind it nor flood the node."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import residue
import shoal
from shoal.sandbox.calls import answers

from .intruder import SMALL, compiled, init_pid, node, python, still_works, within

pytestmark = pytest.mark.root


@pytest.fixture
def watched() -> Iterator[shoal.Sandbox]:
    audit = shoal.Audit(syscalls=("connect", "execve", "mount", "access", "sync"), records=5000)
    with shoal.Sandbox.create(profile=SMALL, audit=audit) as box:
        yield box


def auditors() -> list[int]:
    return [process.pid for process in residue.descendants() if process.name == "shoal-audit"]


def kinds(box: shoal.Sandbox, kind: str) -> list[shoal.AuditRecord]:
    return [record for record in box.audit() if record.kind == kind]


def test_it_tells_who_did_what(watched: shoal.Sandbox) -> None:
    code = """
    for family, address in ((2, ("1.2.3.4", 80)), (10, ("::1", 443)), (1, "/tmp/a\\nb"), (1, "\\0hidden")):
        socket.socket(family).connect_ex(address)
    answer(os.getpid())
    """
    pid = python(watched, code, user="user")
    found = kinds(watched, "connect")
    assert [record.detail for record in found] == ["1.2.3.4:80", "[::1]:443", "/tmp/a\\nb", "@hidden"]
    assert {(record.pid, record.allowed) for record in found} == {(pid, True)}
    assert all(record.program.startswith("/usr/") and "python" in record.program for record in found)
    assert abs(found[0].time - time.time()) < 60


def test_a_call_is_told_before_it_is_done(watched: shoal.Sandbox) -> None:
    for _ in range(20):
        last = max((record.time for record in watched.audit()), default=0.0)
        watched.commands.run(["/bin/true"])
        assert [record.detail for record in watched.audit(since=last)][:1] == ["/bin/true"]


def test_what_no_sandbox_may_do_stays_refused(watched: shoal.Sandbox) -> None:
    result = watched.commands.run("mount -t tmpfs none /mnt; sync && echo synced")
    assert "permission denied" in result.stderr
    assert result.stdout == "synced\n"
    (tried,) = kinds(watched, "mount")
    assert (tried.detail, tried.allowed) == ("none", False)


def test_pointers_to_nowhere_and_text_without_end(watched: shoal.Sandbox) -> None:
    source = r"""
    #include <sys/mman.h>
    #include <string.h>
    #include <unistd.h>
    int main() {
        char *page = mmap(0, 8192, 3, 0x22, -1, 0);
        munmap(page + 4096, 4096);
        memset(page, 'x', 4096);
        access(page + 4090, 0); access((char *)8, 0); access(0, 0); access((char *)-1L, 0);
        strcpy(page + 4096 - 7, "at end"); access(page + 4096 - 7, 0);
        char *own = mmap((void *)0x10000000, 1 << 20, 3, 0x32, -1, 0);
        memset(own, 'y', 1 << 20); access(own, 0);
        access("\x1b[2J\xff\n", 0);
        return 0;
    }
    """
    program = compiled(watched, source)
    watched.commands.run([program], check=True)
    details = [record.detail for record in watched.audit() if record.program == program]
    assert details[-7:] == ["xxxxxx", "", "", "", "at end", "y" * 256, r"\x1b[2J\xff\n"]


def test_a_thread_with_thousands_of_groups_is_told_by_its_number(watched: shoal.Sandbox) -> None:
    """What /proc says of it would not fit into any buffer."""
    code = """
    import threading
    os.setgroups(list(range(30000)))
    found = []
    def act():
        os.access("/many groups", 0)
        found.append(threading.get_native_id())
    thread = threading.Thread(target=act); thread.start(); thread.join()
    answer(found[0])
    """
    thread = python(watched, code)
    assert [record.pid for record in kinds(watched, "access") if record.detail == "/many groups"] == [thread]


def test_a_flood_is_counted_and_costs_the_node_little(watched: shoal.Sandbox) -> None:
    calls = 40_000
    source = f'#include <unistd.h>\nint main() {{ for (int i = 0; i < {calls}; i++) access("/flood", 0); return 0; }}'
    program = compiled(watched, source)
    start = max(record.time for record in watched.audit())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    watched.commands.run([program], check=True, timeout=60)
    time.sleep(0.5)
    records = watched.audit(since=start)
    told = sum(record.detail == "/flood" for record in records)
    missing = sum(int(record.detail) for record in records if record.kind == "dropped")
    assert 1000 <= told <= 5000
    assert calls <= told + missing <= calls + 100, "the rest are those of the loader"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10
    still_works(watched)


def test_the_auditor_is_out_of_reach(watched: shoal.Sandbox) -> None:
    (auditor,) = auditors()
    names = watched.commands.run("cat /proc/[0-9]*/comm", check=True).stdout
    assert "shoal-audit" not in names
    assert python(watched, f"answer(tried(os.kill, {auditor}, 9))") == "ESRCH"
    assert "CapEff:\t0000000000080000" in Path(f"/proc/{auditor}/status").read_text(), "CAP_SYS_PTRACE and no other"
    assert set(residue.descriptors(auditor)) == {0, 1, 2, 3, 4}


def test_a_command_that_waits_for_a_stopped_auditor_can_be_ended(watched: shoal.Sandbox) -> None:
    (auditor,) = auditors()
    os.kill(auditor, signal.SIGSTOP)
    try:
        within(20, lambda: watched.commands.run(["/bin/true"], timeout=1))
    finally:
        os.kill(auditor, signal.SIGCONT)
    still_works(watched)


def test_without_its_auditor_a_sandbox_ends() -> None:
    """What is pending gets ENOSYS from the kernel; nothing goes on unseen, and nothing waits for ever."""
    audit = shoal.Audit(syscalls=("access",))
    box = shoal.Sandbox.create(profile=SMALL, audit=audit)
    (auditor,) = auditors()
    os.kill(auditor, signal.SIGSTOP)
    failure: list[BaseException] = []

    def wait() -> None:
        try:
            box.commands.run(["/bin/ls"])
        except shoal.ShoalError as error:
            failure.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.3)
    os.kill(auditor, signal.SIGKILL)
    waiting.join(20)
    assert isinstance(failure[0], shoal.SandboxGone)
    with pytest.raises(shoal.SandboxGone) as gone:
        box.commands.run(["/bin/true"])
    assert gone.value.reason == "audit_lost"
    assert residue.settled(auditors) == []


def test_an_end_that_has_another_cause_is_not_the_audits() -> None:
    box = shoal.Sandbox.create(profile=SMALL, audit=shoal.Audit(syscalls=("access",)))
    os.kill(init_pid(box), signal.SIGKILL)
    assert residue.settled(lambda: box.id in [info.id for info in shoal.Sandbox.list()]) is False
    with pytest.raises(shoal.SandboxGone) as gone:
        box.commands.run(["/bin/true"])
    assert gone.value.reason == "init_died"


def test_every_call_can_be_audited() -> None:
    """Those too by which init and the audit itself live."""
    names = tuple(name for name in answers() if name != "sendmsg")
    known = [name for name in names if _exists(name)]
    with shoal.Sandbox.create(profile=SMALL, audit=shoal.Audit(syscalls=tuple(known))) as box:
        still_works(box)
        assert kinds(box, "execve")
    assert residue.settled(auditors) == []


def _exists(name: str) -> bool:
    from shoal.sandbox.seccomp import responses

    try:
        responses((name,))
    except shoal.InvalidRequest:
        return False
    return True


@pytest.mark.parametrize(
    "audit",
    [
        shoal.Audit(syscalls=("frobnicate",)),
        shoal.Audit(syscalls=("sendmsg",)),
        shoal.Audit(syscalls="connect"),  # type: ignore[arg-type]
        shoal.Audit(syscalls=(1,)),  # type: ignore[arg-type]
        shoal.Audit(records=0),
        "connect",
    ],
)
def test_what_is_wrong_is_said(audit: shoal.Audit) -> None:
    with pytest.raises(shoal.InvalidRequest, match="audit"):
        shoal.Sandbox.create(audit=audit)


def test_a_sandbox_without_one_has_no_part_of_it(small: shoal.Sandbox) -> None:
    assert auditors() == []
    assert small.audit() == []
    live = node()._find(small.id).box
    assert getattr(live, "_listener", None) is None
