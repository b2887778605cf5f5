"""Judging a session: its reward, or why there is none.

A judge judges in a fresh copy of the task's start: the task's own tests are laid over it, the
agent's changes are applied to all else, and the judge runs in a box without network. Nothing of the
agent's but these changes is there.

A judge without a verdict (a time limit, a signal, no report, words that are no reward) may be
broken itself, or by the agent: its code runs in the judge's programs. The untouched start tells
which, and is judged once per task: before the first session of a rollout, else when this is needed.
A judge that has a verdict on it and twice none with the agent's changes was broken by these, and
the reward is the worst of the judge's range. Without a verdict on the untouched start, the session
is unjudged.

`_judge` goes through the judges of a task. `_attempt` asks one of them once, by pytest's report if
its command names pytest. `_ask` opens the checkout, in which `_ask_in` asks. `_judge_start` is an
attempt on the untouched start.
"""

import dataclasses
import hashlib
import logging
import shlex
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rolltap.trainer.concurrency import Once, in_folder_thread, run_to_end
from rolltap.trainer.folders import remove_folder
from rolltap.trainer.judges.archive import SUFFIX, keep_changes
from rolltap.trainer.judges.changes import AgentFolders, Changes, printable
from rolltap.trainer.judges.checkout import Checkout, after_run, open_checkout
from rolltap.trainer.judges.command import (
    judge_by_command,
    judge_by_function,
    judge_by_log,
    missing_module,
    missing_program,
    quote_last_line,
    read_end,
)
from rolltap.trainer.judges.folders import TooMuchError
from rolltap.trainer.judges.layout import Ahead, JudgeJob
from rolltap.trainer.judges.model import judge_by_model
from rolltap.trainer.judges.protected import OneJudge, judges_of, runs_pytest
from rolltap.trainer.judges.tests import judge_by_report
from rolltap.trainer.judges.verdict import (
    Judged,
    UnjudgedError,
    best_reward,
    weighted_mean,
    worst_reward,
)
from rolltap.trainer.tasks.task import (
    CommandJudge,
    Judge,
    LLMJudge,
    PytestJudge,
    PythonJudge,
    SeveralJudges,
)

logger = logging.getLogger(__name__)

_MAX_BASELINES = 10_000
_MAX_REWRITTEN = 50
_MAX_PATH = 300


def _is_kept(judged: Judged) -> bool:
    return judged.reward is not None and len(_baselines) < _MAX_BASELINES


_baselines: Once[str, Judged] = Once(_is_kept)
"""Judgements of untouched starts, by a digest of all that they depend on."""


async def fault_on_start(job: JudgeJob) -> str:
    """Try the programs that judge a task on its untouched start. Return why one cannot run, or "".

    Warns of one that runs and has no verdict there: without a verdict on the start, a session may
    be unjudged. Raises as `judge`.
    """
    for spec in judges_of(job.task.effective_judge):
        if isinstance(spec, LLMJudge | PythonJudge):
            continue
        untouched = await _judge_start(spec, job)
        if untouched.unjudged is None:
            continue
        found = f"has no verdict on the untouched start: {untouched.unjudged}"
        why = f"its judge, {shlex.join(spec.command)}, {found}"
        if untouched.lacks:
            return f"{why}. Install it for the judge, or name another program in its command"
        logger.warning("task %s: %s. A session that leaves it so is unjudged", job.task.id, why)
    return ""


@asynccontextmanager
async def on_copy(job: JudgeJob, work: Path) -> AsyncIterator[tuple[JudgeJob, AgentFolders]]:
    """Yield the job of a session that no harness runs, and its folders, which are below `work`.

    Its workspace is a copy of the start, in which the caller makes changes. Raises `OSError`.
    """
    folder = Path(tempfile.mkdtemp(dir=work))
    result = AgentFolders(folder / "workspace", folder / "home")
    try:
        result.home.mkdir()
        await in_folder_thread(job.start.copy_to, result.workspace)
        yield dataclasses.replace(job, folders=result), result
    finally:
        await run_to_end(remove_folder, folder)


async def judge(job: JudgeJob) -> Judged:
    """Judge what a session left. No process of it may run any more.

    Writes the agent's changes to `NAME.diff` in the folder of the job's logs, their archive and the
    judge's output beside it.

    Raises `InputError` for a task that cannot be judged here, `MissingPackageError` for a package
    that its judge needs, and `OSError` for a fault of this machine, for instance a full disk.
    """
    assert job.folders is not None
    spec = job.task.effective_judge
    try:
        changes = await job.find_changes(job.folders.workspace)
    except TooMuchError as error:
        evidence = {"judge": spec.kind, "too_much": str(error)}
        return Judged(reward=worst_reward(spec), evidence=evidence)
    await in_folder_thread(_keep, changes, job)
    return await judge_changes(dataclasses.replace(job, changes=changes))


