"""JUnit XML reports, and comparing them with the tests that must pass."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple
from xml.parsers import expat

from rolltap.trainer.rollouts.judges.judged import UnjudgedError

Outcome = Literal["passed", "skipped", "xfailed", "failed", "error"]
"""From the best to the worst. `error`: the test did not run, or its setup or teardown failed."""

MAX_REPORT_BYTES = 64 << 20
_MAX_TESTS = 500_000
_RANK = ("passed", "skipped", "xfailed", "failed", "error")
_ILLEGAL = re.compile("[^\t\n\r -~\x80-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that pytest writes as `#x` and their number, because XML has none of them (`_pytest.junitxml`)."""


class Name(NamedTuple):
    """A test's name as a report has it."""

    classname: str
    name: str

    def __str__(self) -> str:
        """Return both parts as pytest would name a test of a module."""
        return f"{self.classname}::{self.name}" if self.classname else self.name


class Report(NamedTuple):
    """The outcomes of a report, and the text of each error that came before any test of a module ran (collection)."""

    outcomes: dict[Name, Outcome]
    errors: dict[Name, str]


def junit_name(test: str) -> Name:
    """Return the name in a report of a test that pytest names `tests/test_a.py::TestB::test_c[1]`.

    pytest's rule (`_pytest.junitxml.mangle_test_address`): the part before `[` is split at `::`, and the file's path
    loses `.py` and has dots in place of slashes.
    """
    path, bracket, parameters = test.partition("[")
    names = path.split("::")
    names[0] = re.sub(r"\.py$", "", names[0].replace("/", "."))
    names[-1] += bracket + parameters
    return Name(".".join(names[:-1]), _ILLEGAL.sub(_escape, names[-1]))


def _escape(match: re.Match[str]) -> str:
    number = ord(match.group())
    return f"#x{number:02X}" if number <= 0xFF else f"#x{number:04X}"


class _Reader:
    """Reads a report as a stream. A document type, and with it every entity, is refused."""

    def __init__(self) -> None:
        self.outcomes: dict[Name, Outcome] = {}
        self.errors: dict[Name, str] = {}
        self._test: Name | None = None
        self._outcome: Outcome = "passed"
        self._text: list[str] | None = None

    def doctype(self, *_: object) -> None:
        raise UnjudgedError("the report has a document type", broke=True)

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        match tag:
            case "testcase":
                self._test = Name(attributes.get("classname", ""), attributes.get("name", ""))
                self._outcome = "passed"
            case "failure":
                self._is("failed")
            case "error":
                self._is("error")
                if attributes.get("message") == "collection failure":
                    self._text = []
            case "skipped":
                self._is("xfailed" if attributes.get("type") == "pytest.xfail" else "skipped")

    def end(self, tag: str) -> None:
        if tag == "error" and self._text is not None and self._test is not None:
            self.errors[self._test] = "".join(self._text)[-4000:]
            self._text = None
        if tag == "testcase" and self._test is not None:
            if len(self.outcomes) >= _MAX_TESTS:
                raise UnjudgedError(f"the report has more than {_MAX_TESTS} tests", broke=True)
            before = self.outcomes.get(self._test, "passed")
            self.outcomes[self._test] = max(before, self._outcome, key=_RANK.index)
            self._test = None

    def text(self, data: str) -> None:
        if self._text is not None:
            self._text.append(data)

    def _is(self, outcome: Outcome) -> None:
        self._outcome = max(self._outcome, outcome, key=_RANK.index)


def read_report(content: bytes) -> Report:
    """Return the outcomes of a JUnit XML report. Of a test that is there twice the worse one counts.

    Raises `UnjudgedError` for what cannot be read.
    """
    if len(content) > MAX_REPORT_BYTES:
        raise UnjudgedError(f"the report has more than {MAX_REPORT_BYTES >> 20} MiB", broke=True)
    reader = _Reader()
    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = reader.doctype
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.text
    try:
        parser.Parse(content, True)
    except expat.ExpatError as error:
        raise UnjudgedError(f"the report cannot be read: {error}", broke=True) from error
    return Report(reader.outcomes, reader.errors)


def find_outcome(test: str, outcomes: Mapping[Name, Outcome]) -> Outcome | None:
    """Return the outcome of a test that pytest names so, None when it is not in the report.

    Many names in SWE-bench Verified are cut off within the parameters: such a name has an outcome when all tests that
    begin with it agree whether they passed.
    """
    name = junit_name(test)
    if name in outcomes or name.name.count("[") <= name.name.count("]"):
        return outcomes.get(name)
    found = [
        outcome
        for other, outcome in outcomes.items()
        if other.classname == name.classname and other.name.startswith(name.name)
    ]
    return found[0] if len({outcome in ("passed", "xfailed") for outcome in found}) == 1 else None


def evaded(outcomes: Mapping[Name, Outcome], allowed: Collection[tuple[Name, Outcome]]) -> dict[Name, Outcome]:
    """Return the outcomes with those failed that are skipped or expected to fail and not `allowed`.

    Code under test can call `pytest.skip` and `pytest.xfail`, or raise `unittest.SkipTest`: neither is a success.
    """
    return {
        name: "failed" if outcome in ("skipped", "xfailed") and (name, outcome) not in allowed else outcome
        for name, outcome in outcomes.items()
    }


class Verdict(NamedTuple):
    """The comparison of a report with the expected tests: outcome of each, and the shares of both lists that pass."""

    reward: float
    parts: dict[str, float]
    tests: dict[str, str]


def compare(outcomes: Mapping[Name, Outcome], fail_to_pass: Sequence[str], pass_to_pass: Sequence[str]) -> Verdict:
    """Return the verdict. A test that was skipped has not begun to pass, and has not ceased to: see `evaded`.

    Without lists all tests of the report must pass or be skipped, and one must pass.
    """
    if not fail_to_pass and not pass_to_pass:
        passes = [outcome in ("passed", "xfailed", "skipped") for outcome in outcomes.values()]
        some = any(outcome in ("passed", "xfailed") for outcome in outcomes.values())
        share = sum(passes) / len(passes) if passes else 0.0
        return Verdict(float(some and all(passes)), {"tests": share}, {str(name): outcomes[name] for name in outcomes})
    parts, whole = {}, True
    tests: dict[str, str] = {}
    for part, names, good in (
        ("fail_to_pass", fail_to_pass, ("passed", "xfailed")),
        ("pass_to_pass", pass_to_pass, ("passed", "xfailed", "skipped")),
    ):
        found = {name: find_outcome(name, outcomes) for name in names}
        if names:
            parts[part] = sum(found[name] in good for name in names) / len(names)
            whole = whole and all(found[name] in good for name in names)
        tests.update((name, outcome or "missing") for name, outcome in found.items())
    return Verdict(float(whole), parts, tests)
