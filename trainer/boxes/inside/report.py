"""A plugin for every pytest: the report goes to the verdict's pipe, and the canary's tests are run
after all others.

It is loaded before any code of the agent's, by PYTEST_PLUGINS, as `rolltap_report`. ROLLTAP_REPORT
names the pipe, ROLLTAP_CANARY the file of the canary's tests. Before the report, and a zero byte,
come the names of the tests that are marked to be skipped or to fail, one a line, as Python writes
them. Of several pytests the first one reports; one with `--junit-xml` of its own does not.
"""

import importlib
import os
import tempfile
from typing import Any

import pytest

FILE = os.environ.pop("ROLLTAP_REPORT", "")
CANARY = os.environ.pop("ROLLTAP_CANARY", "")
PIPE = -1
if os.path.exists(FILE):
    PIPE = importlib.import_module("rolltap_launch").take(FILE)


def pytest_configure(config: Any) -> None:
    """Have the report written, and the canary run, unless a command wants its own report."""
    if PIPE >= 0 and config.option.xmlpath in (None, FILE):
        config.pluginmanager.register(Canary(config))


class Canary:
    """The hooks of the pytest that reports."""

    def __init__(self, config: Any) -> None:
        self.report = tempfile.TemporaryFile()  # noqa: SIM115  # for as long as this process
        config.option.xmlpath = "/proc/self/fd/%d" % self.report.fileno()  # noqa: UP031
        config.args.append(CANARY)
        self.items: list[Any] = []
        self.failed = 0
        self.others = 0

    def pytest_itemcollected(self, item: Any) -> None:
        """Keep the canary's tests."""
        if is_canary(item.nodeid):
            self.items.append(item)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: "list[Any]") -> None:
        """Put the canary last, whatever the arguments select."""
        for item in self.items:
            if item in items:
                items.remove(item)
        items += self.items

    def pytest_collection_finish(self, session: Any) -> None:
        """Write the names of the marked tests."""
        marked = []
        for item in session.items:
            if is_marked(item):
                marked.append(repr(item.nodeid)[:2000])
        write("\n".join(marked).encode() + b"\0")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count the failures of the canary, and the other tests."""
        if is_canary(report.nodeid):
            self.failed += report.failed
        elif report.when == "setup":
            self.others += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: Any) -> None:
        """Hand the report on, and set the exit status that pytest would have without the canary: 0,
        1, or 5."""
        self.report.seek(0)
        write(self.report.read())
        if session.exitstatus == 1 and session.testsfailed == self.failed:
            session.exitstatus = 0 if self.others else 5


def write(content: bytes) -> None:
    """Write all of this to the pipe."""
    with os.fdopen(os.dup(PIPE), "wb") as pipe:
        pipe.write(content)


def is_canary(name: str) -> bool:
    """Return True for the name of a test of the canary's."""
    return name.partition("::")[0].endswith(os.path.basename(CANARY))


def is_marked(item: Any) -> bool:
    """Return True for a test that says itself that it is skipped or fails."""
    for mark in item.iter_markers():
        if mark.name in ("skip", "skipif", "xfail"):
            return True
    for owner in (getattr(item, "obj", None), getattr(item, "cls", None)):
        if getattr(owner, "__unittest_skip__", False):
            return True
        if getattr(owner, "__unittest_expecting_failure__", False):
            return True
    return False
