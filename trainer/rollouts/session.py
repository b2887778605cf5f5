"""The way of one session, from a copy of the task's start to its row.

    try             the task's judge on its start, once: if its program is not there, no session
    runs start           a copy of the task's start: the workspace box             of the runtime;
    the recorder is all that it reaches (ready)         waits for a slot begin           event
    `session_started` harness         until it ends, or is stopped settle          every process
    that it left is killed end calls       running calls are recorded, later ones are refused facts
    faults, budgets and counts, from the rows (ran)           waits for a slot, unless there was a
    fault, or no completed call judge outcome         status, reward, error end             the row

A session that has begun has a row in any case: `infrastructure` when a step before the judge fails,
`cancelled` when it is stopped. One that cannot be prepared has one too; one that is stopped before
it began is as if it had not been.
"""

import asyncio
import errno
import logging
import math
import secrets
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, Self

from rolltap.addons.errors import InputError, RecorderError, RunError
from rolltap.addons.store.records import Session, utc_now
from rolltap.addons.store.rewards import session_rows
from rolltap.addons.store.session_options import SessionOptions
from rolltap.trainer.boxes.environment import CERTIFICATES, clean_environment
from rolltap.trainer.boxes.runtime import Box, BoxSpec, Ended, Runtime
from rolltap.trainer.concurrency import Once, in_folder_thread, run_to_end
from rolltap.trainer.folders import remove_folder
from rolltap.trainer.judges.changes import AgentResult
from rolltap.trainer.judges.checkout import Ahead, JudgeJob
from rolltap.trainer.judges.command import judge_here, last_line
from rolltap.trainer.judges.folders import open_to_owner
from rolltap.trainer.judges.judge import fault_on_start, judge, prepare_ahead
from rolltap.trainer.judges.verdict import Judged
from rolltap.trainer.phases import PhaseClock, send_spans
from rolltap.trainer.rollouts.config import RolloutConfig
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.node import Enter, SessionAttempt
from rolltap.trainer.rollouts.outcomes import is_judged, outcome
from rolltap.trainer.rollouts.provenance import Provenances
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.rollouts.workspace import Starts
from rolltap.trainer.runs.suspicions.rules import CALL_COLUMNS, EVENT_COLUMNS, suspicions
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.facts import Facts
from rolltap.trainer.traces.reader import SessionRows

logger = logging.getLogger(__name__)

_NEVER_STARTS = (errno.ENOENT, errno.EACCES, errno.ENOEXEC)
"""Errors of a program that is missing, or is no program: another attempt would fail too."""
_SPAN_ATTRIBUTES = (
    *("session_id", "task_id", "group_id", "harness"),
    *("status", "reward", "policy_version", "runtime"),
)
_NOT_RUN = (126, 127)
"""Exit statuses of a shell that cannot run a command."""
_SHOWN = (
    "A box shows the program's installation and the files that its preset names by ./ alone: show"
    " other folders with --tools DIR (tools in a recipe)"
)


@dataclass(frozen=True, slots=True)
class SessionContext:
    """Things that the sessions of a worker share. They may be used in one event loop after another.

    Attributes:
        work: Folder for what sessions need while they run.
        digests: Task id -> the task's digest, which takes reading its folders.
        judged: Digests of tasks whose judges have judged sessions of the run in this runtime.
        faults: Task id -> why its judge cannot judge the start; empty if it can.
        reading: Task id -> its digest, while it is read.
    """

    config: RolloutConfig
    harness: Harness
    runtime: Runtime
    recorder: Recorder
    work: Path
    starts: Starts
    provenances: Provenances
    harness_env: Mapping[str, str]
    digests: dict[str, str] = field(default_factory=dict)
    judged: Collection[str] = ()
    faults: Once[str, str] = field(default_factory=Once)
    reading: Once[str, str] = field(default_factory=Once)

    @classmethod
    def of(
        cls,
        config: RolloutConfig,
        harness: Harness,
        runtime: Runtime,
        recorder: Recorder,
        work: Path,
    ) -> Self:
        """Return a context whose starts and provenances are made in the folder `work`.

        Raises `EngineError` when the harness needs the engine's context window and the engine does
        not tell it.
        """
        return cls(
            config,
            harness,
            runtime,
            recorder,
            work,
            starts=Starts(work / "starts", runtime),
            provenances=Provenances(harness, runtime, work),
            harness_env=harness.environment(recorder.engine),
        )

    async def digest(self, task: Task) -> str:
        """Return the digest of a task, which is read once. Raises `InputError` for a path that
        cannot be read."""
        if task.id not in self.digests:
            read = partial(asyncio.to_thread, task.digest)
            self.digests[task.id] = await self.reading.get(task.id, read)
        return self.digests[task.id]


