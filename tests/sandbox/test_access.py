"""What an access policy allows, when one is tighter than another, and the operations that it becomes."""

from __future__ import annotations

import os

import pytest

from shoal.errors import InvalidRequest
from shoal.sandbox.access import ALL, Access, add_domain, add_policy, check_tighter, inspect, library_folders, visit
from shoal.sandbox.plan import NONE, OWN_MOUNTS, Plan

RDONLY, NOEXEC = 1, 8
MAY_BE_MISSING, REAL_PATH, IN_PLACE, ONLY_LOOK = 1, 2, 8, 16
ROOT = 4


def steps(access: Access, *targets: str, old: Access = ALL, look: int = 0) -> list[tuple[object, ...]]:
    plan = Plan()
    add_policy(plan, ROOT, access, ("/", *targets), old=old, look=look)
    return [(name, *arguments[1:]) for name, arguments in plan.steps]


def test_the_entry_nearest_to_a_path_decides() -> None:
    access = Access(read_only=("/a", "/a/b/c"), writable=("/a/b", "/tmp"), hidden=("/a/b/x",))
    written = {path for path in ("/", "/a", "/a/b", "/a/b/c", "/a/bc", "/tmp/x", "/tmpx") if access.writes(path)}
    assert written == {"/a/b", "/tmp/x"}
    assert access.hides("/a/b/x/y")
    assert not access.hides("/a/b/xy")
    assert Access(programs=("/opt",)).runs("/opt/bin/x")
    assert not Access(programs=()).runs("/bin/sh")


def test_without_a_policy_there_is_nothing_to_do() -> None:
    assert steps(ALL, "/opt/env") == []


def test_a_read_only_path_is_covered_and_a_whole_mount_changed_in_place() -> None:
    assert steps(Access(read_only=("/etc", "/opt/env")), "/opt/env") == [
        ("restrict", "/opt/env", RDONLY, 0, IN_PLACE),
        ("restrict", "/etc", RDONLY, 0, 0),
    ]


def test_outer_paths_come_first_and_what_stays_writable_is_made_so_again() -> None:
    access = Access(read_only=("/w/a/keep",), writable=("/w/a", "/tmp"), hidden=("/w/a/x",))
    assert steps(access) == [
        ("restrict", "/", RDONLY, 0, IN_PLACE),
        ("restrict", "/dev/shm", RDONLY, 0, IN_PLACE),
        ("restrict", "/tmp", 0, RDONLY, 0),
        ("restrict", "/w/a", 0, RDONLY, 0),
        ("restrict", "/w/a/keep", RDONLY, 0, 0),
        ("hide", "/w/a/x", 0),
    ]


def test_nothing_is_executed_but_programs_and_libraries_mapped() -> None:
    found = steps(Access(programs=("/bin/sh",), writable=("/tmp",)), "/opt/env")
    assert found[:3] == [
        ("restrict", "/", RDONLY | NOEXEC, 0, IN_PLACE),
        ("restrict", "/dev/shm", RDONLY | NOEXEC, 0, IN_PLACE),
        ("restrict", "/opt/env", RDONLY | NOEXEC, 0, IN_PLACE),
    ]
    assert ("restrict", "/tmp", NOEXEC, RDONLY, 0) in found
    assert ("restrict", "/bin/sh", RDONLY, NOEXEC, 0) in found
    assert ("restrict", "/opt/env/lib", RDONLY, NOEXEC, MAY_BE_MISSING) in found
    assert {"/lib64", "/usr/lib", "/usr/local/lib"} <= set(library_folders(()))


def test_landlock_lets_programs_and_loaders_through_or_all() -> None:
    plan = Plan()
    add_domain(plan, Access(hidden=("/x",)))
    assert plan.steps == [("landlock", (["/"],))]
    plan = Plan()
    add_domain(plan, Access(programs=("/bin/sh",)))
    (_, (paths,)), last = plan.steps
    assert isinstance(paths, list)
    assert paths[0] == "/bin/sh"
    assert "/" not in paths
    assert last == ("no_memory_files", ())


def test_a_running_sandbox_is_looked_at_before_anything_is_changed() -> None:
    old, new = Access(hidden=("/a",)), Access(hidden=("/a", "/b"), writable=("/tmp",))
    start = [("visit", (77,)), ("open", (0, NONE, "/", os.O_PATH | os.O_DIRECTORY))]
    assert inspect(77, new, ("/",), old).steps == [
        *start,
        ("restrict", (0, "/tmp", 0, RDONLY, REAL_PATH | ONLY_LOOK)),
        ("hide", (0, "/b", REAL_PATH | ONLY_LOOK)),
        ("clone_all", (1, 0)),
        ("enter", (OWN_MOUNTS,)),
        ("send", (1,)),
    ]
    assert visit(77, new, ("/",), old).steps == [
        *start,
        ("restrict", (0, "/", RDONLY, 0, REAL_PATH | IN_PLACE)),
        ("restrict", (0, "/dev/shm", RDONLY, 0, REAL_PATH | IN_PLACE)),
        ("restrict", (0, "/tmp", 0, RDONLY, REAL_PATH)),
        ("hide", (0, "/b", REAL_PATH)),
        ("enter", (OWN_MOUNTS,)),
    ]


def test_a_narrower_policy_takes_back_what_the_old_one_left() -> None:
    old = Access(writable=("/tmp", "/w"), programs=("/bin/a", "/bin/b"))
    assert steps(Access(writable=("/w/in",), programs=("/bin/a",)), old=old) == [
        ("restrict", "/tmp", RDONLY, 0, 0),
        ("restrict", "/w", RDONLY, 0, 0),
        ("restrict", "/bin/b", NOEXEC, 0, 0),
        ("restrict", "/w/in", NOEXEC, RDONLY, 0),
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (ALL, Access(hidden=("/a",), read_only=("/b",), writable=("/c",), programs=())),
        (Access(hidden=("/a/b",)), Access(hidden=("/a",))),
        (Access(read_only=("/a",)), Access(writable=("/b",))),
        (Access(read_only=("/a",)), Access(hidden=("/a",))),
        (Access(writable=("/a",)), Access(writable=("/a/b",), read_only=("/a/b/c",))),
        (Access(programs=("/x", "/y")), Access(programs=("/y",))),
    ],
)
def test_what_is_tighter(old: Access, new: Access) -> None:
    check_tighter(old, new)
    with pytest.raises(InvalidRequest):
        check_tighter(new, old)


def test_a_path_that_stays_writable_is_not_covered_by_a_new_one_above_it() -> None:
    old = Access(writable=("/a", "/a/b"))
    with pytest.raises(InvalidRequest, match="/a/b"):
        check_tighter(old, Access(read_only=("/a",), writable=("/a/b",)))
