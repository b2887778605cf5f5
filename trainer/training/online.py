"""The main process's part of an online training: it publishes the weights, runs the sessions, and reads their traces.

Before each batch TRL's trainer calls `OnlineTraces.before_batch`, which publishes the current weights, and then
`OnlineTraces`, which runs the sessions and reads their calls from the run folder. Sessions are not run in a data
loader, because data loaders fetch ahead: the traces would be off policy.

A step that an earlier attempt trained has the same batch again. Another step of a resumed run takes the sessions that
it finds in the run folder, and runs only those that are missing or were faults.
"""

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from rolltap.addons.errors import EngineError, InputError, RecorderError, RolltapError, RunError
from rolltap.addons.store.records import Session, utc_now
from rolltap.addons.store.rewards import session_rows
from rolltap.trainer.concurrency import run_blocking
from rolltap.trainer.console import Advance, processes_started, watched
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.engine.publish_transfer import require_transfer
from rolltap.trainer.names import Version
from rolltap.trainer.rollouts.resume import Group, place_of
from rolltap.trainer.rollouts.schedule import Schedule
from rolltap.trainer.rollouts.worker import Worker
from rolltap.trainer.tasks.sources import load_tasks
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.build import TraceBatch
from rolltap.trainer.traces.reader import load_sessions
from rolltap.trainer.traces.sessions import TraceOptions, label_session, load_batch
from rolltap.trainer.training.ages import age_metrics, is_older, is_stale, other_weights, token_ages
from rolltap.trainer.training.ahead import Ahead, Flow
from rolltap.trainer.training.arguments import check_arguments, require_machine, sampling
from rolltap.trainer.training.attempt import Attempt, begun_online, claimed_attempt
from rolltap.trainer.training.evaluation import Evaluations
from rolltap.trainer.training.grpo.ranks import on_main
from rolltap.trainer.training.grpo.trainer import TraceGRPOTrainer
from rolltap.trainer.training.recipe import FINISHED, Recipe
from rolltap.trainer.training.serving import Serving, published_folder
from rolltap.trainer.training.steps import (
    BATCHES,
    FinishedSessions,
    TrainedBatches,
    further_tasks,
    has_signal,
    step_group,
)

RunSessions = Callable[[Sequence[Group], str, Sequence[Group]], list[Session]]
"""Runs and records the sessions of groups, and returns all tries in the order in which they ended. The second argument
is their policy version, the third groups of an evaluation, which are run beside them and not returned."""


@dataclass(slots=True)
class _Counts:
    """Numbers of a step for its line."""

    recorded_before: int = 0
    session_seconds: float = 0.0


def typed_recipe(recipe: Recipe, engine: str) -> Recipe:
    """Return the recipe with the first engine's type of the weights, if it has none and the engine answers."""
    with suppress(EngineError):
        return recipe if recipe.dtype else recipe.model_copy(update={"dtype": Engines(engine).admins[0].dtype()})
    return recipe