async def require_judge(context: SessionContext, job: JudgeJob) -> None:
    """Try the judge of a task on its start, once. Raises `InputError` if a program or module of it
    is not there.

    Raises as `judge`, too.
    """
    name = job.task.id
    if context.digests[name] in context.judged:
        return
    start = replace(job, name=name, result=None)
    if why := await context.faults.get(name, partial(fault_on_start, start)):
        raise InputError(f"task {name!r}: {why}")


def new_session(context: SessionContext, attempt: SessionAttempt) -> Session:
    """Return the row of a session that has not begun."""
    task = attempt.group.task
    return Session(
        session_id=attempt.session_id,
        task_id=task.id,
        group_id=attempt.group.group_id,
        harness=context.harness.name,
        status="unknown",
        policy_version=attempt.policy_version,
        preset_digest=context.harness.digest(),
        task_digest=context.digests.get(task.id, ""),
        runtime=context.runtime.name,
    )


async def run_session(context: SessionContext, attempt: SessionAttempt, enter: Enter) -> Facts:
    """Run a session and record it. Return its facts, which are empty when they are not known.

    The attempt has no row when it is cancelled before the session begins to run.

    Awaits `enter` before it begins to run, and before it is judged.

    Raises `RecorderError` when the recorder has died, and `RunError` and `OSError` when the run
    folder cannot be read or written. The session has its row then, if it can be written.
    """
    session = new_session(context, attempt)
    clock = PhaseClock("preparing", queued=attempt.queued_seconds, retried=attempt.retried_seconds)

    async def enter_timed(phase: Literal["running", "judging"]) -> None:
        clock.enter("queued")
        await enter(phase)
        clock.enter(phase)

    facts = Facts()
    try:
        facts = await _play(context, session, attempt.group, enter_timed)
    except asyncio.CancelledError:
        if session.status == "cancelled":  # it has no outcome yet
            session.error = attempt.why_stopped
        raise
    except (OSError, InputError) as error:
        session.status, session.error = "infrastructure", f"the session could not be run: {error}"
        facts = Facts(permanent=isinstance(error, InputError))
    except (RecorderError, RunError) as error:
        session.status, session.error = (
            "infrastructure",
            str(error),
        )  # `Recorder.end` raises it, after the row
    except Exception as error:  # its task may be the cause, and others' sessions go on
        logger.warning("session %s failed", session.session_id, exc_info=True)
        session.status, session.error = "infrastructure", f"the session could not be run: {error!r}"
        facts = Facts(permanent=True)
    finally:
        if session.status != "unknown":
            attempt.row = session
            clock.enter("")
            for phase, seconds in clock.seconds().items():
                setattr(session, f"{phase}_seconds", seconds)
            session.finished_at = utc_now()
            try:
                await run_to_end(end_session, context.recorder, session, attempt.group.task)
            finally:
                shown = {name: getattr(session, name) for name in _SPAN_ATTRIBUTES}
                await run_to_end(send_spans, clock, shown)
    return facts


def end_session(recorder: Recorder, session: Session, task: Task | None) -> None:
    """Count the suspicions of a session, and end it. Raises as `Recorder.end`."""
    try:
        count_suspicions(recorder.rows, session, task)
    finally:
        recorder.end(session)


def count_suspicions(rows: SessionRows, session: Session, task: Task | None) -> None:
    """Set the suspicions of a session, whose calls and events are in `rows`.

    What an agent did must not end the rollout: when a rule fails on it, the log says so.
    """
    try:
        calls = rows.of("calls", session.session_id, CALL_COLUMNS)
        events = rows.of("events", session.session_id, EVENT_COLUMNS)
        session.suspicions = suspicions(calls, events, task, session.evidence)
    except Exception:
        logger.warning(
            "the suspicions of session %s could not be counted", session.session_id, exc_info=True
        )


