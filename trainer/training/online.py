"""The steps of an online run on its main process: publishes the weights, runs the sessions, and reads their traces.

A step that an earlier attempt trained has the same batch again. Another step of a resumed run takes the sessions that
it finds in the run folder, and runs only those that are missing or were faults.

`batches.jsonl` in the run folder: the sessions of each step that was trained, one JSON object a line.

A session is `[id, revision]`. A step that is taken again takes these sessions with the rewards of these revisions, and
no attempt at one that was a fault.

The sessions of a step: their ids, those that are on the disk already, and the tasks of its further groups.
"""

import json
import os
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console

from rolltap.addons.errors import EngineError, RecorderError, RolltapError, RunError
from rolltap.addons.store.records import Session
from rolltap.addons.store.rewards import session_rows
from rolltap.trainer.names import Version
from rolltap.trainer.rollouts.resume import RERUN, Group, attempt_of, place_of
from rolltap.trainer.runs.views.check import check_sessions
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.build import TraceBatch
from rolltap.trainer.traces.reader import iter_sessions, load_sessions
from rolltap.trainer.traces.sessions import RewardRules, label_session, load_batch
from rolltap.trainer.training.attempt import Attempt
from rolltap.trainer.training.grpo.advantages import rewards_differ
from rolltap.trainer.training.grpo.trainer import TraceGRPOTrainer
from rolltap.trainer.training.recipe import FINISHED, Recipe
from rolltap.trainer.training.serving import Serving

BATCHES = "batches.jsonl"
"""Name of the file in the run folder."""


