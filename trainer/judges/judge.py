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
"""

import dataclasses
import hashlib
import logging
import math
import shlex
from collections.abc import Sequence
from functools import partial
from typing import Any

from rolltap.trainer.concurrency import Once, in_folder_thread
from rolltap.trainer.judges.archive import SUFFIX, keep_changes
from rolltap.trainer.judges.changes import Changes, find_changes, printable
from rolltap.trainer.judges.checkout import Ahead, JudgeJob, after_run, open_checkout
from rolltap.trainer.judges.command import (
    judge_by_command,
    judge_by_function,
    missing_module,
    missing_program,
    quote_last_line,
    read_end,
)
from rolltap.trainer.judges.folders import TooMuchError
from rolltap.trainer.judges.log import judge_by_log
from rolltap.trainer.judges.model import judge_by_model
from rolltap.trainer.judges.protected import OneJudge, judges_of, runs_pytest
from rolltap.trainer.judges.tests import Skips, judge_by_report
from rolltap.trainer.judges.verdict import Judged, Reward, UnjudgedError, best_reward, worst_reward
from rolltap.trainer.tasks.task import (
    CommandJudge,
    Judge,
    LLMJudge,
    PytestJudge,
    PythonJudge,
    SeveralJudges,
)

logger = logging.getLogger(__name__)


def _combine(spec: SeveralJudges, judged: Sequence[Judged]) -> Judged:
    """Return the weighted mean of rewards, each a part with its judge's name; the judge's parts are
    `NAME.PART`."""
    parts: dict[str, float] = {}
    evidence: dict[str, Any] = {"judge": "several", "judges": {}}
    for one, result in zip(spec.judges, judged, strict=True):
        evidence["judges"][one.name] = result.evidence
        if "forged_report" in result.evidence:
            evidence["forged_report"] = result.evidence["forged_report"]
        if result.reward is not None:
            parts[one.name] = result.reward
            parts.update((f"{one.name}.{name}", part) for name, part in result.parts.items())
    missing = [
        f"{one.name}: {result.unjudged}"
        for one, result in zip(spec.judges, judged, strict=True)
        if result.unjudged
    ]
    if missing:
        return Judged(unjudged="; ".join(missing), parts=parts, evidence=evidence)
    weights = math.fsum(one.weight for one in spec.judges)
    whole = math.fsum(one.weight * parts[one.name] for one in spec.judges) / weights
    return Judged(reward=whole, parts=parts, evidence=evidence)


@dataclasses.dataclass(slots=True)
class _Baseline:
    """The judgement of an untouched start, and the tests that it skipped or that failed in it as
    expected.

    Without a verdict, `lacks` is the program or module that the judge needs and does not find.
    """

    judged: Judged
    skips: Skips = frozenset()
    lacks: str = ""


_MAX_BASELINES = 10_000


def _is_kept(baseline: _Baseline) -> bool:
    return baseline.judged.reward is not None and len(_baselines) < _MAX_BASELINES


_baselines: Once[str, _Baseline] = Once(_is_kept)
"""Judgements of untouched starts, by a digest of all that they depend on."""


async def fault_on_start(job: JudgeJob) -> str:
    """Try the programs that judge a task on its untouched start. Return why one cannot run, or "".

    Warns of one that runs and has no verdict there: without a verdict on the start, a session may
    be unjudged. Raises as `judge`.
    """
    for spec in judges_of(job.task.effective_judge):
        if isinstance(spec, LLMJudge | PythonJudge):
            continue
        baseline = await _judge_baseline(spec, job)
        if baseline.judged.unjudged is None:
            continue
        found = f"has no verdict on the untouched start: {baseline.judged.unjudged}"
        why = f"its judge, {shlex.join(spec.command)}, {found}"
        if baseline.lacks:
            return f"{why}. Install it for the judge, or name another program in its command"
        logger.warning("task %s: %s. A session that leaves it so is unjudged", job.task.id, why)
    return ""


async def judge(job: JudgeJob) -> Judged:
    """Judge what a session left. No process of it may run any more.

    Writes the agent's changes to `NAME.diff` in the folder of the job's logs, their archive and the
    judge's output beside it.

    Raises `InputError` for a task that cannot be judged here, `MissingPackageError` for a package
    that its judge needs, and `OSError` for a fault of this machine, for instance a full disk.
    """
    assert job.result is not None
    spec = job.task.effective_judge
    try:
        changes = await in_folder_thread(
            find_changes, job.start.folder, job.result.workspace, digest=job.start.digest
        )
    except TooMuchError as error:
        return Judged(
            reward=worst_reward(spec), evidence={"judge": spec.kind, "too_much": str(error)}
        )
    await in_folder_thread(_keep, changes, job)
    return await judge_changes(dataclasses.replace(job, changes=changes))


def _keep(changes: Changes, job: JudgeJob) -> None:
    assert job.result is not None
    (job.logs / f"{job.name}.diff").write_text(changes.diff, encoding="utf-8")
    archive = job.logs / f"{job.name}{SUFFIX}"
    keep_changes(changes, job.start, job.result.workspace, archive)


async def judge_changes(job: JudgeJob) -> Judged:
    """Judge the changes of a job. Raises as `judge`, and writes the judge's output alone."""
    judged = await _judge(job.task.effective_judge, job)
    evidence = await in_folder_thread(job.changes.evidence)
    return dataclasses.replace(judged, evidence={**evidence, **judged.evidence})


