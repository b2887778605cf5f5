"""pytest as the judge: its JUnit XML report, compared with the tests that must pass.

Among the task's tests are two that must fail, the canary: a report in which they pass is not
pytest's.
"""

import ast
import contextlib
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from xml.parsers import expat

from rolltap.trainer.concurrency import in_folder_thread
from rolltap.trainer.judges.checkout import Checkout
from rolltap.trainer.judges.folders import read_file, scan, write_file
from rolltap.trainer.judges.verdict import Reward, UnjudgedError
from rolltap.trainer.tasks.content import TEST_FILES, matches
from rolltap.trainer.tasks.task import PytestJudge

Outcome = Literal["passed", "skipped", "xfailed", "failed", "error"]
"""From the best to the worst. `error`: the test did not run, or its setup or teardown failed."""

MAX_REPORT_BYTES = 64 << 20
_RANK = ("passed", "skipped", "xfailed", "failed", "error")
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
        self._outcome: Outcome = "passed"

    def doctype(self, *_: object) -> None:
        raise UnjudgedError("the report has a document type")

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        match tag:
            case "testcase":
                self._test = Name(attributes.get("classname", ""), attributes.get("name", ""))
                self._outcome = "passed"
            case "failure":
                self._is("failed")
            case "error":
                self._is("error")
            case "skipped":
                self._is("xfailed" if attributes.get("type") == "pytest.xfail" else "skipped")

    def end(self, tag: str) -> None:
        if tag == "testcase" and self._test is not None:
            before = self.outcomes.get(self._test, "passed")
            self.outcomes[self._test] = max(before, self._outcome, key=_RANK.index)
            self._test = None

    def _is(self, outcome: Outcome) -> None:
        self._outcome = max(self._outcome, outcome, key=_RANK.index)


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
    found = [
        outcome
        for other, outcome in outcomes.items()
        if other.classname == name.classname and other.name.startswith(name.name)
    ]
    return found[0] if len({outcome in ("passed", "xfailed") for outcome in found}) == 1 else None


def evaded(
    outcomes: Mapping[Name, Outcome], allowed: Collection[tuple[Name, Outcome]]
) -> dict[Name, Outcome]:
    """Return the outcomes with those failed that are skipped or expected to fail and not `allowed`.

    Code under test can call `pytest.skip` and `pytest.xfail`, or raise `unittest.SkipTest`: neither
    is a success.
    """
    return {
        name: (
            "failed"
            if outcome in ("skipped", "xfailed") and (name, outcome) not in allowed
            else outcome
        )
        for name, outcome in outcomes.items()
    }


class Verdict(NamedTuple):
    """The comparison of a report with the expected tests: outcome of each, and the shares of both
    lists that pass."""

    reward: float
    parts: dict[str, float]
    tests: dict[str, str]


def compare(
    outcomes: Mapping[Name, Outcome], fail_to_pass: Sequence[str], pass_to_pass: Sequence[str]
) -> Verdict:
    """Return the verdict. A test that was skipped has not begun to pass, and has not ceased to: see
    `evaded`.

    Without lists all tests of the report must pass or be skipped, and one must pass.
    """
    if not fail_to_pass and not pass_to_pass:
        passes = [outcome in ("passed", "xfailed", "skipped") for outcome in outcomes.values()]
        some = any(outcome in ("passed", "xfailed") for outcome in outcomes.values())
        share = sum(passes) / len(passes) if passes else 0.0
        return Verdict(
            float(some and all(passes)),
            {"tests": share},
            {str(name): outcomes[name] for name in outcomes},
        )
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


@dataclass(frozen=True, slots=True)
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
        write_file(
            workspace, file, iter([_TESTS.replace("{token}", token).encode()]), executable=False
        )
        return cls(token, file)

    def take(
        self, outcomes: Mapping[Name, Outcome]
    ) -> tuple[dict[Name, Outcome], Literal["failed", "passed", "absent"]]:
        """Return the outcomes of the other tests, and what the canary's did: `passed` if one did
        not fail."""
        rest = {
            name: outcome
            for name, outcome in outcomes.items()
            if self.token not in f"{name.classname} {name.name}"
        }
        own = [outcome for name, outcome in outcomes.items() if name not in rest]
        if not own:
            return rest, "absent"
        return rest, (
            "failed" if all(outcome in ("failed", "error") for outcome in own) else "passed"
        )


def read_marks(content: bytes) -> set[Name]:
    """Return the tests that the plugin names as marked."""
    names = set()
    for line in content.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            names.add(junit_name(str(ast.literal_eval(line))))
    return names


_MAX_TESTS = 500
_MAX_NAME = 300
Skips = frozenset[tuple[Name, Outcome]]
"""Tests that were skipped or that failed as expected."""


