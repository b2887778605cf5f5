"""pytest as the judge: its report against the tests that must pass."""

import os
import re
from collections.abc import Awaitable, Callable
from typing import Any

from rolltap.trainer.rollouts.judges.canary import Canary, read_marks
from rolltap.trainer.rollouts.judges.folders import read_file, scan
from rolltap.trainer.rollouts.judges.judged import UnjudgedError
from rolltap.trainer.rollouts.judges.junit import (
    MAX_REPORT_BYTES,
    Name,
    Outcome,
    Report,
    compare,
    evaded,
    read_report,
)
from rolltap.trainer.rollouts.judges.patterns import TEST_FILES, matches
from rolltap.trainer.rollouts.judges.place import Place
from rolltap.trainer.rollouts.judges.reward import Reward
from rolltap.trainer.rollouts.judges.spec import PytestJudge

_MAX_TESTS = 500
_MAX_NAME = 300
_MAX_MODULES = 50
_MAX_MARKS_BYTES = 8 << 20
_MISSING = re.compile(r"ModuleNotFoundError: No module named '(\w+)")
_STATUS = {
    1: "",
    2: " (interrupted)",
    3: " (an internal error of pytest)",
    4: " (wrong arguments, or a test file is not there)",
    5: " (no tests)",
}
"""Exit statuses of pytest (`pytest.ExitCode`)."""


Skips = frozenset[tuple[Name, Outcome]]
"""Tests that were skipped or that failed as expected."""


async def judge_by_report(
    spec: PytestJudge, place: Place, allow: Callable[[Skips], Awaitable[Skips]]
) -> tuple[Reward, dict[str, Any]]:
    """Return the reward and the evidence. Raises `UnjudgedError`.

    A test that is skipped, or fails as expected, counts as such if it has a mark that says so. `allow` is asked for
    those without one when the reward depends on them, and returns the ones that count as such too.

    The evidence has `tests`, the outcome of the expected tests, the worst first; `canary`, what the tests that must
    fail did; `missing_modules`, the modules for want of which no test of a file ran.
    """
    file = f"{place.out_inside}/report.xml"
    marks = f"{place.out_inside}/marks"
    canary = Canary.write(place.tools, place.workspace, _beside(spec, place), marks)
    env = {
        **spec.env,
        "ROLLTAP_REPORT": file,
        "PYTEST_PLUGINS": ",".join(filter(None, [spec.env.get("PYTEST_PLUGINS"), canary.plugin])),
        "PYTHONPATH": os.pathsep.join(filter(None, [place.tools_inside, spec.env.get("PYTHONPATH")])),
    }
    command = [argument.replace("{report}", file) for argument in spec.command]
    try:
        status = await place.run(command, env, spec.timeout)
    finally:
        canary.remove(place.workspace)
    content = place.read(file, MAX_REPORT_BYTES)
    ended = f"the judge ended with status {status}{_STATUS.get(status, '')}"
    if content is None:
        raise UnjudgedError(f"{ended} and wrote no report; its output is in {place.case.log.name}", broke=True)
    report = read_report(content)
    outcomes, saw = canary.take(report.outcomes)
    if not outcomes:
        raise UnjudgedError(f"{ended}, and no test ran; its output is in {place.case.log.name}", broke=True)
    marked = read_marks(place.read(marks, _MAX_MARKS_BYTES) or b"")
    skips = frozenset(test for test in outcomes.items() if test[1] in ("skipped", "xfailed"))
    allowed = frozenset(test for test in skips if test[0] in marked)
    lists = (spec.fail_to_pass, spec.pass_to_pass)
    verdict = compare(evaded(outcomes, allowed), *lists)
    told = compare(outcomes, *lists)
    if verdict.parts != told.parts:
        allowed |= await allow(skips - allowed)
        verdict = compare(evaded(outcomes, allowed), *lists)
    worst_first = sorted(told.tests.items(), key=lambda test: test[1] in ("passed", "xfailed"))
    evidence: dict[str, Any] = {
        "exit_status": status,
        "canary": saw,
        "tests": {name[:_MAX_NAME]: outcome for name, outcome in worst_first[:_MAX_TESTS]},
        "missing_modules": missing_modules(report)[:_MAX_MODULES],
    }
    if evasions := sorted(str(name)[:_MAX_NAME] for name, _ in skips - allowed):
        evidence["skipped_by_code"] = evasions[:_MAX_MODULES]
    if saw == "passed":
        evidence["forged_report"] = "a test passed that must fail"
        return Reward(0.0, dict.fromkeys(verdict.parts, 0.0)), evidence
    return Reward(verdict.reward, verdict.parts), evidence


def _beside(spec: PytestJudge, place: Place) -> str:
    """Return the path of a test file: one that is expected, or the first of the workspace."""
    for name in (*spec.fail_to_pass, *spec.pass_to_pass):
        if read_file(place.workspace, path := name.partition("::")[0], 1) is not None:
            return path
    tests = (path for path in scan(place.workspace).entries if matches(path, TEST_FILES) and path.endswith(".py"))
    return min(tests, key=lambda path: (not path.rpartition("/")[2].startswith("test_"), path), default="")


def missing_modules(report: Report) -> list[str]:
    """Return the modules, without their submodules, for want of which tests could not be collected."""
    return sorted({name for text in report.errors.values() for name in _MISSING.findall(text)})
