"""Reads the guest's report, and says whether it proves anything."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple
from xml.etree import ElementTree


class Verdict(NamedTuple):
    """What came of the tests in the guest."""

    passed: frozenset[str]
    failed: dict[str, str]
    """Name to the reason."""
    skipped: dict[str, str]
    problems: tuple[str, ...]
    """Why the run proves nothing, or proves the contrary; empty if all is well."""


def judge(report: str, least: int, needed: Collection[str]) -> Verdict:
    """`least`: tests that must have passed. `needed`: names of some that must be among them."""
    passed, failed, skipped = _cases(report)
    status = re.search(r"^exit (\d+)\s*$", report, re.MULTILINE)
    problems = []
    if status is None:
        problems.append("the guest ended before it could say how the tests ended")
    elif status[1] != "0" and not failed:
        problems.append(f"pytest ended with status {status[1]}")
    if failed:
        problems.append(f"{len(failed)} failed")
    if len(passed) < least:
        problems.append(f"only {len(passed)} tests passed; with fewer than {least} this proves nothing")
    problems += [f"{name} did not pass" for name in sorted(needed) if name not in passed]
    return Verdict(frozenset(passed), failed, skipped, tuple(problems))


def _cases(report: str) -> tuple[set[str], dict[str, str], dict[str, str]]:
    passed: set[str] = set()
    failed: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for case in _suites(report):
        name = case.get("name", "")
        for kind, found in (("failure", failed), ("error", failed), ("skipped", skipped)):
            if (what := case.find(kind)) is not None:
                found[name] = f"{what.get('message')}\n{what.text or ''}"
                break
        else:
            passed.add(f"{case.get('classname', '')}.{name}")
    return passed, failed, skipped


def _suites(report: str) -> list[ElementTree.Element]:
    match = re.search(r"<\?xml.*</testsuites>", report, re.DOTALL)
    try:
        # The guest is our own kernel and pytest; what sandboxes wrote is escaped in it.
        return list(ElementTree.fromstring(match[0]).iter("testcase")) if match else []  # noqa: S314
    except ElementTree.ParseError:
        return []
