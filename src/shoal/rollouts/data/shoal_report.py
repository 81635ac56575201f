"""A pytest plugin that writes one JSON line a test: {"id": node id, "outcome": "passed"}.

It runs in the task's interpreter beside the task's code, so it needs nothing but Python 3.8 and pytest. The
file is named by SHOAL_REPORT. Outcomes: passed, failed, error (set-up, tear-down or collection failed),
skipped, xfailed.
"""

from __future__ import annotations

import json
import os
from typing import IO, Any

RANKS = ("passed", "skipped", "xfailed", "failed", "error")


class Report:
    """Puts the phases of each test together and writes a line when the test has ended."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file
        self.outcomes: dict[str, str] = {}

    def write(self, nodeid: str, outcome: str) -> None:
        name = nodeid.encode("utf-8", "backslashreplace").decode("utf-8")
        self.file.write(json.dumps({"id": name, "outcome": outcome}) + "\n")
        self.file.flush()

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.write(report.nodeid, "error")

    def pytest_runtest_logreport(self, report: Any) -> None:
        outcome = outcome_of(report)
        if is_subtest(report) and outcome != "failed":
            return
        known = self.outcomes.get(report.nodeid, "passed")
        self.outcomes[report.nodeid] = max(known, outcome, key=RANKS.index)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if nodeid in self.outcomes:
            self.write(nodeid, self.outcomes.pop(nodeid))

    def pytest_unconfigure(self) -> None:
        self.file.close()


def outcome_of(report: Any) -> str:
    """That of one phase of a test: set-up, call or tear-down."""
    if report.failed:
        return "failed" if report.when == "call" else "error"
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else "passed"
    return str(report.outcome)


def is_subtest(report: Any) -> bool:
    """Whether it is reported under its test's node id, before the test itself."""
    return hasattr(report, "context")


def pytest_configure(config: Any) -> None:
    path = os.environ.get("SHOAL_REPORT")
    if path:
        file = open(path, "w", encoding="ascii")  # noqa: SIM115  closed in pytest_unconfigure
        config.pluginmanager.register(Report(file), "shoal-report")
