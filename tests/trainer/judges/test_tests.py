import json
import sys

import pytest

from rolltap.trainer.judges.tests import Name, compare, find_outcome, junit_name, read_report
from rolltap.trainer.judges.verdict import UnjudgedError
from tests.trainer.judges.sessions import Left

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


async def test_every_name_that_pytest_gives_is_found_in_its_report(tmp_path):
    left = Left(
        tmp_path, {"pkg/tests/test_names.py": TESTS, "test_top.py": "def test_top(): pass\n"}
    )
    names = "import pytest\nclass P:\n    def pytest_collection_modifyitems(self, items):\n"
    names += "        self.names = [item.nodeid for item in items]\np = P()\n"
    names += "pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider'], plugins=[p])\n"
    names += (
        "import json, os; reward = json.dumps({'reward': 0.0, 'reason':"
        " json.dumps(p.names)}).encode()\n"
    )
    names += "open(os.environ['ROLLTAP_REWARD_FILE'], 'wb').write(reward)"
    listed = await left.judge(
        {"kind": "command", "command": [sys.executable, "-c", names], "result": "json"}
    )
    found = json.loads(listed.evidence["reason"])
    assert len(found) == 18
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junit-xml", "{report}"]
    judged = await left.judge({"kind": "pytest", "command": command, "fail_to_pass": found})
    outcomes = judged.evidence["tests"]
    assert "missing" not in outcomes.values()
    assert {name.rpartition("::")[2]: how for name, how in outcomes.items() if how != "passed"} == {
        "test_value[[]": "failed",
        "test_skips": "skipped",
        "test_fails_as_expected": "xfailed",
        "test_with_setup": "error",
        "test_with_teardown": "error",
    }


def test_a_name_is_that_of_the_report():
    assert junit_name("tests/test_a.py::test_b") == ("tests.test_a", "test_b")
    assert junit_name("test_a.py::TestA::TestB::test_c[x::y/z.py]") == (
        "test_a.TestA.TestB",
        "test_c[x::y/z.py]",
    )
    assert junit_name("a/b.py::t[\x01]") == ("a.b", "t[#x01]")


def report(*cases):
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>".encode()


def case(name, inside=""):
    return f'<testcase classname="t" name="{name}">{inside}</testcase>'


def test_the_worse_outcome_of_a_test_that_is_there_twice_counts():
    found = read_report(
        report(case("a"), case("a", "<failure/>"), case("a"), case("b", "<skipped/><error/>"))
    )
    assert found == {Name("t", "a"): "failed", Name("t", "b"): "error"}


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
    ("outcomes", "reward", "parts"),
    [
        (("passed", "passed"), 1.0, (1.0, 1.0)),
        (("xfailed", "skipped"), 1.0, (1.0, 1.0)),
        (("skipped", "passed"), 0.0, (0.0, 1.0)),
        (("passed", "error"), 0.0, (1.0, 0.0)),
        (("passed", None), 0.0, (1.0, 0.0)),
        ((None, "passed"), 0.0, (0.0, 1.0)),
    ],
)
def test_both_lists_must_pass(outcomes, reward, parts):
    found = {
        Name("t", name): outcome for name, outcome in zip("ab", outcomes, strict=True) if outcome
    }
    verdict = compare(found, ["t.py::a"], ["t.py::b"])
    assert (verdict.reward, tuple(verdict.parts.values())) == (reward, parts)


def test_without_lists_all_tests_of_a_report_must_pass():
    for outcomes, reward in (
        ("passed skipped", 1.0),
        ("skipped", 0.0),
        ("passed failed", 0.0),
        ("", 0.0),
    ):
        found = {Name("t", str(number)): outcome for number, outcome in enumerate(outcomes.split())}
        assert compare(found, [], []).reward == reward