def end_recorded(session: Session, recorder: Recorder, evaluate: str | None) -> Facts:
    """End a session of a program that the caller started, with the reward of the command
    `evaluate`, or None.

    Returns its facts. A reward that the program gave at the session's end counts first.

    Raises as `Recorder.end_calls` and `Recorder.end`.
    """
    recorder.end_calls(session.session_id)
    facts = recorder.facts(session.session_id)
    if facts.unreadable is not None:
        session.status, session.error = "cancelled", facts.unreadable
    elif evaluate is not None:
        judged = None
        if is_judged(facts):
            judged = judge_here(
                evaluate, recorder.path / "logs" / f"{session.session_id}.evaluate.log"
            )
            session.parts, session.evidence = judged.parts, judged.evidence
        result = outcome(Ended(session.exit_status), math.inf, facts, judged)
        session.status, session.reward, session.error = result.status, result.reward, result.error
    elif facts.budget is not None:
        session.status, session.error = "budget", facts.budget
    if facts.unreadable is None and (rows := session_rows(recorder.path, session.session_id)):
        own = rows[-1]
        session.revision = own.revision + 1
        session.status = "completed" if session.exit_status == 0 else "failed"
        session.reward, session.parts, session.evidence, session.error = (
            own.reward,
            own.parts,
            own.evidence,
            None,
        )
        session.task_id, session.group_id = (
            own.task_id or session.task_id,
            own.group_id or session.group_id,
        )
    recorder.end(session)
    return facts


async def _play(context: SessionContext, session: Session, group: Group, enter: Enter) -> Facts:
    """Run the harness and the judge, and set the outcome in `session`."""
    recorder, task = context.recorder, group.task
    session.task_digest = await context.digest(task)
    timeout = task.timeout or context.config.timeout
    log = recorder.path / "logs" / f"{session.session_id}.log"
    log.parent.mkdir(exist_ok=True)
    folder = context.work / secrets.token_hex(4)
    made = AgentResult(folder / "workspace", folder / "home")
    ahead: Ahead | None = None
    try:
        async with _prepared(context, session, task, made) as (job, box):
            await enter("running")
            session.started_at = utc_now()
            session.policy_version = session.policy_version or recorder.published_version()
            session.status = "cancelled"
            hosts = None if task.allow is None else tuple(task.allow)
            given = SessionOptions(sampling=dict(group.sampling), rerun=group.fork, allow=hosts)
            await run_to_end(recorder.begin, session, group.key, given)
            ahead = prepare_ahead(job)
            command = context.harness.command_for(task.instruction)
            env = _environment(context, session.session_id, task, box)
            try:
                ended = await box.run(command, env=env, timeout=timeout, log=log)
            except ConnectionError:
                raise  # of a remote box: the program ran there
            except OSError as error:
                kind = InputError if error.errno in _NEVER_STARTS else OSError
                shown = f". {_SHOWN}" if context.runtime.isolated else ""
                raise kind(f"the harness {command[0]} cannot be started: {error}{shown}") from error
            session.exit_status = ended.status
            await box.settle()
            await run_to_end(recorder.stop_calls, session.session_id)
            facts = await asyncio.to_thread(recorder.facts, session.session_id)
        if facts.unreadable is not None:
            session.error = facts.unreadable  # no session of the rollout can have a result
            return facts
        if facts.diverged is not None:
            session.status, session.error = "diverged", facts.diverged
            return facts
        judged = None
        if is_judged(facts):
            await enter("judging")
            judged = await _judge(session, replace(job, ahead=ahead))
        result = outcome(ended, timeout, facts, judged)
        session.status, session.reward, session.error = result.status, result.reward, result.error
        if result.ended is not None:  # for a reward that somebody gives later
            session.evidence = {**session.evidence, "ended": result.ended}
        stopped_early = bool(ended.status) and not facts.calls and not facts.refusals
        not_run = stopped_early and ended.status in _NOT_RUN
        if facts.fault is not None:
            why = result.error
            if not_run:
                why = (
                    "a shell could not run a command, and the harness ended with status"
                    f" {ended.status}"
                )
            session.error = f"{why}; its output is in {log.name}"
            last = last_line(log).replace(str(made.workspace), "WORKSPACE")
            if last and not stopped_early:
                session.error += f", and ends with: {last}"
            elif last:  # the program's own words say why
                if last.startswith("Node.js v"):  # the last line of a crash: Node may be too old
                    needs = [f" ({quirk})" for quirk in context.harness.quirks if "Node" in quirk]
                    last += "".join(needs)
                session.error = f"{last}; {session.error}"
            if stopped_early and context.runtime.isolated:
                session.error += f". {_SHOWN}"
        if not_run:
            return facts._replace(permanent=True)
        return facts
    finally:
        try:
            if ahead is not None:
                await ahead.close()
        finally:
            await run_to_end(remove_folder, folder)


