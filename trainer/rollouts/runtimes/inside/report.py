"""A plugin for every pytest: the report goes to the verdict's pipe, and the canary's tests are run after all others.

It is loaded before any code of the agent's, by PYTEST_PLUGINS, as `rolltap_report`. ROLLTAP_REPORT names the pipe,
ROLLTAP_CANARY the file of the canary's tests. Before the report, and a zero byte, come the names of the tests that are
marked to be skipped or to fail, one a line, as Python writes them.
"""

import importlib
import os
from typing import Any

import pytest

PIPE: int = importlib.import_module("rolltap_launch").take(os.environ.pop("ROLLTAP_REPORT"))
CANARY = os.environ.pop("ROLLTAP_CANARY")
KEPT: "list[Any]" = []
FAILED: "list[Any]" = []
# not for a pytest that a test starts
os.environ["PYTEST_PLUGINS"] = os.environ["PYTEST_PLUGINS"].replace("rolltap_report", "").strip(",")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: Any) -> None:
    """Have the report written, and the canary run."""
    config.option.xmlpath = "/proc/self/fd/%d" % PIPE  # noqa: UP031
    config.args.append(os.path.join(os.getcwd(), CANARY))


def pytest_itemcollected(item: Any) -> None:
    """Keep the canary's tests."""
    if item.nodeid.partition("::")[0].endswith(os.path.basename(CANARY)):
        KEPT.append(item)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: "list[Any]") -> None:
    """Put the canary last, whatever the arguments select."""
    items[:] = [item for item in items if item not in KEPT] + KEPT


def pytest_runtest_logreport(report: Any) -> None:
    """Count the failures of the canary."""
    FAILED.extend(item for item in KEPT if item.nodeid == report.nodeid and report.failed)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: Any) -> None:
    """Set the exit status that pytest would have without the canary: 0, 1, or 5 without tests."""
    if session.exitstatus == 1 and session.testsfailed == len(FAILED):
        session.exitstatus = 5 if session.testscollected <= len(KEPT) else 0


def is_marked(item: Any) -> bool:
    """Return True for a test that says itself that it is skipped or fails."""
    objects = [getattr(item, "obj", None), getattr(item, "cls", None)]
    names = ["__unittest_skip__", "__unittest_expecting_failure__"]
    marks = [mark.name for mark in item.iter_markers() if mark.name in ("skip", "skipif", "xfail")]
    return bool(marks) or any(getattr(one, name, False) for one in objects for name in names)


def pytest_collection_finish(session: Any) -> None:
    """Write the names of the marked tests."""
    marked = [repr(item.nodeid)[:2000] for item in session.items if is_marked(item)]
    with os.fdopen(os.dup(PIPE), "w") as pipe:
        pipe.write(chr(10).join(marked) + chr(0))