def _keep(changes: Changes, job: JudgeJob) -> None:
    assert job.folders is not None
    (job.logs / f"{job.name}.diff").write_text(changes.diff, encoding="utf-8")
    archive = job.logs / f"{job.name}{SUFFIX}"
    keep_changes(changes, job.start, job.folders.workspace, archive)


async def judge_changes(job: JudgeJob) -> Judged:
    """Judge the changes of a job. Raises as `judge`, and writes the judge's output alone."""
    judged = await _judge(job.task.effective_judge, job)
    evidence = await in_folder_thread(job.changes.evidence)
    return dataclasses.replace(judged, evidence={**evidence, **judged.evidence})


async def _judge(spec: Judge, job: JudgeJob) -> Judged:
    if isinstance(spec, SeveralJudges):
        found: dict[str, Judged] = {}
        for number, one in enumerate(spec.judges):
            part = dataclasses.replace(job, name=f"{job.name}.{number}")
            found[one.name] = await _judge(one.judge, part)
        return _combine(spec, found)
    judged = await _attempt(spec, job)
    if judged.reward is None:
        return await _without_verdict(judged, spec, job)
    return await _against_start(judged, spec, job)


def _combine(spec: SeveralJudges, found: dict[str, Judged]) -> Judged:
    """Return the weighted mean of rewards, each a part with its judge's name; the judge's parts are
    `NAME.PART`."""
    parts: dict[str, float] = {}
    evidence: dict[str, Any] = {"judge": "several", "judges": {}}
    missing: list[str] = []
    for name, judged in found.items():
        evidence["judges"][name] = judged.evidence
        if "forged_report" in judged.evidence:
            evidence["forged_report"] = judged.evidence["forged_report"]
        if judged.reward is None:
            missing.append(f"{name}: {judged.unjudged}")
            continue
        parts[name] = judged.reward
        for part, value in judged.parts.items():
            parts[f"{name}.{part}"] = value
    if missing:
        return Judged(
            unjudged="; ".join(missing),
            parts=parts,
            evidence=evidence,
        )
    reward = weighted_mean(spec, [parts[one.name] for one in spec.judges])
    return Judged(
        reward=reward,
        parts=parts,
        evidence=evidence,
    )


async def _without_verdict(first: Judged, spec: OneJudge | LLMJudge, job: JudgeJob) -> Judged:
    """Return the judgement of a session whose judge has no verdict."""
    if not first.broke or not job.changes:
        return first
    untouched = await _judge_start(spec, job)
    if untouched.reward is None:
        both = f"{first.unjudged}; on the untouched start: {untouched.unjudged}"
        return dataclasses.replace(first, unjudged=both)
    last = first
    # a load of this machine passes, a second writer of a verdict was no load
    if "forged_report" not in first.evidence:
        last = await _attempt(spec, job)
        if last.reward is not None:
            return await _against_start(last.and_evidence(first_judged=first.unjudged), spec, job)
        if not last.broke:
            both = f"{first.unjudged}; judged again: {last.unjudged}"
            return dataclasses.replace(last, unjudged=both)
    evidence = {
        **last.evidence,
        "broke_judge": first.unjudged,
        "untouched_start": untouched.reward,
    }
    return Judged(reward=worst_reward(spec), evidence=evidence)


async def _against_start(judged: Judged, spec: OneJudge | LLMJudge, job: JudgeJob) -> Judged:
    """Compare a verdict with the verdict on the untouched start, where this tells what it means.

    If no test of `pass_to_pass` passes, on the untouched start neither, the installation is broken.
    A good verdict may be a forger's: see `_forgery`.
    """
    canary = judged.evidence.get("canary")
    if canary is not None and judged.parts.get("pass_to_pass") == 0.0:
        untouched = await _judge_start(spec, job)
        if untouched.parts.get("pass_to_pass"):
            return judged
        why = "no test of 'pass_to_pass' passes on the untouched start"
        why += f"; the output of the judge is in {job.log.name}"
        return Judged(unjudged=why, evidence=judged.evidence)
    worst = worst_reward(spec)
    is_odd = bool(judged.evidence.get("rewritten")) or canary == "absent"
    if judged.reward == worst or not is_odd:
        return judged
    untouched = await _judge_start(spec, job)
    try:
        forgery = _forgery(judged, untouched)
    except UnjudgedError as error:
        return Judged(unjudged=str(error), evidence=judged.evidence)
    if forgery is None:
        return judged
    return dataclasses.replace(judged, reward=worst).and_evidence(forged_report=forgery)


def _forgery(judged: Judged, untouched: Judged) -> str | None:
    """Return why a verdict is a forger's, or None.

    Signs of it are files or limits of the judge that were changed while it ran, and a report
    without the tests that must fail, unless the judgement of the untouched start has the same sign.

    Raises `UnjudgedError` for such a report if the untouched start has no report to compare.
    """
    rewritten = set(judged.evidence.get("rewritten", ()))
    if rewritten - set(untouched.evidence.get("rewritten", ())):
        return "the judge's own files or limits were changed while it ran"
    if judged.evidence.get("canary") != "absent" or untouched.evidence.get("canary") == "absent":
        return None
    if untouched.reward is None:
        why = "the report lacks the tests that must fail, and the untouched start has no report"
        raise UnjudgedError(f"{why}: {untouched.unjudged}")
    return "the report lacks tests that pytest ran on the untouched start"