@asynccontextmanager
async def _prepared(
    context: SessionContext, session: Session, task: Task, made: AgentResult
) -> AsyncIterator[tuple[JudgeJob, Box]]:
    """Yield the box of a session, with its workspace, and what its judge will need. Raises
    `OSError` and `InputError`.

    The copy and the box have a time limit of their own, which begins with the copy: to wait for a
    thread is no part of it. What sessions share has other limits: starts, versions and images.
    """
    recorder, runtime, seconds = context.recorder, context.runtime, context.config.preparing_timeout
    (await context.provenances.of(task.image)).set_in(session)
    start = await context.starts.of(task)
    job = JudgeJob(
        task=task,
        start=start,
        runtime=runtime,
        result=made,
        name=session.session_id,
        logs=recorder.path / "logs",
        engine_urls=recorder.engine.split(","),
        network=recorder,
    )
    await require_judge(context, job)
    proxy = recorder.proxy(session.session_id)
    spec = BoxSpec(
        name=f"rolltap-{made.home.parent.name}",
        workspace=made.workspace,
        workdir=task.workdir,
        home=made.home,
        mounts=proxy.mounts() if runtime.isolated else (),
        image=task.image,
        limits=task.limits,
        proxy=proxy.address,
        accept=partial(recorder.accept, session.session_id),
    )
    loop = asyncio.get_running_loop()
    limit = asyncio.timeout(None)

    def begin() -> None:
        limit.reschedule(loop.time() + seconds)

    def copy() -> None:
        loop.call_soon_threadsafe(begin)
        made.home.mkdir(parents=True)
        start.copy_to(made.workspace)

    async with AsyncExitStack() as stack:
        try:
            async with limit:
                await in_folder_thread(copy)
                box = await stack.enter_async_context(runtime.box(spec))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise OSError(f"it could not be prepared in {seconds:g} s") from error
        yield job, box


def _environment(context: SessionContext, session_id: str, task: Task, box: Box) -> dict[str, str]:
    """Return the whole environment of the harness. The recorder's variables win."""
    isolated = context.runtime.isolated
    certificates = CERTIFICATES if isolated else None
    recorded = context.recorder.proxy(session_id).environment(
        session_id, address=box.proxy, certificates=certificates
    )
    return {
        **clean_environment(Path(box.home), isolated=isolated),
        **context.harness_env,
        **task.env,
        **recorded,
    }


async def _judge(session: Session, job: JudgeJob) -> Judged:
    """Return the judgement, and set its parts and evidence in `session`.

    A judge that fails in a way that nobody thought of leaves the session unjudged: the cause may be
    what an agent made. `OSError`, `InputError` and `RecorderError` are raised: a fault of this
    machine, of the task or of the recorder is none of the agent's.
    """
    assert job.result is not None
    try:
        await in_folder_thread(
            open_to_owner, job.result.home
        )  # the agent may have closed it to this user
        judged = await judge(job)
    except (OSError, InputError, RecorderError):
        raise
    except Exception as error:
        logger.warning("the judge of session %s failed", session.session_id, exc_info=True)
        judged = Judged(unjudged=f"the judge failed: {error!r}")
    session.parts, session.evidence = judged.parts, judged.evidence
    return judged
