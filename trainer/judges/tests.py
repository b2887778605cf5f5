"""pytest as the judge: its JUnit XML report, compared with the tests that must pass.

Among the task's tests are two that must fail, the canary: a report in which they pass is not
pytest's.
"""

import ast
import contextlib
import dataclasses
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple, get_args
from xml.parsers import expat

from rolltap.trainer.concurrency import in_folder_thread
from rolltap.trainer.judges.checkout import Checkout
from rolltap.trainer.judges.folders import read_file, scan, write_file
from rolltap.trainer.judges.verdict import Judged, Skips, UnjudgedError
from rolltap.trainer.tasks.content import TEST_FILES, matches
from rolltap.trainer.tasks.task import PytestJudge

Outcome = Literal["passed", "skipped", "xfailed", "failed", "error"]
"""From the best to the worst. `error`: the test did not run, or its setup or teardown failed."""

MAX_REPORT_BYTES = 64 << 20
_MAX_TESTS = 500
_MAX_NAME = 300
_MAX_SKIPS = 50
_RANK = get_args(Outcome)
_PASSES = ("passed", "xfailed")
_HOLDS = ("passed", "xfailed", "skipped")
"""Outcomes of a test that has not ceased to pass. A test that was skipped has not begun to."""
_ILLEGAL = re.compile("[^\t\n\r -~\x80-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that pytest writes as `#x` and their number, because XML has none of them
(`_pytest.junitxml`)."""


class Name(NamedTuple):
    """A test's name as a report has it."""

    classname: str
    name: str

    def __str__(self) -> str:
        """Return both parts as pytest would name a test of a module."""
        return f"{self.classname}::{self.name}" if self.classname else self.name


def junit_name(test: str) -> Name:
    """Return the name in a report of a test that pytest names `tests/test_a.py::TestB::test_c[1]`.

    pytest's rule (`_pytest.junitxml.mangle_test_address`): the part before `[` is split at `::`,
    and the file's path loses `.py` and has dots in place of slashes.
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
        self._test: Name | None = None

    def doctype(self, *_: object) -> None:
        raise UnjudgedError("the report has a document type, which pytest never writes")

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        match tag:
            case "testcase":
                self._test = Name(attributes.get("classname", ""), attributes.get("name", ""))
                self._note("passed")
            case "failure":
                self._note("failed")
            case "error":
                self._note("error")
            case "skipped" if attributes.get("type") == "pytest.xfail":
                self._note("xfailed")
            case "skipped":
                self._note("skipped")

    def end(self, tag: str) -> None:
        if tag == "testcase":
            self._test = None

    def _note(self, outcome: Outcome) -> None:
        if self._test is not None:
            before = self.outcomes.get(self._test, "passed")
            self.outcomes[self._test] = max(before, outcome, key=_RANK.index)


def read_report(content: bytes) -> dict[Name, Outcome]:
    """Return the outcomes in a JUnit XML report; of a test that is there twice the worse. Raises
    `UnjudgedError`."""
    if len(content) > MAX_REPORT_BYTES:
        raise UnjudgedError(f"the report has more than {MAX_REPORT_BYTES >> 20} MiB")
    reader = _Reader()
    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = reader.doctype
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    try:
        parser.Parse(content, True)
    except expat.ExpatError as error:
        raise UnjudgedError(f"the report cannot be read: {error}") from error
    return reader.outcomes


def find_outcome(test: str, outcomes: Mapping[Name, Outcome]) -> Outcome | None:
    """Return the outcome of a test that pytest names so, None when it is not in the report.

    Many names in SWE-bench Verified are cut off within the parameters: such a name has an outcome
    when all tests that begin with it agree whether they passed.
    """
    name = junit_name(test)
    if name in outcomes or name.name.count("[") <= name.name.count("]"):
        return outcomes.get(name)
    found: list[Outcome] = []
    for other, outcome in outcomes.items():
        if other.classname == name.classname and other.name.startswith(name.name):
            found.append(outcome)
    agree = len({outcome in _PASSES for outcome in found}) == 1
    return found[0] if agree else None


def compare(
    outcomes: Mapping[Name, Outcome], fail_to_pass: Sequence[str], pass_to_pass: Sequence[str]
) -> Judged:
    """Return the reward, 1 when all expected tests pass, and the share of each list as a part.

    Without lists all tests of the report must pass or be skipped, and one must pass.
    """
    parts: dict[str, float] = {}
    if fail_to_pass:
        parts["fail_to_pass"] = _share(fail_to_pass, outcomes, _PASSES)
    if pass_to_pass:
        parts["pass_to_pass"] = _share(pass_to_pass, outcomes, _HOLDS)
    passes = all(share == 1.0 for share in parts.values())
    if not parts:
        held = [outcome in _HOLDS for outcome in outcomes.values()]
        parts["tests"] = fmean(held or [False])
        passes = all(held) and not set(_PASSES).isdisjoint(outcomes.values())
    return Judged(reward=float(passes), parts=parts)


def _share(names: Sequence[str], outcomes: Mapping[Name, Outcome], good: Sequence[str]) -> float:
    return fmean(find_outcome(name, outcomes) in good for name in names)


def tell_tests(outcomes: Mapping[Name, Outcome], expected: Sequence[str]) -> dict[str, str]:
    """Return the outcome of each expected test, of all tests if none is, the worst first.

    It has 500 tests and 300 characters of a name at most.
    """
    tests: dict[str, str] = {str(name): outcome for name, outcome in outcomes.items()}
    if expected:
        tests = {name: find_outcome(name, outcomes) or "missing" for name in expected}
    worst_first = sorted(tests, key=lambda name: tests[name] in ("passed", "xfailed"))
    return {name[:_MAX_NAME]: tests[name] for name in worst_first[:_MAX_TESTS]}


_TESTS = """import sys
import unittest

if getattr(sys.modules.get("rolltap_report"), "PIPE", -1) >= 0:  # not for another pytest

    def test_{token}():
        assert [] == [1]

    class Test_{token}(unittest.TestCase):
        def test_{token}(self):
            self.assertEqual([], [1])
"""
_WORDS = (
    "basic empty single nested default simple multiple large small mixed repeated values inputs"
    " options names"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Canary:
    """Two tests that must fail, a function and a `unittest` method, in a file that is named and
    lies like the task's.

    They find code of the agent's that makes pytest's tests pass, unless that code looks for them.
    The plugin (`boxes/inside/report.py`) runs them after all others.

    Attributes:
        token: Random, and in the name of no test of the task's.
        file: The tests' path in the workspace.
    """

    token: str
    file: str

    @classmethod
    def write(cls, workspace: Path, beside: str) -> "Canary":
        """Write the tests into the workspace, in the folder of `beside`, the path of a test
        file."""
        folder = beside.rpartition("/")[0]
        while True:
            token = "_".join([*secrets.SystemRandom().sample(_WORDS.split(), 3)])
            file = f"{folder}/test_{token}.py".lstrip("/")
            if read_file(workspace, file, 1) is None:
                break
        write_file(workspace, file, [_TESTS.replace("{token}", token).encode()], executable=False)
        return cls(token, file)

    def take(
        self, outcomes: Mapping[Name, Outcome]
    ) -> tuple[dict[Name, Outcome], Literal["failed", "passed", "absent"]]:
        """Return the outcomes of the other tests, and what the canary's did: `passed` if one did
        not fail."""
        rest: dict[Name, Outcome] = {}
        own: set[Outcome] = set()
        for name, outcome in outcomes.items():
            if self.token in name.classname or self.token in name.name:
                own.add(outcome)
            else:
                rest[name] = outcome
        if not own:
            return rest, "absent"
        return rest, "failed" if own <= {"failed", "error"} else "passed"


def read_marks(content: bytes) -> set[Name]:
    """Return the tests that the plugin names as marked."""
    names = set()
    for line in content.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            names.add(junit_name(str(ast.literal_eval(line))))
    return names


async def judge_by_report(
    spec: PytestJudge, checkout: Checkout, judge_start: Callable[[], Awaitable[Judged]] | None
) -> Judged:
    """Return the judgement. Raises `UnjudgedError`.

    Code under test can call `pytest.skip` and `pytest.xfail`, or raise `unittest.SkipTest`. A test
    that is skipped, or fails as expected, counts as such if it has a mark that says so, or if it
    does so on the untouched start too: `judge_start` judges it, and is None there.

    The evidence has `tests`, the outcome of the expected tests, the worst first; `canary`, what the
    tests that must fail did.
    """
    canary = Canary.write(checkout.workspace, _beside(spec, checkout.workspace))
    plugins = [spec.env.get("PYTEST_PLUGINS"), "rolltap_report"]
    folders = [checkout.tools, spec.env.get("PYTHONPATH")]
    env = {
        **spec.env,
        "ROLLTAP_REPORT": checkout.pipe,
        "ROLLTAP_CANARY": f"{checkout.box.workdir}/{canary.file}",
        "PYTEST_PLUGINS": ",".join(filter(None, plugins)),
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
    }
    command = [argument.replace("{report}", checkout.pipe) for argument in spec.command]
    status = await checkout.run(command, env, spec.timeout)
    ended = f"the judge ended with status {status}"
    output = f"its output is in {checkout.job.log.name}"
    written = checkout.verdict(ended)
    # a report may have a million tests
    report = await in_folder_thread(_read, written, canary)
    if report is None:
        raise UnjudgedError(f"{ended} and wrote no report; {output}")
    if not report.outcomes:
        raise UnjudgedError(f"{ended}, and no test ran; {output}")
    by_code = Skips()
    if judge_start is not None and report.skips:
        by_code = report.skips - (await judge_start()).skips
    judged = await in_folder_thread(_grade, report, by_code, spec)
    return judged.and_evidence(exit_status=status)


class _Report(NamedTuple):
    """A report that was read.

    Attributes:
        outcomes: Those of all tests but the canary's.
        canary: What the tests that must fail did.
        skips: See `Judged`.
    """

    outcomes: dict[Name, Outcome]
    canary: str
    skips: Skips


def _read(written: bytes, canary: Canary) -> _Report | None:
    marks, _, content = written.rpartition(b"\0")
    if not content:
        return None
    outcomes, saw = canary.take(read_report(content))
    marked = read_marks(marks)
    skips: set[tuple[Name, str]] = set()
    for name, outcome in outcomes.items():
        if outcome in ("skipped", "xfailed") and name not in marked:
            skips.add((name, outcome))
    return _Report(outcomes, saw, frozenset(skips))


def _grade(report: _Report, by_code: Skips, spec: PytestJudge) -> Judged:
    """Compare a report, in which tests that only code skipped count as failed."""
    counted: dict[Name, Outcome] = {}
    for name, outcome in report.outcomes.items():
        counted[name] = "failed" if (name, outcome) in by_code else outcome
    judged = compare(counted, spec.fail_to_pass, spec.pass_to_pass)
    tests = tell_tests(report.outcomes, [*spec.fail_to_pass, *spec.pass_to_pass])
    judged = dataclasses.replace(judged, skips=report.skips)
    judged = judged.and_evidence(canary=report.canary, tests=tests)
    if by_code:
        names = sorted(str(name)[:_MAX_NAME] for name, _ in by_code)
        judged = judged.and_evidence(skipped_by_code=names[:_MAX_SKIPS])
    if report.canary == "passed":
        none = dict.fromkeys(judged.parts, 0.0)
        judged = dataclasses.replace(judged, reward=0.0, parts=none)
        judged = judged.and_evidence(forged_report="a test that must fail passed")
    return judged


def _beside(spec: PytestJudge, workspace: Path) -> str:
    """Return the path of a test file: one that is expected, or the first of the workspace."""
    for name in (*spec.fail_to_pass, *spec.pass_to_pass):
        path = name.partition("::")[0]
        if read_file(workspace, path, 1) is not None:
            return path
    tests: list[tuple[bool, str]] = []
    for path in scan(workspace).entries:
        if matches(path, TEST_FILES) and path.endswith(".py"):
            is_other = not path.rpartition("/")[2].startswith("test_")
            tests.append((is_other, path))
    return min(tests, default=(True, ""))[1]
