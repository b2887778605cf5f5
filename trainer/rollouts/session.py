"""The way of one session, from a copy of the task's start to its row.

    begin           event `session_started`
    start           a copy of the task's start: the workspace
    box             of the runtime; the recorder is all that it reaches
    harness         until it ends, or is stopped
    settle          every process that it left is killed
    end calls       running calls are recorded, later ones are refused
    facts           faults, budgets and counts, from the rows
    judge           unless there was a fault, or no completed call
    outcome         status, reward, error
    end             the row

A session has a row in any case: `infrastructure` when a step before the judge fails, `cancelled` when it is stopped.
"""

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from rolltap.addons.errors import InputError, RecorderError, RunError
from rolltap.addons.store.records import Session, utc_now
from rolltap.addons.store.rewards import session_rows
from rolltap.addons.store.rows import printable
from rolltap.trainer.concurrency import in_folder_thread, run_to_end
from rolltap.trainer.rollouts.config import RolloutConfig
from rolltap.trainer.rollouts.facts import Facts
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.judges.changes import AgentResult
from rolltap.trainer.rollouts.judges.checkout import JudgeJob
from rolltap.trainer.rollouts.judges.command import judge_here, read_end
from rolltap.trainer.rollouts.judges.folders import open_to_owner
from rolltap.trainer.rollouts.judges.judge import judge
from rolltap.trainer.rollouts.judges.verdict import Judged
from rolltap.trainer.rollouts.outcomes import is_judged, outcome
from rolltap.trainer.rollouts.provenance import Provenances
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.rollouts.runtimes.environment import CERTIFICATES, clean_environment
from rolltap.trainer.rollouts.runtimes.runtime import Box, BoxSpec, Ended, Runtime, remove_folder
from rolltap.trainer.rollouts.workspace import Starts
from rolltap.trainer.runs.suspicions.rules import CALL_COLUMNS, EVENT_COLUMNS, suspicions
from rolltap.trainer.tasks.content import Start
from rolltap.trainer.tasks.task import Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stage:
    """Things that the sessions of a worker share. They may be used in one event loop after another.

    Attributes:
        work: Folder for what sessions need while they run.
        digests: Task id -> the task's digest, which takes reading its folders.
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

    @classmethod
    def of(cls, config: RolloutConfig, harness: Harness, runtime: Runtime, recorder: Recorder, work: Path) -> Self:
        """Return a stage whose starts and provenances are made in the folder `work`.

        Raises `EngineError` when the harness needs the engine's context window and the engine does not tell it.
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
        """Return the digest of a task, which is read once. Raises `InputError` for a path that cannot be read."""
        if task.id not in self.digests:
            self.digests[task.id] = await asyncio.to_thread(task.digest)
        return self.digests[task.id]


async def run_session(
    stage: Stage, group: Group, session_id: str, *, policy_version: str | None, tell: Callable[[str], None]
) -> tuple[Session, Facts]:
    """Run a session of a group and record it. Return its row, and its facts, which are empty when they are not known.

    `policy_version` is that of a session without a sampled token, as in `Recorder.end`. `tell` gets each phase of it.

    Raises `RecorderError` when the recorder has died, and `RunError` and `OSError` when the run folder cannot be read
    or written. The session has its row then, if it can be written.
    """
    recorder, harness, task = stage.recorder, stage.harness, group.task
    session = Session(
        session_id=session_id,
        task_id=task.id,
        group_id=group.group_id,
        harness=harness.name,
        status="cancelled",
        error="the rollout was stopped while it ran",
        policy_version=policy_version,
        preset_digest=harness.digest(),
        task_digest=stage.digests[task.id],
        runtime=stage.runtime.name,
    )
    facts = Facts()
    tell("preparing")
    try:
        (await stage.provenances.of(task.image)).set_in(session)
        await run_to_end(recorder.begin, session, group.key)
        facts = await _play(stage, session, task, tell)
    except (OSError, InputError) as error:
        session.status, session.error = "infrastructure", f"the session could not be run: {error}"
        facts = Facts(permanent=isinstance(error, InputError))
    except (RecorderError, RunError) as error:
        session.status, session.error = "infrastructure", str(error)  # `Recorder.end` raises it, after the row
    finally:
        session.finished_at = utc_now()
        await run_to_end(end_session, recorder, session, task)
    return session, facts


def end_session(recorder: Recorder, session: Session, task: Task | None) -> None:
    """Count the suspicions of a session, and end it. Raises as `Recorder.end`.

    What an agent did must not end the rollout: when a rule fails on it, the log says so.
    """
    try:
        calls = recorder.rows.of("calls", session.session_id, CALL_COLUMNS)
        events = recorder.rows.of("events", session.session_id, EVENT_COLUMNS)
        found = suspicions(calls, events, task, session.evidence)
        session.suspicions = found
    except Exception:
        logger.warning("the suspicions of session %s could not be counted", session.session_id, exc_info=True)
    finally:
        recorder.end(session)