class TrainedBatches:
    """The file of a run. Only the training that claimed the folder writes it.

    The constructor removes a last line that was not written to its end. It raises `RunError` for another line that is
    not a batch, and `OSError`.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / BATCHES
        self._steps: dict[int, list[tuple[str, int]]] = {}
        text = self._path.read_bytes() if self._path.exists() else b""
        *lines, torn = text.split(b"\n")
        if torn:
            os.truncate(self._path, len(text) - len(torn))
        for number, line in enumerate(lines, 1):
            try:
                batch = json.loads(line)
                self._steps[int(batch["step"])] = [(str(name), int(number)) for name, number in batch["sessions"]]
            except (ValueError, TypeError, LookupError) as error:
                raise RunError(f"{self._path}, line {number} is damaged ({error}): train into a new folder") from error

    def get(self, step: int) -> list[tuple[str, int]] | None:
        """Return id and revision of a step's sessions in their order; None when its batch was not trained before."""
        return self._steps.get(step)

    def add(self, step: int, sessions: Sequence[tuple[str, int]]) -> None:
        """Write the batch of a step, id and revision of each. It is on the disk after the return. Raises `OSError`."""
        self._steps[step] = list(sessions)
        with self._path.open("ab") as file:
            file.write(json.dumps({"step": step, "sessions": self._steps[step]}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


_PLACE = re.compile(r"(.+-([0-9a-f]{8}\.[0-9]+)\.[0-9]+)-([0-9]+)\.([0-9]+)")
"""A session's place: the group that it was run in, with the run and the step of its weights; its index in the group;
and the training's attempt. The group of its row may be another one since somebody changed it."""


def step_group(version: Version, position: int, task: Task, sessions: int) -> Group:
    """Return a group of a step, with the ids that its sessions get in the version's attempt.

    The group's id is `<task>-<run>.<step>.<position>`, the same in all attempts; `position` is its place in the step.
    A session's id is `<group>-<index>.<attempt>`; one that is tried again in the same attempt has `~<number>` after it.
    """
    group_id = f"{task.id}-{version.run}.{version.step}.{position}"
    return Group(task, group_id, [f"{group_id}-{index}.{version.attempt}" for index in range(sessions)])


class FinishedSessions:
    """Sessions with a row in the run folder that need not be tried again, by group and index. The weights of their step
    sampled the first token of each."""

    def __init__(self, sessions: Iterable[Session]) -> None:
        self._groups: defaultdict[str, dict[int, tuple[tuple[int, int], Session]]] = defaultdict(dict)
        for session in sessions:
            found = _PLACE.fullmatch(place_of(session.session_id))
            if found and session.status not in RERUN and _sampled_by(session, found[2]):
                index, attempt = int(found[3]), (int(found[4]), attempt_of(session.session_id))
                group = self._groups[found[1]]
                group[index] = min(group.get(index, (attempt, session)), (attempt, session), key=itemgetter(0))

    def of(self, group: Group) -> dict[str, Session]:
        """Return the sessions of a group: id in `group` -> session of the first attempt that need not be tried again.

        Those of `RERUN` and sessions of other weights are not among them: they are run again.
        """
        finished = self._groups[group.group_id]
        return {name: finished[index][1] for index, name in enumerate(group.session_ids) if index in finished}


def _sampled_by(session: Session, weights: str) -> bool:
    return (session.policy_version or "").rpartition(".")[0] == weights


def has_signal(sessions: Iterable[Session], rules: RewardRules) -> bool:
    """Return True when the rewards of a group's sessions, by the recipe's rules, differ (`rewards_differ`)."""
    labels = [label_session(session, rules) for session in sessions]
    return rewards_differ([label.reward for label in labels if label.reward is not None])


def further_tasks(tasks: Sequence[Task], used: Sequence[Task], number: int, *, seed: int, step: int) -> list[Task]:
    """Return the tasks of up to `number` further groups of a step, drawn by (`seed`, `step`).

    Tasks that the step has not `used` come first. When all have come, they are drawn again.
    """
    drawn: list[Task] = []
    rng = random.Random(f"{seed}/{step}/further")
    while len(drawn) < number:
        order = rng.sample(tasks, len(tasks))
        drawn += sorted(order, key=lambda task: task in used) if not drawn else order
    return drawn[:number]


RunSessions = Callable[[Sequence[Group], str], list[Session]]
"""Runs and records the sessions of groups, and returns all tries in the order in which they ended. The second argument
is their policy version."""


CHECKED_CALLS = 16
"""Calls of the first step that are scored again."""


@dataclass(slots=True)
class _Counts:
    """Numbers of a step for its line."""

    recorded_before: int = 0
    session_seconds: float = 0.0


class OnlineTraces:
    """Trace source of an online run, and what comes before each batch and after the last. On the main process only.

    `run` is the run folder. `run_sessions` records into it. Call `begin` before the first batch.
    """

    def __init__(
        self,
        recipe: Recipe,
        tasks: Sequence[Task],
        run: Path,
        attempt: Attempt,
        serving: Serving,
        run_sessions: RunSessions,
        console: Console,
    ) -> None:
        self.trainer: TraceGRPOTrainer
        self._recipe = recipe
        self._tasks = {task.id: task for task in tasks}
        self._run = run
        self._trace_options = recipe.trace_options()
        self._attempt = attempt
        self._serving = serving
        self._run_sessions = run_sessions
        self._console = console
        self._recorded = load_sessions(run)
        self._finished = FinishedSessions(self._recorded.values())
        self._trained = TrainedBatches(run)
        self._publish_seconds = 0.0
        self._to_check: list[str] = []
        self._checked = False

    def begin(self, trainer: TraceGRPOTrainer) -> None:
        """Take the trainer, which still has the weights that it began with, and verify that the engines serve them.

        Raises `EngineError`.
        """
        self.trainer = trainer
        self._serving.verify_base(trainer, str(self._attempt.version(0)), self._console)

    def before_batch(self) -> None:
        """Publish the weights that sample the next batch, unless the batch is on the disk.

        Raises what `Serving.publish` raises.
        """
        version = self._attempt.version(self.trainer.state.global_step)
        self._publish_seconds = 0.0
        if self._trained.get(version.step) is None:
            self._publish(version, self._serving.publish)

    def finish(self, steps: int) -> None:
        """Publish the trained weights, of so many steps. The model is saved as `FINISHED`. Raises `EngineError`."""
        try:
            self._publish(self._attempt.version(steps), self._serving.publish_last)
        except RolltapError as error:
            raise EngineError(
                f"the training is finished, and its model is in {self._run / FINISHED}: only the last publication to "
                f"the engines failed: {error}"
            ) from error

    def __call__(self, rows: list[dict[str, Any]]) -> TraceBatch:
        """Return the batch of a step: one group of sessions for each row (`task_id`), and those that replace groups
        without signal.

        Calls with a token of other weights than the step's are left out, with a warning. Raises `EngineError` when
        nothing else is left, and when an engine was stolen; `RecorderError` when no session has a reward to train on,
        whatever the reason; and `RunError` when the run lacks a session of a step that was trained.
        """
        version = self._attempt.version(self.trainer.state.global_step)
        counts = _Counts()
        trained = self._trained.get(version.step)
        sessions = self._sessions_of(rows, version, counts) if trained is None else self._again(trained, counts)
        if trained is None:
            self._serving.engines.require_owned()
        batch = self._load(sessions, version)
        if trained is None:
            self._trained.add(version.step, [(session.session_id, session.revision) for session in sessions])
        self._print(len(sessions), version, counts)
        return batch

    def _again(self, trained: Sequence[tuple[str, int]], counts: _Counts) -> list[Session]:
        counts.recorded_before += len(trained)
        return [self._revision(name, number) for name, number in trained]

    def _revision(self, session_id: str, number: int) -> Session:
        """Return the row of a session with which a step was trained: later rewards do not change the step."""
        known = self._recorded.get(session_id)
        if known is not None and known.revision != number:
            rows = {session.revision: session for session in session_rows(self._run, session_id)}
            known = rows.get(number)
        if known is None:
            raise RunError(
                f"{self._run} has no session {session_id} of revision {number}, but {BATCHES} says that a step was "
                "trained on it: the step cannot be taken again; train into a new folder"
            )
        return known

    def _sessions_of(self, rows: list[dict[str, Any]], version: Version, counts: _Counts) -> list[Session]:
        """Return the sessions of a step that was not trained before."""
        tasks = [self._tasks[row["task_id"]] for row in rows]
        groups = self._record(tasks, 0, version, counts)
        further = further_tasks(
            list(self._tasks.values()),
            tasks,
            self._recipe.replace_zero_variance,
            seed=self.trainer.args.seed,
            step=version.step,
        )
        while further and (
            lacking := len(tasks) - sum(has_signal(group, self._trace_options.rewards) for group in groups)
        ):
            drawn, further = further[:lacking], further[lacking:]
            groups += self._record(drawn, len(groups), version, counts)
        sessions = [session for group in groups for session in group]
        labels = [label_session(session, self._trace_options.rewards) for session in sessions]
        if all(label.reward is None for label in labels):
            why = Counter(session.error or label.reason for session, label in zip(sessions, labels, strict=True))
            ((first, number),) = why.most_common(1)
            raise RecorderError(
                f"none of the {len(sessions)} sessions of step {version.step + 1} has a reward to train on; the most "
                f"frequent reason ({number}): {first}; put it right and start the training again, which goes on from "
                "here"
            )
        return sessions

    def _record(self, tasks: Sequence[Task], position: int, version: Version, counts: _Counts) -> list[list[Session]]:
        """Return the sessions of one group for each task. `position` is the place of the first group in the step."""
        size = self._recipe.sessions
        groups = [step_group(version, place, task, size) for place, task in enumerate(tasks, position)]
        sessions = {name: session for group in groups for name, session in self._finished.of(group).items()}
        counts.recorded_before += len(sessions)
        missing = [
            replace(group, session_ids=[name for name in group.session_ids if name not in sessions]) for group in groups
        ]
        if any(group.session_ids for group in missing):
            started = time.monotonic()
            ended = self._run_sessions(missing, str(version))
            sessions |= {place_of(session.session_id): session for session in ended}  # of several tries the last
            counts.session_seconds += time.monotonic() - started
            if not self._checked:
                self._to_check += [session.session_id for session in ended]
        return [[sessions[name] for name in group.session_ids] for group in groups]

    def _publish(self, version: Version, publish: Callable[[TraceGRPOTrainer, str], None]) -> None:
        if self._to_check:
            self._check()  # while the engines serve the weights that sampled the sessions
        started = time.monotonic()
        publish(self.trainer, str(version))
        self._publish_seconds = time.monotonic() - started

    def _check(self) -> None:
        """Score calls of the first step that the attempt records again, and print how far they differ."""
        urls = ",".join(engine.url for engine in self._serving.engines.admins)
        names, self._to_check, self._checked = self._to_check, [], True
        try:
            report = check_sessions(self._run, urls, names, sample=CHECKED_CALLS)
        except EngineError as error:
            return self._say(f"warning: no call of the first step was checked: {error}")
        if isinstance(report, str):
            return self._say(f"warning: no call of the first step could be checked: {report}")
        tokens = sum(row.tokens for row in report.rows)
        mean = sum(row.mean_difference * row.tokens for row in report.rows) / tokens
        calls = sum(row.calls for row in report.rows)
        self._say(f"checked {calls} calls of the first step: scored again, a token differs by {mean:.1e} nats")
        worst = max(report.rows, key=lambda row: row.mean_difference)
        if not worst.within:
            self._say(
                f"warning: tokens after a {worst.kind} prompt differ by {worst.mean_difference:.1e} nats on average, "
                f"and more than {report.threshold:g} is no rounding: the engine does not see what was recorded; see "
                f"`rolltap check {self._run}`"
            )

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _load(self, sessions: Sequence[Session], version: Version) -> TraceBatch:
        """Return the batch of sessions, in their order.

        The order on the disk is another one after an interruption, and sums of floats depend on it.
        """
        order = {session.session_id: place for place, session in enumerate(sessions)}
        rows = {session.session_id: session for session in sessions}
        batch = load_batch(self._run, order.keys(), replace(self._trace_options, weights=version), rows)
        if left_out := batch.ledger.left_out.get("other_weights", 0):
            self._tell_other_weights(order.keys(), version, left_out, nothing_left=not batch.traces)
        return replace(
            batch,
            traces=sorted(batch.traces, key=lambda trace: order[trace.session_id]),
            rewards={name: batch.rewards[name] for name in order if name in batch.rewards},
            on_policy=True,  # the weights of the step sampled all that is trained, in whatever attempt
        )

    def _tell_other_weights(
        self, session_ids: Collection[str], version: Version, left_out: int, *, nothing_left: bool
    ) -> None:
        """Warn of tokens that are left out because other weights sampled them, or raise `EngineError`."""
        others = {
            span.version
            for session in iter_sessions(self._run, session_ids)
            for call in session.calls
            for span in call.weight_versions
            if not version.same_weights(span.version)
        }
        what = (
            f"{left_out:,} tokens of step {version.step + 1} are in calls that other weights than {version} sampled "
            f"({', '.join(sorted(others))}): an engine was started again, or something else loads weights into it"
        )
        if nothing_left:
            raise EngineError(
                f"{what}; nothing else is left to train: start the training again, which goes on from here"
            )
        self._say(f"warning: {what}; they are kept, and not trained")

    def _print(self, sessions: int, version: Version, counts: _Counts) -> None:
        before = f" ({counts.recorded_before} recorded before)" if counts.recorded_before else ""
        self._say(
            f"step {version.step + 1}/{self.trainer.args.max_steps}  {sessions} sessions{before} in "
            f"{counts.session_seconds:.1f} s, weights published in {self._publish_seconds:.1f} s"
        )
