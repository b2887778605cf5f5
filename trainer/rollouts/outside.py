"""Sessions of programs that the caller starts outside of a box, as `rolltap record` does."""

import math

from rolltap.addons.store.records import Session
from rolltap.addons.store.rewards import session_rows
from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.boxes.runtime import Ended
from rolltap.trainer.concurrency import run_blocking
from rolltap.trainer.judges.command import judge_here
from rolltap.trainer.locks import workplace
from rolltap.trainer.rollouts.harness import Harness, Provenances
from rolltap.trainer.rollouts.outcomes import is_judged, outcome
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.traces.facts import Facts


def set_provenance(session: Session, harness: Harness) -> None:
    """Set the provenance of the program in a session's row. Warns as `Provenances.of`."""
    with workplace() as work:
        found = run_blocking(Provenances(harness, ProcessRuntime(), work).of(None))
    found.set_in(session)


def end_recorded(session: Session, recorder: Recorder, evaluate: str | None) -> Facts:
    """End a session, with the reward of the command `evaluate`, or None.

    Returns its facts. A reward that the program gave at the session's end counts first.

    Raises as `Recorder.stop_calls` and `Recorder.end`.
    """
    recorder.stop_calls(session.session_id)
    facts = recorder.facts(session.session_id)
    if facts.unreadable is not None:
        session.status = "cancelled"
        session.error = facts.unreadable
        recorder.end(session)
        return facts
    if evaluate is not None:
        judged = None
        if is_judged(facts):
            log = recorder.path / "logs" / f"{session.session_id}.evaluate.log"
            judged = judge_here(evaluate, log)
            session.parts = judged.parts
            session.evidence = judged.evidence
        outcome(Ended(session.exit_status), math.inf, facts, judged).set_in(session)
    elif facts.budget is not None:
        session.status = "budget"
        session.error = facts.budget
    given = session_rows(recorder.path, session.session_id)
    if given:
        _take(given[-1], session)
    recorder.end(session)
    return facts


def _take(given: Session, session: Session) -> None:
    """Set what the program itself said of its session, in an earlier row."""
    session.revision = given.revision + 1
    session.status = "completed" if session.exit_status == 0 else "failed"
    session.reward = given.reward
    session.parts = given.parts
    session.evidence = given.evidence
    session.error = None
    session.task_id = given.task_id or session.task_id
    session.group_id = given.group_id or session.group_id
