"""A log parser of the `swebench` package as the judge: for test programs that write no JUnit
report.

The agent's code runs in the test program and can print lines that the parser takes for results. A
report is harder to forge: see `canary`. The package needs no Docker for this.
"""

from functools import lru_cache
from typing import Any

from rolltap.addons.errors import MissingPackageError, install_command
from rolltap.trainer.concurrency import in_folder_thread
from rolltap.trainer.judges.checkout import Checkout
from rolltap.trainer.judges.command import read_end
from rolltap.trainer.judges.verdict import Reward, UnjudgedError
from rolltap.trainer.tasks.task import PytestJudge

_MAX_LOG_BYTES = 64 << 20
_MAX_TESTS = 500


async def judge_by_log(
    spec: PytestJudge, parser: str, checkout: Checkout
) -> tuple[Reward, dict[str, Any]]:
    """Return the reward and the evidence, as `judge_by_report`. Raises `UnjudgedError` and
    `MissingPackageError`."""
    status = await checkout.run(spec.command, spec.env, spec.timeout)
    log = read_end(checkout.job.log, _MAX_LOG_BYTES)
    outcomes = await in_folder_thread(parse_log, parser, log)
    ended = f"the judge ended with status {status}"
    if not outcomes:
        raise UnjudgedError(f"{ended}, and {parser} found no test in {checkout.job.log.name}")
    if status != 0 and not {*outcomes.values()} & {"FAILED", "ERROR"}:
        raise UnjudgedError(f"{ended}, and {parser} found no failure in {checkout.job.log.name}")
    reward, parts = _grade(outcomes, spec)
    expected = [*spec.fail_to_pass, *spec.pass_to_pass] or list(outcomes)
    tests = {name: outcomes.get(name, "missing").lower() for name in expected}
    worst_first = sorted(tests.items(), key=lambda test: test[1] in ("passed", "xfail"))
    evidence = {"exit_status": status, "canary": "absent"}
    return Reward(reward, parts), {**evidence, "tests": dict(worst_first[:_MAX_TESTS])}


def parse_log(parser: str, log: str) -> dict[str, str]:
    """Return the outcomes in a log: test -> PASSED, FAILED, SKIPPED, ERROR or XFAIL.

    Raises `UnjudgedError` for a parser that the package does not have, and `MissingPackageError`
    without the package.
    """
    require_parser(parser)
    parsers, test_spec = _swebench()
    empty = test_spec("", "", [], "", "", [], [], log_parser=parser)
    try:
        return dict(parsers[parser](log, empty))
    except Exception as error:  # the agent's code wrote the log
        raise UnjudgedError(f"{parser} failed: {error!r}") from error


def require_parser(parser: str) -> None:
    """Raise `UnjudgedError` for a parser that the package does not have, and `MissingPackageError`
    without it."""
    if parser not in _swebench()[0]:
        raise UnjudgedError(f"swebench has no log parser {parser!r}", broke=False)


@lru_cache(maxsize=1)
def _swebench() -> tuple[dict[str, Any], Any]:
    try:
        from swebench.harness.log_parsers import PARSER_REGISTRY
        from swebench.types import TestSpec
    except ImportError as error:
        message = f"the judge's 'log_parser' needs swebench ({error}): {install_command('swe')}"
        raise MissingPackageError(message) from error
    return PARSER_REGISTRY, TestSpec


def _grade(outcomes: dict[str, str], spec: PytestJudge) -> tuple[float, dict[str, float]]:
    """Return the reward and the parts by the package's own graders; without lists all tests must
    pass."""
    from swebench.harness import grading

    if not spec.fail_to_pass and not spec.pass_to_pass:
        share = sum(
            outcome in ("PASSED", "XFAIL", "SKIPPED") for outcome in outcomes.values()
        ) / len(outcomes)
        return float(share == 1.0 and "PASSED" in outcomes.values()), {"tests": share}
    gold = {"FAIL_TO_PASS": spec.fail_to_pass, "PASS_TO_PASS": spec.pass_to_pass}
    report = grading.get_eval_tests_report(outcomes, gold)
    parts = {}
    if spec.fail_to_pass:
        parts["fail_to_pass"] = float(grading.compute_fail_to_pass(report))
    if spec.pass_to_pass:
        parts["pass_to_pass"] = float(grading.compute_pass_to_pass(report))
    return float(grading.get_resolution_status(report) == grading.ResolvedStatus.FULL.value), parts
