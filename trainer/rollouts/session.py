"""The way of one session, from a copy of the task's start to its row.

    prepared        its workspace and its box: see `preparation`
    (ready)         waits for a slot
    begin           event `session_started`
    harness         until it ends, or is stopped
    settle          every process that it left is killed
    end calls       running calls are recorded, later ones are refused
    facts           faults, budgets and counts, from the rows
    (ran)           waits for a slot, unless there was a fault, or no completed call
    judge
    outcome         status, reward, error
    end             the row

A session that has begun has a row in any case: `infrastructure` when a step before the judge fails,
`cancelled` when it is stopped. One that cannot be prepared has one too; one that is stopped before
it began is as if it had not been.
"""

import asyncio
import errno
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from rolltap.addons.errors import InputError, RecorderError, RunError
from rolltap.addons.store.records import Session, utc_now
from rolltap.addons.store.session_options import SessionOptions
from rolltap.trainer.boxes.environment import CERTIFICATES, clean_environment
from rolltap.trainer.boxes.runtime import Box, Ended
from rolltap.trainer.concurrency import in_folder_thread, run_to_end
from rolltap.trainer.folders import remove_folder
from rolltap.trainer.judges.changes import AgentFolders
from rolltap.trainer.judges.command import last_line
from rolltap.trainer.judges.folders import open_to_owner
from rolltap.trainer.judges.judge import judge, prepare_ahead
from rolltap.trainer.judges.layout import Ahead, JudgeJob
from rolltap.trainer.judges.verdict import Judged
from rolltap.trainer.phases import PhaseClock, send_spans
from rolltap.trainer.rollouts.node import Enter, EnteredPhase, SessionAttempt
from rolltap.trainer.rollouts.outcomes import is_judged, outcome
from rolltap.trainer.rollouts.preparation import SessionContext, prepared
from rolltap.trainer.rollouts.queue import Slots
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.runs.suspicions.rules import CALL_COLUMNS, EVENT_COLUMNS, suspicions
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.facts import Facts
from rolltap.trainer.traces.reader import SessionRows

logger = logging.getLogger(__name__)

_NEVER_STARTS = (errno.ENOENT, errno.EACCES, errno.ENOEXEC)
"""Errors of a program that is missing, or is no program: another attempt would fail too."""
_SPAN_ATTRIBUTES = (
    "session_id",
    "task_id",
    "group_id",
    "harness",
    "status",
    "reward",
    "policy_version",
    "runtime",
)
_NOT_RUN = (126, 127)
"""Exit statuses of a shell that cannot run a command."""
_SHOWN = (
    "A box shows the program's installation and the files that its preset names by ./ alone: show"
    " other folders with --tools DIR (tools in a recipe)"
)


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

    async def enter_timed(phase: EnteredPhase) -> None:
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
        session.status = "infrastructure"
        session.error = f"the session could not be run: {error}"
        facts = Facts(permanent=isinstance(error, InputError))
    except (RecorderError, RunError) as error:  # `Recorder.end` raises it, after the row
        session.status = "infrastructure"
        session.error = str(error)
    except Exception as error:  # its task may be the cause, and others' sessions go on
        logger.warning("session %s failed", session.session_id, exc_info=True)
        session.status = "infrastructure"
        session.error = f"the session could not be run: {error!r}"
        facts = Facts(permanent=True)
    finally:
        if session.status != "unknown":
            attempt.row = session
            await _end(context.recorder, session, attempt.group.task, clock)
    return facts


async def _end(
    recorder: Recorder,
    session: Session,
    task: Task,
    clock: PhaseClock,
) -> None:
    clock.enter("")
    for phase, seconds in clock.seconds().items():
        setattr(session, f"{phase}_seconds", seconds)
    session.finished_at = utc_now()
    try:
        await run_to_end(end_session, recorder, session, task)
    finally:
        shown = {name: getattr(session, name) for name in _SPAN_ATTRIBUTES}
        await run_to_end(send_spans, clock, shown)


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


async def _play(
    context: SessionContext,
    session: Session,
    group: Group,
    enter: Enter,
) -> Facts:
    """Run the harness and the judge, and set the outcome in `session`."""
    recorder = context.recorder
    task = group.task
    session.task_digest = await context.digest(task)
    timeout = task.timeout or context.config.timeout
    log = recorder.path / "logs" / f"{session.session_id}.log"
    log.parent.mkdir(exist_ok=True)
    folder = context.work / secrets.token_hex(4)
    folders = AgentFolders(folder / "workspace", folder / "home")
    ahead: Ahead | None = None
    try:
        async with prepared(context, session, task, folders) as (job, box):
            await enter("running")
            await _begin(recorder, session, group)
            ahead = prepare_ahead(job)
            ended = await _run_harness(context, session, task, box, timeout, log)
            session.exit_status = ended.status
            await box.settle()
            await run_to_end(recorder.stop_calls, session.session_id)
            facts = await asyncio.to_thread(recorder.facts, session.session_id)
        if facts.unreadable is not None:
            session.error = facts.unreadable  # no session of the rollout can have a result
            return facts
        if facts.diverged is not None:
            session.status = "diverged"
            session.error = facts.diverged
            return facts
        judged = None
        if is_judged(facts):
            await enter("judging")
            judged = await _judge(session, replace(job, ahead=ahead))
        outcome(ended, timeout, facts, judged).set_in(session)
        made_no_call = bool(ended.status) and not facts.calls and not facts.refusals
        not_run = made_no_call and ended.status in _NOT_RUN
        if facts.fault is not None:
            if not_run:
                what = "a shell could not run a command, and the harness ended with status"
                session.error = f"{what} {ended.status}"
            last = last_line(log).replace(str(folders.workspace), "WORKSPACE")
            session.error = _with_output(context, session.error, log.name, last, made_no_call)
        return facts._replace(permanent=not_run)
    finally:
        try:
            if ahead is not None:
                await ahead.close()
        finally:
            await run_to_end(remove_folder, folder)


