"""What each kind of sandbox is held to, as literal tables.

The namespace tier claims every test here, run by root and by an ordinary user alike, but for `REFUSALS`. The fake tier
claims what `FAKE` names and nothing else.
"""

from __future__ import annotations

import os
import tempfile
from fnmatch import fnmatch
from functools import cache
from typing import NamedTuple

from shoal.node.doctor.finding import Finding, Scene
from shoal.node.doctor.probe import PROBES, examine

CASES = {
    "t01": "200 MB of output",
    "t02": "bytes that are no text",
    "t03": "characters that are split between pieces",
    "t04": "a background child that keeps the pipes",
    "t05": "a timeout that ends the whole tree",
    "t06": "output that is kept on a timeout",
    "t07": "no stdin given",
    "t08": "awkward shell text",
    "t09": "strict mode",
    "t10": "an end marker that is forged",
    "t11": "orphans that are reaped",
    "t12": "a sandbox that is hard to kill",
    "t13": "whose fault it is that memory ran out",
    "t14": "a fork bomb and its neighbour",
    "t15": "a full disk on every mount",
    "t16": "sizes of files",
    "t17": "names of files",
    "t18": "links that race against the host",
    "t19": "environment and PATH",
}
"""Each once broke a system like this one; a test of a case has its number in its name."""

FAKE = {
    "test_a_sandbox_says_what_it_is",
    "test_a_model_cannot_switch_its_limits_off",
    "test_several_at_once",
    "test_t01_much_output",
    "test_t02_bytes_that_are_no_text",
    "test_t03_split_characters",
    "test_t03_split_characters_of_a_background_command",
    "test_t04_background_child_keeps_the_pipes",
    "test_t06_output_is_kept_on_timeout",
    "test_t06_silence",
    "test_t07_no_stdin",
    "test_t07_stdin_is_fed_and_closed",
    "test_t08_awkward_shell_text",
    "test_t09_strict_mode_ends_only_its_own_command",
    "test_t10_a_command_may_print_anything",
    "test_t16_sizes",
    "test_t17_names",
    "test_t17_nfc_and_nfd_are_two_files",
}


class Refusal(NamedTuple):
    """Something that the kernel does not let an ordinary user do."""

    probe: str
    """What of `shoal doctor` says so. Where it finds that all is well, the tests are run."""
    why: str
    tests: tuple[str, ...]
    """Patterns of the names of tests that can't pass without."""


REFUSALS = {
    "one id": Refusal(
        "host.privilege",
        "the ids of others are mapped by root only: a sandbox has one user, and no file belongs to another",
        (
            "test_t19_environment*",
            "test_the_numbers_cannot_be_changed_or_taken_away?user*",
            "test_an_atomic_write_keeps_the_owner*",
            "test_a_write_asks_whether_the_file_may_be_written*",
            "test_another_user*",
            "test_as_another_user*",
            "test_t19_the_same_environment_everywhere*",
        ),
    ),
    "memory": Refusal(
        "cgroup.memory",
        "the memory controller's files are root's: nothing limits a sandbox's memory or counts who ran out of it",
        ("test_t13_*", "test_running_out_of_memory_is_told*"),
    ),
    "trees": Refusal(
        "cgroup.kill",
        "groups are made by root only: a process that left its session is not known to belong to a command",
        (
            "test_t05_*detached*",
            "test_t05_*double fork*",
            "test_a_timeout_ends_the_command_and_not_the_session*",
            "test_a_shell_that_cannot_be_left_is_ended*",
            "test_what_it_used_is_told*",
            "test_close_ends_all_of_it*",
        ),
    ),
    "owners of /usr": Refusal(
        "layers.idmap_usr",
        "only root can show the machine's own directories as owned by the sandbox's root",
        ("test_without_bash*",),
    ),
    "processes": Refusal(
        "cgroup.pids",
        "processes are counted by the kernel's limit of a user, which says nothing of what it refused",
        ("test_processes_are_named_as_the_limit*",),
    ),
    "file systems": Refusal(
        "host.privilege",
        "a file system in a file is mounted by root only",
        ("test_what_memory_cannot_hold*",),
    ),
    "fanotify": Refusal(
        "host.privilege",
        "who opens which file is told to root only",
        (
            "test_files_that_are_opened_are_written_down_on_request*",
            "test_the_audit_is_bounded_and_counts_what_it_drops*",
        ),
    ),
}
"""At most ten."""


def tiers_for(test: str) -> list[str]:
    return ["namespace", "fake"] if test in FAKE else ["namespace"]


def refusal_of(test: str) -> Refusal | None:
    """By the test's name with its parameters."""
    found = (each for each in REFUSALS.values() if any(fnmatch(test, pattern) for pattern in each.tests))
    return next(found, None)


def reason_to_skip(test: str) -> str | None:
    """In the words of `shoal doctor`. None for root, and where nothing is refused."""
    refusal = None if os.geteuid() == 0 else refusal_of(test)
    if refusal is None:
        return None
    finding = finding_of(refusal.probe)
    return None if finding.status == "ok" else f"{refusal.why} ({finding.id}: {finding.detail}. {finding.fix})"


@cache
def finding_of(probe: str) -> Finding:
    (found,) = (each for each in PROBES if each.id == probe)
    return examine(found, Scene(tempfile.gettempdir(), ""))