class OnlineTraces:
    """Trace source of an online training: the recorded sessions of each step.

    Every process has one; the main process alone rolls out, publishes and reads. It calls `start` before a trainer is
    made. As a context manager, which is collective, it claims run folder and engines and starts the recorder.

    `engine` is the URL of a vLLM server, or several separated by commas. `steal` takes them from another training.
    """

    def __init__(
        self, recipe: Recipe, run: Path, *, engine: str, seed: int, console: Console, steal: bool = False
    ) -> None:
        self.trainer: TraceGRPOTrainer
        self._recipe = recipe
        self._run = run
        self._engine = engine
        self._seed = seed
        self._console = console
        self._steal = steal
        self._trace_options = recipe.trace_options()
        self._cleanup, self._beside = ExitStack(), ExitStack()
        self._ahead: Ahead | None = None
        self._evaluations = Evaluations(recipe, run)
        self._publish_seconds = 0.0
        self._to_check: list[str] = []
        self._checked = False

    def check(self) -> list[Task]:
        """Check what the rollouts need, and return the tasks as they will be run. Nothing but builds is started.

        Raises `InputError` and `EngineError`.
        """
        recipe = self._recipe
        self._engines = Engines(self._engine, keep=recipe.ahead > 0)
        require_machine(recipe.machine, processes_started(), len(self._engines.admins))
        check_arguments(recipe)
        if recipe.tasks is None or recipe.harness is None:
            missing = "tasks" if recipe.tasks is None else "harness"
            raise InputError(
                f"the recipe has no key {missing!r}: rollouts need it; add it, or train from recorded runs"
            )
        recorder = recipe.recorder | {"rolltap_sampling": json.dumps(sampling(recipe))}
        recorder |= {"rolltap_routing": "true"} if recipe.replays_routing else {}
        self._worker = Worker(
            recipe.model_copy(update={"recorder": recorder}),
            harness=recipe.harness,
            engine=",".join(engine.url for engine in self._engines.admins),
            model=recipe.model,
            out=self._run,
        )
        # those that are refused were named when the recipe was read
        tasks = self._worker.fit(load_tasks(recipe.tasks, repositories=recipe.repositories, refused=[]))
        if recipe.publish == "nccl":
            require_transfer()
        self._engines.each(lambda engine: engine.require_endpoints())
        if recipe.ahead and recipe.publish == "lora":
            self._engines.each(lambda engine: engine.require_adapters(recipe.ahead, recipe.adapters))
        self._evaluations.check(self._worker, tasks, self._console.print)
        tasks = run_blocking(self._worker.build(tasks))
        self._tasks = {task.id: task for task in tasks}
        return tasks

    def __enter__(self) -> Self:
        on_main(self._claim)
        return self

    def _claim(self) -> None:
        begun = begun_online(self._recipe, list(self._tasks.values()), self._worker.harness, self._seed)
        with ExitStack() as stack:
            attempt = stack.enter_context(claimed_attempt(self._run, begun))
            folder = stack.enter_context(published_folder(self._recipe, self._run, attempt.run))
            about = f"the training {self._run.absolute()} on {socket.gethostname()}, process {os.getpid()}, since "
            stack.enter_context(self._engines.claimed(attempt.run, f"{about}{utc_now():%F %T} UTC", steal=self._steal))
            stack.enter_context(self._worker)
            if self._recipe.evaluation is not None:
                stack.enter_context(self._evaluations.worker)
            serving = Serving(self._recipe, self._engines, folder, self._run)
            stack.enter_context(self._beside)
            share = 0.0 if self._recipe.evaluation is None else self._recipe.evaluation.share
            open_schedule = partial(Schedule, self._worker.stage, share=share)
            self.take(self._tasks.values(), attempt, serving, self._roll_out, open_schedule)
            self._cleanup = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cleanup.__exit__(kind, value, traceback)

    def _roll_out(self, groups: Sequence[Group], version: str, evaluated: Sequence[Group]) -> list[Session]:
        beside = self._evaluations.beside(evaluated)
        with watched(self._engines.silent, self._console) as advance:
            return run_blocking(self._worker.run(groups, policy_version=version, advance=advance, evaluation=beside))

    def take(
        self,
        tasks: Iterable[Task],
        attempt: Attempt,
        serving: Serving,
        run_sessions: RunSessions,
        open_schedule: Callable[[Advance], Schedule],
    ) -> None:
        """Take what the claims gave, and read what the run folder has already. On the main process."""
        self._tasks = {task.id: task for task in tasks}
        self._attempt, self._serving = attempt, serving
        self._run_sessions, self._open_schedule = run_sessions, open_schedule
        self._recorded = load_sessions(self._run)
        self._finished = FinishedSessions(self._recorded.values(), ahead=self._recipe.ahead > 0)
        self._trained = TrainedBatches(self._run)

    def begin(self, trainer: TraceGRPOTrainer) -> None:
        """Take the trainer, which still has the weights that it began with, and verify that the engines serve them.

        Raises `EngineError`.
        """
        self.trainer = trainer
        self._serving.verify_base(trainer, str(self._attempt.version(0)), self._console)

    def before_batch(self) -> None:
        """Publish the weights that sample the next batch, unless the batch is on the disk.

        With `ahead`, sessions that are too old for it whatever they do are stopped before, and others start after it.
        Raises what `Serving.publish` raises.
        """
        version = self._attempt.version(self.trainer.state.global_step)
        self._publish_seconds = 0.0
        if self._recipe.ahead:
            self._end_evaluation(version)
        if self._trained.get(version.step) is not None:
            if self._recipe.ahead and self._evaluations.missing(version):  # a start ended before its evaluation did
                self._publish(version, self._serving.publish)
                self._run_sessions([], str(version), self._evaluations.groups(version))
            return
        if self._ahead is not None and self._recipe.keeps_adapters:
            why = f"its weights are older than {version} by more than ahead = {self._recipe.ahead}"
            self._ahead.cancel_running(partial(is_older, options=self._options(version)), why)
        self._publish(version, self._serving.publish)
        if self._recipe.ahead:
            self._ahead = self._ahead or self._start_ahead()
            if (evaluation := self._evaluations.beside(self._evaluations.groups(version))) is not None:
                self._ahead.evaluate(evaluation)
            self._ahead.publish(version.step // self._recipe.iterations)

    def finish(self, steps: int) -> None:
        """Publish the trained weights, of so many steps, and evaluate them. The model is saved as `FINISHED`.

        Raises `EngineError`.
        """
        version, what = self._attempt.version(steps), "evaluation"
        try:
            try:
                if self._recipe.ahead:
                    self._end_evaluation(version)
            finally:
                self._beside.close()
                what = "publication to the engines"
                self._publish(version, self._serving.publish_last)
                what = "evaluation"
            if groups := self._evaluations.groups(version, last=True):
                self._run_sessions([], str(version), groups)
            self._evaluations.append(version, steps, self._console.print)
        except RolltapError as error:
            raise EngineError(
                f"the training is finished, and its model is in {self._run / FINISHED}: only the last {what} failed: "
                f"{error}"
            ) from error

    def __call__(self, rows: list[dict[str, Any]]) -> TraceBatch:
        """Return the batch of a step: one group of sessions for each row (`task_id`), and those that replace groups
        without signal.

        Tokens of other weights than the step's are left out, with a warning. Raises `EngineError` when
        nothing else is left, and when an engine was stolen; `RecorderError` when no session has a reward to train on,
        whatever the reason; and `RunError` when the run lacks a session of a step that was trained.
        """
        version = self._attempt.version(self.trainer.state.global_step)
        counts = _Counts()
        trained = self._trained.get(version.step)
        if trained is None:
            stale: list[str] = []
            if self._ahead is None:
                groups = self._groups_of(rows, version, counts)
            else:
                groups = self._take(self._ahead, version, counts, stale)
            sessions = [session for group in groups for session in group]
            self._require_reward(sessions, version)
            self._serving.engines.require_owned()
            batch = self._load(sessions, version, stale)
            self._trained.add(version.step, [(session.session_id, session.revision) for session in sessions], stale)
        else:
            counts.recorded_before = len(trained)
            sessions = [self._revision(name, number) for name, number in trained]
            batch = self._load(sessions, version, self._trained.stale(version.step))
        if not self._recipe.ahead and (metrics := self._evaluations.metrics(version, self._console.print)):
            self.trainer.log_metrics(metrics)
        self._print(len(sessions), version, counts)
        return batch

    def _revision(self, session_id: str, number: int) -> Session:
        """Return the row of a session with which a step was trained: later rewards do not change the step."""
        known = self._recorded.get(session_id)
        if known is not None and known.revision != number:
            known = {session.revision: session for session in session_rows(self._run, session_id)}.get(number)
        if known is None:
            raise RunError(
                f"{self._run} has no session {session_id} of revision {number}, but {BATCHES} says that a step was "
                "trained on it: the step cannot be taken again; train into a new folder"
            )
        return known

    def _start_ahead(self) -> Ahead:
        recipe, size = self._recipe, self._recipe.groups_per_step
        over = {group_id.rpartition("-")[2] for group_id in self._trained.groups()}  # of each the run, step and place

        def is_over(number: int) -> bool:
            return f"{self._attempt.run}.{number // size * recipe.iterations}.{number % size}" in over

        flow = Flow(recipe.ahead, size, recipe.steps, is_over)
        show = self._beside.enter_context(watched(self._serving.engines.silent, self._console))
        ahead = Ahead(flow, self._open_schedule, group_of=self._group, finished=self._finished.of, show=show)
        return self._beside.enter_context(ahead)

    def _end_evaluation(self, version: Version) -> None:
        """Wait for the evaluation that runs ahead, and append the metrics of the weights a step before `version`."""
        if self._ahead is not None:
            self._ahead.end_evaluation()
        if (before := version.step - self._recipe.iterations) >= 0:
            self._evaluations.append(self._attempt.version(before), version.step, self._console.print)

    def _group(self, number: int) -> Group:
        """Return a group of the rollouts ahead."""
        step, position = divmod(number, self._recipe.groups_per_step)
        task = self._tasks[self.trainer.rows_of(step)[position]["task_id"]]
        return step_group(self._attempt.version(step * self._recipe.iterations), position, task, self._recipe.sessions)

    def _take(self, ahead: Ahead, version: Version, counts: _Counts, stale: list[str]) -> list[list[Session]]:
        """Return the groups of a step out of those that ran ahead. The sessions of those too old are added to `stale`.

        As many as `replace_zero_variance` without signal are replaced by others, and stay in the step.
        """
        groups: list[list[Session]] = []
        replaced = dropped = 0
        while len(groups) - replaced < self._recipe.groups_per_step:
            started = time.monotonic()
            group = ahead.take()
            counts.session_seconds += time.monotonic() - started
            if is_stale(self._run, group, self._options(version)):
                stale += [session.session_id for session in group]
                dropped += 1
                ahead.give_up()
                continue
            if replaced < self._recipe.replace_zero_variance and not has_signal(group, self._trace_options.rewards):
                replaced += 1
                ahead.give_up()
            groups.append(group)
        if not self._checked:
            names = [session.session_id for group in groups for session in group]
            self._to_check = [name for name in names if place_of(name).endswith(f".{self._attempt.number}")]
        seconds = {"seconds_waited": counts.session_seconds, "seconds_idle": ahead.idle_seconds()}
        self.trainer.log_metrics({**seconds, "groups_dropped": float(dropped)})
        return groups

    def _groups_of(self, rows: list[dict[str, Any]], version: Version, counts: _Counts) -> list[list[Session]]:
        """Return the groups of a step that was not trained before."""
        tasks = [self._tasks[row["task_id"]] for row in rows]
        groups = self._record(tasks, 0, version, counts)
        every, most = list(self._tasks.values()), self._recipe.replace_zero_variance
        further = further_tasks(every, tasks, most, seed=self._seed, step=version.step)
        while further and (
            lacking := len(tasks) - sum(has_signal(group, self._trace_options.rewards) for group in groups)
        ):
            drawn, further = further[:lacking], further[lacking:]
            groups += self._record(drawn, len(groups), version, counts)
        return groups

    def _require_reward(self, sessions: Sequence[Session], version: Version) -> None:
        """Raise `RecorderError` when no session of a step has a reward."""
        labels = [label_session(session, self._trace_options.rewards) for session in sessions]
        if all(label.reward is None for label in labels):
            why = Counter(session.error or label.reason for session, label in zip(sessions, labels, strict=True))
            ((first, number),) = why.most_common(1)
            raise RecorderError(
                f"none of the {len(sessions)} sessions of step {version.step + 1} has a reward to train on; the most "
                f"frequent reason ({number}): {first}; put it right and start the training again, which goes on from "
                "here"
            )

    def _record(self, tasks: Sequence[Task], position: int, version: Version, counts: _Counts) -> list[list[Session]]:
        """Return the sessions of one group for each task. `position` is the place of the first group in the step."""
        size = self._recipe.sessions
        groups = [step_group(version, place, task, size) for place, task in enumerate(tasks, position)]
        sessions = {name: session for group in groups for name, session in self._finished.of(group).items()}
        counts.recorded_before += len(sessions)
        missing = [
            replace(group, session_ids=[name for name in group.session_ids if name not in sessions]) for group in groups
        ]
        evaluated = self._evaluations.groups(version)
        if any(group.session_ids for group in [*missing, *evaluated]):
            started = time.monotonic()
            ended = self._run_sessions(missing, str(version), evaluated)
            sessions |= {place_of(session.session_id): session for session in ended}  # of several tries the last
            counts.session_seconds += time.monotonic() - started
            if not self._checked:
                self._to_check += [session.session_id for session in ended]
        return [[sessions[name] for name in group.session_ids] for group in groups]

    def _publish(self, version: Version, publish: Callable[[TraceGRPOTrainer, str], None]) -> None:
        if self._to_check:  # while the engines serve the weights that sampled the sessions
            self._serving.check_calls(self._to_check, self._console)
            self._to_check, self._checked = [], True
        started = time.monotonic()
        publish(self.trainer, str(version))
        self._publish_seconds = time.monotonic() - started

    def _load(self, sessions: Sequence[Session], version: Version, stale: Sequence[str] = ()) -> TraceBatch:
        """Return the batch of sessions, in their order. Its ledger has the tokens of the `stale` ones too.

        The order on the disk is another one after an interruption, and sums of floats depend on it.
        """
        order = {session.session_id: place for place, session in enumerate(sessions)}
        rows = {session.session_id: session for session in sessions}
        options = self._options(version)
        batch = load_batch(self._run, order.keys(), options, rows)
        if batch.ledger.left_out.get("stale") and (others := other_weights(self._run, order.keys(), options)):
            self._tell_other_weights(others, version, nothing_left=not batch.traces)
        if batch.ledger.left_out.get("missing_routing") and not batch.traces:
            raise EngineError(
                f"no call of step {version.step + 1} has the experts of its tokens: start the engines with "
                "`rolltap serve --routing`, and the training again"
            )
        if stale:
            batch.ledger += load_batch(self._run, stale, options).ledger
        ages = token_ages(batch, version)
        if ahead := self._recipe.ahead:
            self.trainer.log_metrics(age_metrics(batch, ages, iterations=self._recipe.iterations, ahead=ahead))
        return replace(
            batch,
            traces=sorted(batch.traces, key=lambda trace: order[trace.session_id]),
            rewards={name: batch.rewards[name] for name in order if name in batch.rewards},
            on_policy=not any(ages),  # the weights of the step sampled all that is trained, in whatever attempt
        )

    def _options(self, version: Version) -> TraceOptions:
        return replace(self._trace_options, weights=version)

    def _tell_other_weights(self, others: Counter[str], version: Version, *, nothing_left: bool) -> None:
        """Warn of tokens that are left out because other weights sampled them, or raise `EngineError`."""
        what = (
            f"{others.total():,} tokens of step {version.step + 1} were sampled by other weights than {version} "
            f"({', '.join(sorted(others))}): an engine was started again, or something else loads weights into it"
        )
        if nothing_left:
            raise EngineError(
                f"{what}; nothing else is left to train: start the training again, which goes on from here"
            )
        self._console.print(f"warning: {what}; they are kept, and not trained")

    def _print(self, sessions: int, version: Version, counts: _Counts) -> None:
        before = f" ({counts.recorded_before} recorded before)" if counts.recorded_before else ""
        took = f"{'in' if self._ahead is None else 'waited for'} {counts.session_seconds:.1f} s"
        self._console.print(
            f"step {version.step + 1}/{self.trainer.args.max_steps}  {sessions} sessions{before} {took}, weights "
            f"published in {self._publish_seconds:.1f} s"
        )