async def _begin(recorder: Recorder, session: Session, group: Group) -> None:
    session.started_at = utc_now()
    session.policy_version = session.policy_version or recorder.published_version()
    session.status = "cancelled"
    hosts = None
    if group.task.allow is not None:
        hosts = tuple(group.task.allow)
    given = SessionOptions(sampling=dict(group.sampling), rerun=group.fork, allow=hosts)
    await run_to_end(recorder.begin, session, group.key, given)


async def _run_harness(
    context: SessionContext,
    session: Session,
    task: Task,
    box: Box,
    timeout: float,
    log: Path,
) -> Ended:
    """Run the program in its box. Raises `OSError` and `InputError` when it cannot be started."""
    isolated = context.runtime.isolated
    recorded = context.recorder.proxy(session.session_id).environment(
        session.session_id,
        address=box.proxy,
        certificates=CERTIFICATES if isolated else None,
    )
    environment = {
        **clean_environment(Path(box.home), isolated=isolated),
        **context.harness_env,
        **task.env,
        **recorded,  # the recorder's variables win
    }
    command = context.harness.command_for(task.instruction)
    try:
        return await box.run(command, env=environment, timeout=timeout, log=log)
    except ConnectionError:
        raise  # of a remote box: the program ran there
    except OSError as error:
        what = f"the harness {command[0]} cannot be started: {error}"
        if isolated:
            what += f". {_SHOWN}"
        if error.errno in _NEVER_STARTS:
            raise InputError(what) from error
        raise OSError(what) from error


def _with_output(
    context: SessionContext,
    why: str | None,
    log: str,
    last: str,
    made_no_call: bool,
) -> str:
    """Return the error of a fault with the last line of the program's output."""
    error = f"{why}; its output is in {log}"
    if last and not made_no_call:
        error += f", and ends with: {last}"
    elif last:  # the program's own words say why
        if last.startswith("Node.js v"):  # the last line of a crash: Node may be too old
            for quirk in context.harness.quirks:
                if "Node" in quirk:
                    last += f" ({quirk})"
        error = f"{last}; {error}"
    if made_no_call and context.runtime.isolated:
        error += f". {_SHOWN}"
    return error


async def _judge(session: Session, job: JudgeJob) -> Judged:
    """Return the judgement, and set its parts and evidence in `session`.

    A judge that fails in a way that nobody thought of leaves the session unjudged: the cause may be
    what an agent made. `OSError`, `InputError` and `RecorderError` are raised: a fault of this
    machine, of the task or of the recorder is none of the agent's.
    """
    assert job.folders is not None
    try:
        # the agent may have closed its home to this user
        await in_folder_thread(open_to_owner, job.folders.home)
        judged = await judge(job)
    except (OSError, InputError, RecorderError):
        raise
    except Exception as error:
        logger.warning("the judge of session %s failed", session.session_id, exc_info=True)
        judged = Judged(unjudged=f"the judge failed: {error!r}")
    session.parts = judged.parts
    session.evidence = judged.evidence
    return judged


class LocalNode:
    """This process as a node: its recorder, and boxes on this machine.

    Args:
        slots: Of this node.
        context: Context of its sessions.
        evaluation: Makes the context of sessions that evaluate, when it is asked for first.
    """

    name = ""

    def __init__(
        self,
        slots: Slots,
        context: SessionContext,
        evaluation: Callable[[], Awaitable[SessionContext]],
    ) -> None:
        self.slots = slots
        self.idle = asyncio.Event()
        """Set while no session is here."""
        self.idle.set()
        self._context = context
        self._evaluation = evaluation
        self._number = 0
        """Number of the sessions that are here."""
        self._training: set[str] = set()
        """Sessions that run, and do not evaluate."""

    async def context_of(self, group: Group) -> SessionContext:
        """Return the context of the sessions of a group."""
        if group.evaluates:
            return await self._evaluation()
        return self._context

    async def run(self, attempt: SessionAttempt, enter: Enter) -> Facts:
        """Run a session: see `Node.run`."""
        self._number += 1
        self.idle.clear()
        try:
            context = await self.context_of(attempt.group)
            context.recorder.check()
            if not attempt.group.evaluates:
                self._training.add(attempt.session_id)
            return await run_session(context, attempt, enter)
        finally:
            self._training.discard(attempt.session_id)
            self._number -= 1
            if self._number == 0:
                self.idle.set()

    def first_version(self, session_id: str) -> str | None:
        """Return the version of a session's first call: see `Node.first_version`."""
        if session_id not in self._training:
            return None
        return self._context.recorder.rows.first_version(session_id)