async def _judge(spec: Judge, job: JudgeJob) -> Judged:
    if isinstance(spec, SeveralJudges):
        results = [
            await _judge(one.judge, dataclasses.replace(job, name=f"{job.name}.{number}"))
            for number, one in enumerate(spec.judges)
        ]
        return _combine(spec, results)
    try:
        judged = await _run_judge(spec, job)
    except UnjudgedError as error:
        judged = await _rejudge_on_baseline(error, spec, job)
    if judged.reward is None or "broke_judge" in judged.evidence or isinstance(spec, LLMJudge):
        return judged
    judged = await _check_files(judged, spec, job)
    return await _check_tests(judged, spec, job) if "canary" in judged.evidence else judged


async def _check_files(judged: Judged, spec: OneJudge, job: JudgeJob) -> Judged:
    """Return the worst reward when the judge's own files or limits changed while it ran, unless the
    start's do too."""
    if judged.reward == worst_reward(spec) or "rewritten" not in judged.evidence or not job.changes:
        return judged
    baseline = (await _judge_baseline(spec, job)).judged
    if {*judged.evidence["rewritten"]} <= {*baseline.evidence.get("rewritten", [])}:
        return judged
    return judged.forged(
        "the judge's own files or limits were changed while it ran", worst_reward(spec)
    )


async def _run_judge(
    spec: OneJudge | LLMJudge, job: JudgeJob, keep: _Baseline | None = None
) -> Judged:
    """Ask one judge. Raises `UnjudgedError` when it has no verdict. `keep` is set on the untouched
    start.

    A command that names pytest is judged by its report too, if it makes one on the untouched start:
    a test can end pytest with status 0.
    """
    if (by_report := _by_report(spec)) is not None:
        reports = keep is not None or "canary" in (await _judge_baseline(spec, job)).judged.evidence
        try:
            if reports:
                judged = await _ask_judge(by_report, job, keep)
                passed = (
                    judged.reward == best_reward(by_report) and judged.evidence["exit_status"] == 0
                )
                reward = best_reward(spec) if passed else worst_reward(spec)
                return dataclasses.replace(judged, reward=reward).and_evidence(judge=spec.kind)
        except UnjudgedError:
            if keep is None:
                raise
    return await _ask_judge(spec, job, keep)


def _by_report(spec: Judge) -> PytestJudge | None:
    """Return the judge that reads the report of a command's pytest, if the command names it."""
    if not isinstance(spec, CommandJudge) or not runs_pytest(spec):
        return None
    if not spec.by_status or spec.own_paths or spec.run:
        return None
    return PytestJudge(
        **spec.model_dump(include={"timeout", "paths", "files", "tests", "env", "allow", "command"})
    )


def prepare_ahead(job: JudgeJob) -> Ahead | None:
    """Begin to lay out the checkout that is needed first, where the runtime isolates: else the
    agent could reach it."""
    spec = job.task.effective_judge
    spec = spec.judges[0].judge if isinstance(spec, SeveralJudges) else spec
    spec = _by_report(spec) or spec
    if not job.runtime.isolated or isinstance(spec, LLMJudge | SeveralJudges):
        return None
    return Ahead(job, spec)


async def _ask_judge(spec: OneJudge | LLMJudge, job: JudgeJob, keep: _Baseline | None) -> Judged:
    async def allow(skips: Skips) -> Skips:
        assert not isinstance(spec, LLMJudge)
        if keep is not None:
            keep.skips = skips
            return skips
        return skips & (await _judge_baseline(spec, job)).skips

    evidence: dict[str, Any] = {"judge": spec.kind}
    if isinstance(spec, LLMJudge):
        reward, more = await judge_by_model(spec, job)
        return _judged(reward, {**evidence, **more})
    async with after_run(job, spec) as left, open_checkout(left, spec) as checkout:
        applied = await in_folder_thread(checkout.changes.evidence)
        evidence |= {key: applied[key] for key in ("refused", "refused_files", "planted_files")} | {
            "log": job.log.name
        }
        try:
            if isinstance(spec, PytestJudge) and spec.log_parser is not None:
                reward, more = await judge_by_log(spec, spec.log_parser, checkout)
            elif isinstance(spec, PytestJudge):
                reward, more = await judge_by_report(spec, checkout, allow)
            elif isinstance(spec, PythonJudge):
                reward, more = await judge_by_function(spec, checkout)
            else:
                reward, more = await judge_by_command(spec, checkout)
            if (
                isinstance(spec, PythonJudge | CommandJudge)
                and not spec.range[0] <= reward.reward <= spec.range[1]
            ):
                why = (
                    f"the reward {reward.reward:g} is not in the judge's range {list(spec.range)}:"
                    " set its 'range'"
                )
                raise UnjudgedError(why)
        except UnjudgedError as error:
            error.evidence = {**evidence, **error.evidence}
            raise
        rewritten = await in_folder_thread(checkout.rewritten)
        rewritten += [f"limits of the judge: {name}" for name in more.pop("limits", ())]
        if rewritten:
            evidence["rewritten"] = [printable(path)[:300] for path in rewritten[:50]]
    return _judged(reward, {**evidence, **more})


