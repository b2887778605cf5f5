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
from rolltap.trainer.judges.tests import Name, Outcome, compare, junit_name, tell_tests
from rolltap.trainer.judges.verdict import Judged, UnjudgedError
from rolltap.trainer.tasks.task import PytestJudge

_MAX_LOG_BYTES = 64 << 20
_OUTCOMES: dict[str, Outcome] = {
    "PASSED": "passed",
    "FAILED": "failed",
    "SKIPPED": "skipped",
    "ERROR": "error",
    "XFAIL": "xfailed",
}


async def judge_by_log(spec: PytestJudge, parser: str, checkout: Checkout) -> Judged:
    """Return the judgement, as `judge_by_report`. Raises `UnjudgedError` and
    `MissingPackageError`."""
    status = await checkout.run(spec.command, spec.env, spec.timeout)
    log = checkout.job.log
    outcomes = await in_folder_thread(parse_log, parser, read_end(log, _MAX_LOG_BYTES))
    ended = f"the judge ended with status {status}"
    if not outcomes:
        raise UnjudgedError(f"{ended}, and {parser} found no test in {log.name}")
    if status != 0 and not {*outcomes.values()} & {"failed", "error"}:
        raise UnjudgedError(f"{ended}, and {parser} found no failure in {log.name}")
    judged = compare(outcomes, spec.fail_to_pass, spec.pass_to_pass)
    tests = tell_tests(outcomes, [*spec.fail_to_pass, *spec.pass_to_pass])
    return judged.and_evidence(exit_status=status, canary="absent", tests=tests)


def parse_log(parser: str, log: str) -> dict[Name, Outcome]:
    """Return the outcomes in a log.

    Raises `UnjudgedError` for a parser that the package does not have, and `MissingPackageError`
    without the package.
    """
    require_parser(parser)
    parsers, test_spec = _swebench()
    empty = test_spec("", "", [], "", "", [], [], log_parser=parser)
    try:
        found = parsers[parser](log, empty)
        return {junit_name(test): _OUTCOMES[status] for test, status in found.items()}
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
