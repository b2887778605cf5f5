import json
import sys

import pytest

from rolltap.trainer.judges.tests import Name, compare, find_outcome, junit_name, read_report
from rolltap.trainer.judges.verdict import UnjudgedError
from tests.trainer.judges.sessions import Left, command

TESTS = r"""
import unittest
import pytest

@pytest.mark.parametrize("value", [
    "a::b", "x/y.py", "[", "]", "a-b c", "\u00e9", "\x01\x7f", "<&>", "\"", "new\nline", ""
])
def test_value(value):
    assert value != "["

class TestA:
    class TestB:
        def test_deep(self): pass

class Old(unittest.TestCase):
    def test_old(self): pass

def test_skips(): pytest.skip("no")

@pytest.mark.xfail
def test_fails_as_expected(): assert 0

@pytest.fixture
def broken(): raise ValueError

def test_with_setup(broken): pass

@pytest.fixture
def breaks():
    yield
    raise ValueError

def test_with_teardown(breaks): pass
"""
LISTS_NAMES = """
import json, os, pytest

class Plugin:
    def pytest_collection_modifyitems(self, items):
        self.names = [item.nodeid for item in items]

plugin = Plugin()
pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider'], plugins=[plugin])
reward = {'reward': 0.0, 'reason': json.dumps(plugin.names)}
with open(os.environ['ROLLTAP_REWARD_FILE'], 'w') as file:
    json.dump(reward, file)
"""


async def test_every_name_that_pytest_gives_is_found_in_its_report(tmp_path):
    start = {"pkg/tests/test_names.py": TESTS, "test_top.py": "def test_top(): pass\n"}
    left = Left(tmp_path, start)
    listed = await left.earns(0.0, command(sys.executable, "-c", LISTS_NAMES, result="json"))
    names = json.loads(listed["reason"])
    assert len(names) == 18
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junit-xml", "{report}"]
    judged = await left.judge({"kind": "pytest", "command": words, "fail_to_pass": names})
    outcomes = judged.evidence["tests"]
    assert "missing" not in outcomes.values()
    others = {name.rpartition("::")[2]: how for name, how in outcomes.items() if how != "passed"}
    assert others == {
        "test_value[[]": "failed",
        "test_skips": "skipped",
        "test_fails_as_expected": "xfailed",
        "test_with_setup": "error",
        "test_with_teardown": "error",
    }


def test_a_name_is_that_of_the_report():
    deep = junit_name("test_a.py::TestA::TestB::test_c[x::y/z.py]")
    assert deep == ("test_a.TestA.TestB", "test_c[x::y/z.py]")
    assert junit_name("a/b.py::t[\x01]") == ("a.b", "t[#x01]")


REPORT = b"""<testsuites><testsuite>
<testcase classname="t" name="a"></testcase>
<testcase classname="t" name="a"><failure/></testcase>
<testcase classname="t" name="a"></testcase>
<testcase classname="t" name="b"><skipped/><error/></testcase>
</testsuite></testsuites>"""


def test_the_worse_outcome_of_a_test_that_is_there_twice_counts():
    assert read_report(REPORT) == {Name("t", "a"): "failed", Name("t", "b"): "error"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no xml",
        b"<testsuite>",
        b'<!DOCTYPE a [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><testsuite>&b;</testsuite>',
        b'<!DOCTYPE a SYSTEM "file:///etc/passwd"><testsuite/>',
        '<!DOCTYPE a [<!ENTITY a "a">]><testsuite/>'.encode("utf-16"),
        b"<testsuite>\xff</testsuite>",
    ],
)
def test_a_report_that_cannot_be_read_is_no_verdict(content):
    with pytest.raises(UnjudgedError):
        read_report(content)


def test_a_name_that_was_cut_off_is_found_when_all_that_begin_so_agree():
    outcomes = {Name("t", "f[log(photon / s)]"): "passed", Name("t", "f[log(x)]"): "failed"}
    assert find_outcome("t.py::f[log(photon", outcomes) == "passed"
    assert find_outcome("t.py::f[log(", outcomes) is None
    assert find_outcome("t.py::f", outcomes) is None


@pytest.mark.parametrize(
    ("first", "second", "parts"),
    [
        ("passed", "passed", (1.0, 1.0)),
        ("xfailed", "skipped", (1.0, 1.0)),
        ("skipped", "passed", (0.0, 1.0)),
        ("passed", "error", (1.0, 0.0)),
        ("passed", None, (1.0, 0.0)),
        (None, "passed", (0.0, 1.0)),
    ],
)
def test_both_lists_must_pass(first, second, parts):
    outcomes = {Name("t", "a"): first, Name("t", "b"): second}
    found = {name: outcome for name, outcome in outcomes.items() if outcome}
    verdict = compare(found, ["t.py::a"], ["t.py::b"])
    assert (verdict.reward, tuple(verdict.parts.values())) == (min(parts), parts)


@pytest.mark.parametrize(
    ("outcomes", "reward"),
    [("passed skipped", 1.0), ("skipped", 0.0), ("passed failed", 0.0), ("", 0.0)],
)
def test_without_lists_all_tests_of_a_report_must_pass(outcomes, reward):
    found = {Name("t", str(n)): outcome for n, outcome in enumerate(outcomes.split())}
    assert compare(found, [], []).reward == reward
