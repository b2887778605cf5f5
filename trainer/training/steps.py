"""The sessions of a step: their ids, and those that are on the disk already.

`batches.jsonl` in the run folder has the sessions of each step that was trained, one JSON object a
line. A session is `[id, revision]`: a step that is taken again takes these sessions with the
rewards of these revisions, and no attempt at one that was a fault. `stale` are the ids of sessions
that were too old when the step could have taken them. Sessions with a row that are in no line are
still to be trained.
"""

import os
from collections import defaultdict
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path

from pydantic import BaseModel, ValidationError

from rolltap.addons.errors import RunError
from rolltap.addons.options import RecordedFrom
from rolltap.addons.store.records import Session
from rolltap.trainer.names import Seat, SessionName, Version
from rolltap.trainer.rollouts.resume import STARTED_AGAIN, Group
from rolltap.trainer.runs.views.evaluation import SOLVED
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.toml import describe
from rolltap.trainer.traces.reader import SessionRows
from rolltap.trainer.traces.sessions import RewardRules, label_session
from rolltap.trainer.training.recipe import Forks
from rolltap.trainer.training.step.advantages import rewards_differ
from rolltap.trainer.training.step.metrics import FORK

BATCHES = "batches.jsonl"
"""Name of the file in the run folder."""


class TrainedBatch(BaseModel):
    """The sessions of a trained step: id and revision of each, and the ids of those too old."""

    step: int
    sessions: list[tuple[str, int]]
    stale: list[str] = []


class TrainedBatches:
    """The file of a run. Only the training that claimed the folder writes it.

    The constructor removes a last line that was not written to its end. It raises `RunError` for
    another line that is not a batch, and `OSError`.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / BATCHES
        self._steps: dict[int, TrainedBatch] = {}
        text = b""
        if self._path.exists():
            text = self._path.read_bytes()
        *lines, torn = text.split(b"\n")
        if torn:
            os.truncate(self._path, len(text) - len(torn))
        for number, line in enumerate(lines, 1):
            try:
                batch = TrainedBatch.model_validate_json(line)
            except ValidationError as error:
                where = f"{self._path}, line {number}"
                what = f"{where} is damaged ({describe(error)}): train into a new folder"
                raise RunError(what) from error
            self._steps[batch.step] = batch

    def __len__(self) -> int:
        return len(self._steps)

    def get(self, step: int) -> TrainedBatch | None:
        """Return the batch of a step; None when it was not trained before."""
        return self._steps.get(step)

    def groups(self) -> dict[str, list[tuple[str, int]]]:
        """Return group -> sessions that were trained, with their revisions.

        A group that was too old has none. Groups have the ids that they were run with.
        """
        groups: dict[str, list[tuple[str, int]]] = {}
        for batch in self._steps.values():
            for session in batch.sessions:
                seat = SessionName.parse(session[0]).seat
                if seat is not None:
                    groups.setdefault(seat.group_id, []).append(session)
            for name in batch.stale:
                seat = SessionName.parse(name).seat
                if seat is not None:
                    groups[seat.group_id] = []
        return groups

    def add(self, batch: TrainedBatch) -> None:
        """Write the batch of a step. It is on the disk after the return. Raises `OSError`."""
        self._steps[batch.step] = batch
        with self._path.open("ab") as file:
            file.write(batch.model_dump_json(exclude_defaults=True).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def step_group(
    version: Version,
    position: int,
    task: Task,
    sessions: int,
    kind: str = "",
) -> Group:
    """Return a group of a step, with the ids that its sessions get in the version's attempt.

    The group's id is `<task>-<run>.<step>.<position>`, the same in all attempts, after a `kind` of
    groups and `~`. A session's id is `<group>-<index>.<attempt>`; one that is tried again in the
    same attempt has `~<number>` after it.
    """
    group_id = f"{task.id}-{version.run}.{version.step}.{position}"
    if kind:
        group_id = f"{kind}~{group_id}"
    return Group(task, group_id, _names(group_id, sessions, version))


def fork_group(
    version: Version,
    task: Task,
    sessions: int,
    source: RecordedFrom,
) -> Group:
    """Return the group of the forks of a session. Its id is `fork~<session>`."""
    group_id = f"{FORK}~{source.session}"
    return Group(task, group_id, _names(group_id, sessions, version), fork=source)


def _names(group_id: str, sessions: int, version: Version) -> list[str]:
    return [f"{group_id}-{index}.{version.attempt}" for index in range(sessions)]


def find_fork(
    group: Iterable[Session],
    rules: RewardRules,
    forks: Forks,
    run: Path,
    rows: SessionRows,
) -> RecordedFrom | None:
    """Return the session of a group to fork, and the start of its call; None when none can be
    forked, as `Forks` says.

    `rows` are those of the run. Raises `RunError` and `OSError`.
    """
    for session in group:
        reward = label_session(session, rules).reward
        if reward is None or (forks.source == "failed" and reward >= SOLVED):
            continue
        starts = []
        for at, role, status in rows.of(
            "calls", session.session_id, ("started_at", "role", "status")
        ):
            if role == "agent" and status == "completed":
                starts.append(at)
        if len(starts) > 1:
            starts.sort()
            start = starts[-1]
            if forks.at == "middle":
                start = starts[len(starts) // 2]
            return RecordedFrom(run.absolute(), session.session_id, start)
    return None


def placed(group: Group, sessions: Iterable[Session]) -> dict[str, Session]:
    """Return id in `group` -> the session of its place; of several tries it is the last one.

    A service may have sessions of other starts of the training.
    """
    by_index: dict[int, Session] = {}
    for session in sessions:
        seat = SessionName.parse(session.session_id).seat
        if seat is not None:
            by_index[seat.index] = session
    return {
        name: by_index[index] for index, name in enumerate(group.session_ids) if index in by_index
    }


class FinishedSessions:
    """Sessions with a final row in the run folder (not `STARTED_AGAIN`), by group and index."""

    def __init__(self, sessions: Iterable[Session]) -> None:
        attempts: list[tuple[int, int, Seat, Session]] = []
        for session in sessions:
            name = SessionName.parse(session.session_id)
            seat = name.seat
            if seat is None or seat.start is None or session.status in STARTED_AGAIN:
                continue
            attempts.append((seat.start, name.attempt, seat, session))
        attempts.sort(key=itemgetter(0, 1))
        self._found: defaultdict[tuple[str, int], list[Session]] = defaultdict(list)
        for _, _, seat, session in attempts:
            self._found[seat.group_id, seat.index].append(session)

    def of(self, group: Group, weights: Version, staleness: int = 0) -> dict[str, Session]:
        """Return id in `group` -> session of the first attempt that need not be tried again.

        The weights of its first token are at most `staleness` optimizer steps older than `weights`.
        """
        finished: dict[str, Session] = {}
        for index, name in enumerate(group.session_ids):
            for session in self._found[group.group_id, index]:
                age = weights.age(session.policy_version or "")
                if age is not None and 0 <= age <= staleness:
                    finished.setdefault(name, session)
        return finished


def has_signal(sessions: Iterable[Session], rules: RewardRules) -> bool:
    """Return True when the rewards of a group's sessions, by the recipe's rules, differ
    (`rewards_differ`)."""
    rewards = [label_session(session, rules).reward for session in sessions]
    return rewards_differ([reward for reward in rewards if reward is not None])