async def _judge_start(spec: OneJudge | LLMJudge, job: JudgeJob) -> Judged:
    """Return the judgement of the untouched start. A verdict is made once; a judge that had none is
    asked again."""
    task = job.task
    untouched = dataclasses.replace(
        job,
        folders=None,
        changes=Changes(),
        name=f"{job.name}.start",
    )
    facts = (
        spec,
        job.start.digest,
        job.runtime.name,
        task.image,
        task.workdir,
        task.instruction,
        sorted(task.env.items()),
        task.limits,
    )
    key = hashlib.sha256(repr(facts).encode()).hexdigest()
    return await _baselines.get(key, partial(_attempt_start, spec, untouched))


async def _attempt_start(spec: OneJudge | LLMJudge, untouched: JudgeJob) -> Judged:
    judged = await _attempt(spec, untouched)
    if judged.unjudged is None:
        return judged
    output = read_end(untouched.log)
    asked = untouched.task.instruction
    lacks = judged.lacks or missing_module(output, asked) or missing_program(output, asked)
    why = quote_last_line(judged.unjudged, untouched.log)
    return dataclasses.replace(judged, unjudged=why, lacks=lacks)


async def _attempt(spec: OneJudge | LLMJudge, job: JudgeJob) -> Judged:
    """Ask one judge, once.

    A command that names pytest is judged by its report too, if it makes one on the untouched start:
    a test can end pytest with status 0.
    """
    by_report = _by_report(spec)
    if by_report is None:
        return await _ask(spec, job)
    judges_start = job.folders is None
    if judges_start:
        judged = await _ask(by_report, job)
        if judged.reward is None:
            return await _ask(spec, job)
    else:
        untouched = await _judge_start(spec, job)
        if "canary" not in untouched.evidence:  # without a report
            return await _ask(spec, job)
        judged = await _ask(by_report, job)
        if judged.reward is None:
            return judged
    passed = judged.reward == 1.0 and judged.evidence["exit_status"] == 0
    reward = best_reward(spec) if passed else worst_reward(spec)
    return dataclasses.replace(judged, reward=reward).and_evidence(judge=spec.kind)


def _by_report(spec: Judge) -> PytestJudge | None:
    """Return the judge that reads the report of a command's pytest, if the command names it."""
    if not isinstance(spec, CommandJudge) or not runs_pytest(spec):
        return None
    if not spec.by_status or spec.own_paths or spec.run:
        return None
    shared = {"timeout", "paths", "files", "tests", "env", "allow", "command"}
    return PytestJudge(**spec.model_dump(include=shared))


def prepare_ahead(job: JudgeJob) -> Ahead | None:
    """Begin to lay out the checkout that is needed first, where the runtime isolates: else the
    agent could reach it."""
    spec = job.task.effective_judge
    if isinstance(spec, SeveralJudges):
        spec = spec.judges[0].judge
    spec = _by_report(spec) or spec
    if not job.runtime.isolated or isinstance(spec, LLMJudge | SeveralJudges):
        return None
    return Ahead(job, spec)


async def _ask(spec: OneJudge | LLMJudge, job: JudgeJob) -> Judged:
    evidence: dict[str, Any] = {"judge": spec.kind}
    try:
        if isinstance(spec, LLMJudge):
            judged = await judge_by_model(spec, job)
        else:
            async with after_run(job, spec) as left, open_checkout(left, spec) as checkout:
                applied = await in_folder_thread(checkout.changes.evidence)
                for name in ("refused", "refused_files", "planted_files"):
                    evidence[name] = applied[name]
                evidence["log"] = job.log.name
                judged = await _ask_in(checkout, spec, job)
    except UnjudgedError as error:
        judged = Judged.without(error)
    return dataclasses.replace(judged, evidence={**evidence, **judged.evidence})


async def _ask_in(checkout: Checkout, spec: OneJudge, job: JudgeJob) -> Judged:
    """Ask a judge in its checkout. Raises `UnjudgedError`."""
    if isinstance(spec, CommandJudge):
        judged = await judge_by_command(spec, checkout)
    elif isinstance(spec, PythonJudge):
        judged = await judge_by_function(spec, checkout)
    elif spec.log_parser is not None:
        judged = await judge_by_log(spec, spec.log_parser, checkout)
    else:
        judge_start = None if job.folders is None else partial(_judge_start, spec, job)
        judged = await judge_by_report(spec, checkout, judge_start)
    rewritten = await in_folder_thread(checkout.rewritten)
    rewritten += judged.evidence.get("rewritten", ())
    if not rewritten:
        return judged
    return judged.and_evidence(
        rewritten=[printable(path)[:_MAX_PATH] for path in rewritten[:_MAX_REWRITTEN]]
    )
