"""Record of a session for a rerun or a fork: what they need of the run, and what came of a rerun.

The recorder answers from the record (`addons/endpoint/rerun.py`). In a rerun it has the limits with
which the session was recorded, and a folder of its own, which is removed: nothing is sampled.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from rolltap.addons.errors import InputError, RunError
from rolltap.addons.options import RecordedFrom
from rolltap.addons.store.index import SessionIndex
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import Call, Session
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.runs.views.inspect import find_id, find_session_id
from rolltap.trainer.tasks.sources import load_tasks
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.reader import load_sessions, rebuild_calls

_SHORTEST_ID = 5
"""Least digits of a text that may be the beginning of a call's id, and no number."""


@dataclass(frozen=True, slots=True)
class Record:
    """A recorded session whose calls can answer requests.

    Attributes:
        calls: Its completed calls, in the order of their starts.
        session: Its row; None when it has none.
        engine: URL of the engine that sampled it.
        context_window: That engine's context window in tokens.
    """

    run: Path
    session_id: str
    calls: Sequence[Call]
    session: Session | None
    metadata: Mapping[str, Any]
    engine: str
    context_window: int

    @classmethod
    def of(cls, run: Path, session: str) -> Self:
        """Return the session with this id or unique prefix.

        Raises `InputError` for an unknown session, a fork, and one without a completed call;
        `RunError` for damaged rows, and a run that does not say what its engine served.
        """
        metadata = read_metadata(run)
        session_id = find_session_id(run, session)
        where = f"session {session_id} of {run}"
        with SessionIndex(run, "calls") as index:
            calls = rebuild_calls(run, session_id, index.batches(session_id))
            lost = [name for name, damage in index.scan.damage.items() if damage]
        damaged = [f"call {call.call_id}: {call.violation}" for call in calls if call.violation]
        damaged += lost
        if damaged:
            advice = "All its calls are needed: see `rolltap verify`"
            raise RunError(f"{where} cannot run again: {damaged[0]}. {advice}")
        with SessionIndex(run, "events") as index:
            for event in index.rows(session_id, ("kind", "detail")):
                if event["kind"] == "rerun":
                    own = f"{where} is a fork, and has only its own calls"
                    raise InputError(f"{own}: give {event['detail']}")
        completed = [call for call in calls if call.status == "completed"]
        if not completed:
            why = "no completed call, so that nothing can be given again"
            raise InputError(f"{where} has {why}")
        engine = completed[-1].engine or ""
        try:
            window = int(metadata["engines"][engine]["max_model_len"])
        except (KeyError, TypeError, ValueError, OverflowError):
            served = f"what the engine at {engine or '(none)'} served"
            raise RunError(f"{run} does not say {served}") from None
        return cls(
            run=run.absolute(),
            session_id=session_id,
            calls=completed,
            session=load_sessions(run).get(session_id),
            metadata=metadata,
            engine=engine,
            context_window=window,
        )

    def rerun(
        self,
        folder: Path,
        model: str | None,
        options: Mapping[str, Sequence[str]],
    ) -> Recorder:
        """Return a recorder that answers from the record, in a new folder.

        `model` is None for that of the run.
        """
        recorded: Mapping[str, str] = {}
        for recorder in self.metadata.get("recorders", []):
            urls = [url.rstrip("/") for url in recorder.get("engines", ())]
            if self.engine in urls:
                recorded = _options_of(recorder)
        return Recorder(
            folder,
            engine=self.engine,
            model=model or str(self.metadata.get("model")),
            options={**recorded, **self._option(), **options},
        )

    def result(self, recorder: Recorder, session_id: str) -> tuple[int, str | None]:
        """End a session of a rerun.

        Return how many recorded calls answered, and where it differs first, in words.

        A recorded call that nothing asked for is a difference too, a side question aside. Raises as
        `Recorder.stop_calls`.
        """
        recorder.stop_calls(session_id)
        given: set[str] = set()
        diverged = None
        columns = ("kind", "call_id", "detail")
        for kind, call_id, detail in recorder.rows.of("events", session_id, columns):
            if kind == "rerun":
                given.add(call_id)
            elif kind == "diverged" and diverged is None:
                diverged = detail
        for number, call in enumerate(self.calls, 1):
            if diverged is None and call.role != "auxiliary" and call.call_id not in given:
                diverged = f"diverged at call {number}: nothing asked for it"
        return len(given), diverged

    def fork(self, call: str) -> dict[str, str]:
        """Return the recorder's option of forks at a call: its number in `calls` from 1, its id or
        a unique prefix.

        Raises `InputError` for a call that is not among them.
        """
        where = f"session {self.session_id} of {self.run}"
        by_id = {each.call_id: each for each in self.calls}
        ids = list(by_id)
        if call.isdecimal() and len(call) < _SHORTEST_ID:
            if not 0 < int(call) <= len(ids):
                raise InputError(f"{where} has {len(ids)} completed calls, and no call {call}")
            call = ids[int(call) - 1]
        found = by_id[find_id(call, ids, "completed call", where)]
        return self._option(found.started_at)

    def task(self, tasks: Path, repositories: Path | None) -> Task:
        """Return the session's task from a source of tasks.

        Raises `InputError` when it is not there.
        """
        task_id = "" if self.session is None else self.session.task_id
        for task in load_tasks(tasks, repositories=repositories):
            if task.id == task_id:
                return task
        own = f"which is that of session {self.session_id}"
        raise InputError(f"{tasks} has no task {task_id!r}, {own}")

    def _option(self, until: datetime | None = None) -> dict[str, str]:
        source = RecordedFrom(self.run, self.session_id, until)
        return {"rolltap_rerun": json.dumps(source._asdict(), default=str)}


def _options_of(recorder: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of a recorder that a run tells: a foreign run sets no others."""
    options = {"rolltap_images": str(recorder.get("images", "hide"))}
    for name, value in recorder.get("limits", {}).items():
        if name.startswith("max_"):
            options[f"rolltap_{name}"] = str(value)
    return options