def end_recorded(session: Session, recorder: Recorder, evaluate: str | None) -> Facts:
    """End a session of a program that the caller started, with the reward of the command `evaluate`, or None.

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
            judged = judge_here(evaluate, recorder.path / "logs" / f"{session.session_id}.evaluate.log")
            session.parts, session.evidence = judged.parts, judged.evidence
        result = outcome(Ended(session.exit_status), math.inf, facts, judged)
        session.status, session.reward, session.error = result.status, result.reward, result.error
    elif facts.budget is not None:
        session.status, session.error = "budget", facts.budget
    if facts.unreadable is None and (rows := session_rows(recorder.path, session.session_id)):
        own = rows[-1]
        session.revision = own.revision + 1
        session.status = "completed" if session.exit_status == 0 else "failed"
        session.reward, session.parts, session.evidence, session.error = own.reward, own.parts, own.evidence, None
        session.task_id, session.group_id = own.task_id or session.task_id, own.group_id or session.group_id
    recorder.end(session)
    return facts


async def _play(stage: Stage, session: Session, task: Task, tell: Callable[[str], None]) -> Facts:
    """Run the harness and the judge, and set the outcome in `session`."""
    recorder, runtime = stage.recorder, stage.runtime
    timeout = task.timeout or stage.config.timeout
    logs = recorder.path / "logs"
    logs.mkdir(exist_ok=True)
    folder = stage.work / secrets.token_hex(4)
    made = AgentResult(folder / "workspace", folder / "home")
    try:
        made.home.mkdir(parents=True)
        start = await stage.starts.of(task)
        await in_folder_thread(start.copy_to, made.workspace)
        proxy = recorder.proxy(session.session_id)
        spec = BoxSpec(
            name=f"rolltap-{folder.name}",
            workspace=made.workspace,
            workdir=task.workdir,
            home=made.home,
            mounts=proxy.mounts() if runtime.isolated else (),
            image=task.image,
            limits=task.limits,
            proxy=proxy.address,
        )
        async with runtime.box(spec) as box:
            env = _environment(stage, session.session_id, task, box)
            log = logs / f"{session.session_id}.log"
            tell("running")
            command = stage.harness.command_for(task.instruction)
            try:
                ended = await box.run(command, env=env, timeout=timeout, log=log)
            except OSError as error:
                raise OSError(f"the harness {command[0]} cannot be started: {error}") from error
            session.exit_status = ended.status
            tell("judging")
            await box.settle()
            await run_to_end(recorder.stop_calls, session.session_id)
            facts = await asyncio.to_thread(recorder.facts, session.session_id)
            if facts.unreadable is not None:
                session.error = facts.unreadable  # no session of the rollout can have a result
                return facts
            judged = await _judge(stage, session, task, start, made, box) if is_judged(facts) else None
        result = outcome(ended, timeout, facts, judged)
        session.status, session.reward, session.error = result.status, result.reward, result.error
        if result.ended is not None:  # for a reward that somebody gives later
            session.evidence = {**session.evidence, "ended": result.ended}
        if facts.fault is not None:
            session.error = f"{result.error}; its output is in {log}{_last_line(log)}"
        return facts
    finally:
        await run_to_end(remove_folder, folder)


def _last_line(log: Path) -> str:
    """Return the end of a program's output, for a message; empty without output."""
    last = read_end(log, 4096).strip().rpartition("\n")[2].strip() if log.exists() else ""
    return f", and ends with: {printable(last, 300)}" if last else ""


def _environment(stage: Stage, session_id: str, task: Task, box: Box) -> dict[str, str]:
    """Return the whole environment of the harness. The recorder's variables win."""
    isolated = stage.runtime.isolated
    certificates = CERTIFICATES if isolated else None
    recorded = stage.recorder.proxy(session_id).environment(session_id, address=box.proxy, certificates=certificates)
    return {**clean_environment(Path(box.home), isolated=isolated), **stage.harness_env, **task.env, **recorded}


async def _judge(stage: Stage, session: Session, task: Task, start: Start, made: AgentResult, box: Box) -> Judged:
    """Return the judgement, and set its parts and evidence in `session`.

    A judge that fails in a way that nobody thought of leaves the session unjudged: the cause may be what an agent made.
    `OSError` and `InputError` are raised: a fault of this machine or of the task is none of the agent's.
    """
    try:
        await in_folder_thread(open_to_owner, made.home)  # the agent may have closed it to this user
        job = JudgeJob(
            task=task,
            start=start,
            runtime=stage.runtime,
            result=made,
            name=session.session_id,
            logs=stage.recorder.path / "logs",
            engine_urls=stage.recorder.engine.split(","),
        )
        judged = await judge(job)
    except (OSError, InputError):
        raise
    except Exception as error:
        logger.warning("the judge of session %s failed", session.session_id, exc_info=True)
        judged = Judged(unjudged=f"the judge failed: {error!r}")
    session.parts, session.evidence = judged.parts, judged.evidence
    return judged