def _judged(reward: Reward, evidence: dict[str, Any]) -> Judged:
    if reward.reason:
        evidence["reason"] = reward.reason[:2000]
    return Judged(reward=reward.reward, parts=reward.parts, evidence=evidence)


async def _rejudge_on_baseline(
    error: UnjudgedError, spec: OneJudge | LLMJudge, job: JudgeJob
) -> Judged:
    """Return the judgement of a session whose judge has no verdict."""
    evidence = {"judge": spec.kind, **error.evidence}
    if not error.broke or not job.changes:
        return Judged(unjudged=str(error), evidence=evidence)
    baseline = (await _judge_baseline(spec, job)).judged
    if baseline.reward is None:
        return Judged(
            unjudged=f"{error}; on the untouched start: {baseline.unjudged}", evidence=evidence
        )
    try:  # a load of this machine passes, a second writer of a verdict was no load
        if "forged_report" not in evidence:
            return (await _run_judge(spec, job)).and_evidence(first_judged=str(error))
    except UnjudgedError as second:
        evidence |= second.evidence
        if not second.broke:
            return Judged(unjudged=f"{error}; judged again: {second}", evidence=evidence)
    evidence |= {"broke_judge": str(error), "untouched_start": baseline.reward}
    return Judged(reward=worst_reward(spec), evidence=evidence)


async def _check_tests(judged: Judged, spec: OneJudge, job: JudgeJob) -> Judged:
    """Compare a report with that of the untouched start when only this tells what it means.

    A report without the tests that must fail is not pytest's, unless the untouched start's lacks
    them too. Tests that passed before and none of which passes on the untouched start are the sign
    of a broken installation.
    """
    none_passes = judged.parts.get("pass_to_pass") == 0.0
    if not none_passes and not (
        judged.reward != worst_reward(spec) and judged.evidence["canary"] == "absent"
    ):
        return judged
    baseline = (await _judge_baseline(spec, job)).judged
    if none_passes:
        if baseline.parts.get("pass_to_pass", 0.0) > 0.0:
            return judged
        why = (
            "no test of 'pass_to_pass' passes on the untouched start; the output is in"
            f" {job.log.name}"
        )
        return Judged(unjudged=why, evidence=judged.evidence)
    if baseline.reward is None:
        why = (
            "the report lacks the tests that must fail, and there is none of the start:"
            f" {baseline.unjudged}"
        )
        return Judged(unjudged=why, evidence=judged.evidence)
    if baseline.evidence["canary"] == "absent":
        return judged
    return judged.forged(
        "tests are not in it that pytest ran on the untouched start", worst_reward(spec)
    )


async def _judge_baseline(spec: OneJudge | LLMJudge, job: JudgeJob) -> _Baseline:
    """Return the judgement of the untouched start. A verdict is made once; a judge that had none is
    asked again."""
    task = job.task
    facts = (spec, job.start.digest, job.runtime.name, task.image, task.workdir, task.instruction)
    key = hashlib.sha256(repr((*facts, sorted(task.env.items()), task.limits)).encode()).hexdigest()
    return await _baselines.get(key, partial(_judge_start, spec, job))


async def _judge_start(spec: OneJudge | LLMJudge, job: JudgeJob) -> _Baseline:
    start = dataclasses.replace(job, result=None, changes=Changes(), name=f"{job.name}.start")
    baseline = _Baseline(Judged())
    try:
        baseline.judged = await _run_judge(spec, start, baseline)
    except UnjudgedError as error:
        why = quote_last_line(str(error), start.log)
        baseline.judged = Judged(unjudged=why, evidence=error.evidence)
        output = read_end(start.log) if start.log.exists() else ""
        asked = job.task.instruction
        baseline.lacks = (
            error.lacks or missing_module(output, asked) or missing_program(output, asked)
        )
    return baseline