async def judge_by_report(
    spec: PytestJudge, checkout: Checkout, allow: Callable[[Skips], Awaitable[Skips]]
) -> tuple[Reward, dict[str, Any]]:
    """Return the reward and the evidence. Raises `UnjudgedError`.

    A test that is skipped, or fails as expected, counts as such if it has a mark that says so.
    `allow` is asked for those without one when the reward depends on them, and returns the ones
    that count as such too.

    The evidence has `tests`, the outcome of the expected tests, the worst first; `canary`, what the
    tests that must fail did.
    """
    canary = Canary.write(checkout.workspace, _beside(spec, checkout))
    env = {
        **spec.env,
        "ROLLTAP_REPORT": checkout.pipe,
        "ROLLTAP_CANARY": f"{checkout.box.workdir}/{canary.file}",
        "PYTEST_PLUGINS": ",".join(
            filter(None, [spec.env.get("PYTEST_PLUGINS"), "rolltap_report"])
        ),
        "PYTHONPATH": os.pathsep.join(filter(None, [checkout.tools, spec.env.get("PYTHONPATH")])),
    }
    command = [argument.replace("{report}", checkout.pipe) for argument in spec.command]
    status = await checkout.run(command, env, spec.timeout)
    ended = f"the judge ended with status {status}"
    marks, _, content = checkout.verdict(ended).rpartition(b"\0")
    if not content:
        raise UnjudgedError(
            f"{ended} and wrote no report; its output is in {checkout.job.log.name}"
        )
    # a report may have a million tests
    read = await in_folder_thread(_read, content, marks, canary, spec)
    if not read.outcomes:
        raise UnjudgedError(f"{ended}, and no test ran; its output is in {checkout.job.log.name}")
    allowed, verdict = read.allowed, read.verdict
    if verdict.parts != read.reported.parts:
        allowed |= await allow(read.skips - allowed)
        verdict = await in_folder_thread(_compare_with, allowed, read.outcomes, spec)
    evidence: dict[str, Any] = {"exit_status": status, "canary": read.canary}
    evidence |= await in_folder_thread(_told, read, allowed)
    if read.canary == "passed":
        evidence["forged_report"] = "a test passed that must fail"
        return Reward(0.0, dict.fromkeys(verdict.parts, 0.0)), evidence
    return Reward(verdict.reward, verdict.parts), evidence


@dataclass(frozen=True, slots=True)
class _Read:
    """A report that was read.

    Attributes:
        outcomes: Those of all tests but the canary's.
        canary: What the tests that must fail did.
        skips: Tests that were skipped or failed as expected; `allowed` are those with a mark that
            says so.
        reported: The comparison of the report as it is; `verdict` that with skips that are not
            allowed as failures.
    """

    outcomes: dict[Name, Outcome]
    canary: Literal["failed", "passed", "absent"]
    skips: Skips
    allowed: Skips
    reported: Verdict
    verdict: Verdict


def _read(content: bytes, marks: bytes, canary: Canary, spec: PytestJudge) -> _Read:
    outcomes, saw = canary.take(read_report(content))
    marked = read_marks(marks)
    skips = frozenset(test for test in outcomes.items() if test[1] in ("skipped", "xfailed"))
    allowed = frozenset(test for test in skips if test[0] in marked)
    reported = compare(outcomes, spec.fail_to_pass, spec.pass_to_pass)
    verdict = _compare_with(allowed, outcomes, spec)
    return _Read(outcomes, saw, skips, allowed, reported, verdict)


def _compare_with(allowed: Skips, outcomes: Mapping[Name, Outcome], spec: PytestJudge) -> Verdict:
    return compare(evaded(outcomes, allowed), spec.fail_to_pass, spec.pass_to_pass)


def _told(read: _Read, allowed: Skips) -> dict[str, Any]:
    """Return the evidence of the tests, of bounded size."""
    worst_first = sorted(
        read.reported.tests.items(), key=lambda test: test[1] in ("passed", "xfailed")
    )
    tests = {name[:_MAX_NAME]: outcome for name, outcome in worst_first[:_MAX_TESTS]}
    evasions = sorted(str(name)[:_MAX_NAME] for name, _ in read.skips - allowed)
    return {"tests": tests, "skipped_by_code": evasions[:50]} if evasions else {"tests": tests}


def _beside(spec: PytestJudge, checkout: Checkout) -> str:
    """Return the path of a test file: one that is expected, or the first of the workspace."""
    for name in (*spec.fail_to_pass, *spec.pass_to_pass):
        if read_file(checkout.workspace, path := name.partition("::")[0], 1) is not None:
            return path
    tests = (
        path
        for path in scan(checkout.workspace).entries
        if matches(path, TEST_FILES) and path.endswith(".py")
    )
    return min(
        tests, key=lambda path: (not path.rpartition("/")[2].startswith("test_"), path), default=""
    )
