"""pytest as the judge: its report against the tests that must pass."""

import os
import re
from typing import Any

from rolltap.trainer.rollouts.judges.canary import Canary
from rolltap.trainer.rollouts.judges.judged import UnjudgedError
from rolltap.trainer.rollouts.judges.junit import MAX_REPORT_BYTES, Report, compare, read_report
from rolltap.trainer.rollouts.judges.place import Place
from rolltap.trainer.rollouts.judges.reward import Reward
from rolltap.trainer.rollouts.judges.spec import PytestJudge

_MAX_TESTS = 500
_MISSING = re.compile(r"ModuleNotFoundError: No module named '(\w+)")
_STATUS = {
    1: "",
    2: " (interrupted)",
    3: " (an internal error of pytest)",
    4: " (wrong arguments, or a test file is not there)",
    5: " (no tests)",
}
"""Exit statuses of pytest (`pytest.ExitCode`)."""


async def judge_by_report(spec: PytestJudge, place: Place) -> tuple[Reward, dict[str, Any]]:
    """Return the reward and the evidence. Raises `UnjudgedError`.

    The evidence has `tests`, the outcome of the expected tests, the worst first; `canary`, what the tests that must
    fail did; `missing_modules`, the modules for want of which no test of a file ran.
    """
    file = f"{place.out_inside}/report.xml"
    canary = Canary.write(place.tools)
    env = {
        **spec.env,
        "ROLLTAP_REPORT": file,
        "PYTEST_PLUGINS": ",".join(filter(None, [spec.env.get("PYTEST_PLUGINS"), canary.plugin])),
        "PYTHONPATH": os.pathsep.join(filter(None, [place.tools_inside, spec.env.get("PYTHONPATH")])),
    }
    command = [argument.replace("{report}", file) for argument in spec.command]
    status = await place.run(command, env, spec.timeout)
    content = place.read(file, MAX_REPORT_BYTES)
    ended = f"the judge ended with status {status}{_STATUS.get(status, '')}"
    if content is None:
        raise UnjudgedError(f"{ended} and wrote no report; its output is in {place.case.log.name}", broke=True)
    report = read_report(content)
    outcomes, saw = canary.take(report.outcomes)
    if not outcomes:
        raise UnjudgedError(f"{ended}, and no test ran; its output is in {place.case.log.name}", broke=True)
    verdict = compare(outcomes, spec.fail_to_pass, spec.pass_to_pass)
    worst_first = sorted(verdict.tests.items(), key=lambda test: test[1] in ("passed", "xfailed"))
    evidence: dict[str, Any] = {
        "exit_status": status,
        "canary": saw,
        "tests": dict(worst_first[:_MAX_TESTS]),
        "missing_modules": missing_modules(report),
    }
    if saw == "passed":
        evidence["forged_report"] = "a test passed that must fail"
        return Reward(0.0, dict.fromkeys(verdict.parts, 0.0)), evidence
    return Reward(verdict.reward, verdict.parts), evidence


def missing_modules(report: Report) -> list[str]:
    """Return the modules, without their submodules, for want of which tests could not be collected."""
    return sorted({name for text in report.errors.values() for name in _MISSING.findall(text)})
