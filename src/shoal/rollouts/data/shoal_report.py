"""A pytest plugin that writes one JSON line a test: {"id": node id, "outcome": "passed"}.

It runs in the task's interpreter beside the task's code, so it needs nothing but Python 3.8 and pytest. The file is named by
SHOAL_REPORT. Outcomes: passed, failed, error (set-up, tear-down or collection failed), skipped, xfailed.
"""

import json
import os

RANKS = ("passed", "skipped", "xfailed", "failed", "error")


class Report:
    def __init__(self, path):
        self.file = open(path, "w", encoding="ascii")
        self.outcomes = {}

    def write(self, nodeid, outcome):
        name = nodeid.encode("utf-8", "backslashreplace").decode("utf-8")
        self.file.write(json.dumps({"id": name, "outcome": outcome}) + "\n")
        self.file.flush()

    def pytest_collectreport(self, report):
        if report.failed:
            self.write(report.nodeid, "error")

    def pytest_runtest_logreport(self, report):
        outcome = outcome_of(report)
        if is_subtest(report) and outcome != "failed":
            return
        known = self.outcomes.get(report.nodeid, "passed")
        self.outcomes[report.nodeid] = max(known, outcome, key=RANKS.index)

    def pytest_runtest_logfinish(self, nodeid, location):
        if nodeid in self.outcomes:
            self.write(nodeid, self.outcomes.pop(nodeid))

    def pytest_unconfigure(self):
        self.file.close()


def outcome_of(report):
    if report.failed:
        return "failed" if report.when == "call" else "error"
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else "passed"
    return report.outcome


def is_subtest(report):
    """Reported under its test's node id, before the test itself."""
    return hasattr(report, "context")


def pytest_configure(config):
    path = os.environ.get("SHOAL_REPORT")
    if path:
        config.pluginmanager.register(Report(path), "shoal-report")
