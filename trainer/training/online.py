"""The source of an online training: it publishes the weights, runs the sessions, and reads their traces.

A step that an earlier attempt trained has the same batch again. Another step of a resumed run takes the sessions that
it finds in the run folder, and runs only those that are missing or were faults.
"""

import json
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console

from rolltap.addons.errors import EngineError, InputError, RecorderError, RolltapError, RunError
from rolltap.addons.store.records import Session, utc_now
from rolltap.addons.store.rewards import session_rows
from rolltap.trainer.concurrency import run_blocking
from rolltap.trainer.console import nodes_started, processes_started, watched
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.fleet.worker import make_worker
from rolltap.trainer.names import Version
from rolltap.trainer.rollouts.resume import Group, place_of
from rolltap.trainer.rollouts.schedule import Evaluation
from rolltap.trainer.rollouts.worker import Worker
from rolltap.trainer.runs.views.score import Teacher, score_run
from rolltap.trainer.service.remote import RemoteWorker
from rolltap.trainer.tasks.sources import load_tasks
from rolltap.trainer.traces.build import TraceBatch
from rolltap.trainer.traces.reader import SessionRows, load_sessions
from rolltap.trainer.traces.sessions import TraceOptions, label_session, open_sessions, read_batch
from rolltap.trainer.training.ages import age_metrics, is_older, is_stale, other_weights, token_ages
from rolltap.trainer.training.ahead import Ahead, Flow
from rolltap.trainer.training.arguments import check_arguments, require_rows, sampling
from rolltap.trainer.training.attempt import Attempt, begun_online, claimed_attempt
from rolltap.trainer.training.evaluation import Evaluations
from rolltap.trainer.training.loop import Source
from rolltap.trainer.training.recipe import FINISHED, Recipe
from rolltap.trainer.training.serving import Serving, published_folder
from rolltap.trainer.training.step.metrics import FORK
from rolltap.trainer.training.step.trainer import TraceGRPOTrainer
from rolltap.trainer.training.steps import (
    BATCHES,
    FinishedSessions,
    TrainedBatch,
    TrainedBatches,
    find_fork,
    further_tasks,
    has_signal,
    placed,
    step_group,
)


def typed_recipe(recipe: Recipe, engine: str) -> Recipe:
    """Return the recipe with the first engine's type of the weights, if it has none and the engine answers."""
    with suppress(EngineError):
        return recipe if recipe.dtype else recipe.model_copy(update={"dtype": Engines(engine).admins[0].dtype()})
    return recipe


class OnlineTraces(Source):
    """`engine` is the URL of a vLLM server, or several with commas. `steal` takes them from another training."""

    def __init__(
        self, recipe: Recipe, run: Path, *, engine: str, seed: int, console: Console, steal: bool = False
    ) -> None:
        self.trainer: TraceGRPOTrainer
        self._recipe, self._run, self._seed, self._console = recipe, run, seed, console
        self._engine, self._steal = engine, steal
        self._rows = SessionRows(run)
        self._trace_options = recipe.trace_options()
        self._beside = ExitStack()
        self._ahead: Ahead | None = None
        self._evaluations = Evaluations(recipe, run)

    def check(self) -> dict[str, list[Any]]:
        """See `Source.check`. Nothing but builds of images is started. Raises `InputError` and `EngineError`."""
        recipe = self._recipe
        self._engines = Engines(self._engine, keep=recipe.ahead > 0)
        check_arguments(recipe, processes_started(), len(self._engines.admins), nodes=nodes_started())
        if recipe.teacher is not None:
            urls, own = recipe.teacher_engine, {engine.url for engine in self._engines.admins}
            if urls is None or own & {engine.url for engine in Engines(urls).admins}:
                raise InputError(f"teacher_engine is {urls}: give the URL of another engine than the training's")
            self._teacher = Teacher(urls, str(recipe.model))
        if recipe.tasks is None or recipe.harness is None:
            missing = "tasks" if recipe.tasks is None else "harness"
            raise InputError(f"the recipe has no key {missing!r}: add it for rollouts, or train on recorded runs")
        recorder = recipe.recorder | {"rolltap_sampling": json.dumps(sampling(recipe))}
        recorder |= {"rolltap_routing": "true"} if recipe.replays_routing else {}
        engine = ",".join(engine.url for engine in self._engines.admins)
        shared: dict[str, Any] = {"harness": recipe.harness, "engine": engine, "out": self._run}
        self._worker = (
            RemoteWorker(recipe.service, options=recorder, **shared)
            if recipe.service
            else make_worker(
                recipe.model_copy(update={"recorder": recorder}), model=recipe.model, publishes=True, **shared
            )
        )
        # those that are refused were named when the recipe was read
        tasks = self._worker.fit(load_tasks(recipe.tasks, repositories=recipe.repositories, refused=[]))
        self._engines.each(lambda engine: engine.require_endpoints())
        if recipe.grpo.get("temperature", 1) != 1:
            self._engines.each(lambda engine: engine.require_processed())
        if recipe.ahead and recipe.publish == "lora":
            self._engines.each(lambda engine: engine.require_adapters(recipe.ahead, recipe.adapters))
        if isinstance(self._worker, Worker):
            self._evaluations.check(self._worker, tasks, self._console.print)
        self._tasks = {task.id: task for task in run_blocking(self._worker.build(tasks))}
        require_rows(recipe, len(self._tasks), f"{recipe.tasks} has {len(self._tasks)} tasks")
        return {"task_id": list(self._tasks)}

    def claim(self, stack: ExitStack) -> Attempt:
        """Claim run folder and engines, start the recorder, and read what the run folder has already."""
        begun = begun_online(self._recipe, list(self._tasks.values()), self._worker.harness, self._seed)
        attempt = stack.enter_context(claimed_attempt(self._run, begun))
        folder = stack.enter_context(published_folder(self._recipe, self._run, attempt.run))
        about = f"the training {self._run.absolute()} on {socket.gethostname()}, process {os.getpid()}, since "
        stack.enter_context(self._engines.claimed(attempt.run, f"{about}{utc_now():%F %T} UTC", steal=self._steal))
        stack.enter_context(self._worker)
        if self._recipe.evaluation is not None:
            stack.enter_context(self._evaluations.worker)
        stack.enter_context(self._beside)
        self.take(attempt, Serving(self._recipe, self._engines, folder, self._run))
        return attempt

    def take(self, attempt: Attempt, serving: Serving) -> None:
        """Take what the claims gave, and read what the run folder has already."""
        self._attempt, self._serving = attempt, serving
        self._sessions = open_sessions(self._run, self._trace_options, scored=False)
        self._recorded = load_sessions(self._run)
        self._finished = FinishedSessions(self._recorded.values(), ahead=self._recipe.ahead > 0)
        self._trained = TrainedBatches(self._run)

    def begin(self, trainer: TraceGRPOTrainer) -> None:
        """Verify that the engines serve the weights that the trainer began with. Raises `EngineError`."""
        self.trainer = trainer
        self._serving.verify_base(trainer, str(self._attempt.version(0)), self._console)

    def check_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Source.check_step` and `Serving.check_step`."""
        self._serving.check_step(step, metrics, self._console)

    def before_batch(self) -> None:
        """Publish the weights that sample the next batch, unless the batch is on the disk.

        With `ahead`, sessions that are too old for it whatever they do are stopped before, and others start after it.
        Raises what `Serving.publish` raises.
        """
        version = self._attempt.version(self.trainer.state.global_step)
        if self._recipe.ahead:
            self._end_evaluation(version)
        if self._trained.get(version.step) is not None:
            if self._recipe.ahead and self._evaluations.missing(version):  # a start ended before its evaluation did
                self._publish(version)
                self._roll_out([], version, self._evaluations.begin(version))
            return
        if self._ahead is not None and self._recipe.keeps_adapters:
            why = f"its weights are older than {version} by more than ahead = {self._recipe.ahead}"
            self._ahead.cancel_running(partial(is_older, options=self._options(version)), why)
        self._publish(version)
        if self._recipe.ahead:
            self._ahead = self._ahead or self._start_ahead(version.step // self._recipe.iterations)
            if (evaluation := self._evaluations.begin(version)) is not None:
                self._ahead.evaluate(evaluation)
            self._ahead.publish(version.step // self._recipe.iterations)

    def finish(self, steps: int) -> None:
        """Publish the trained weights, of so many steps, and evaluate them. Raises `EngineError`."""
        version, what = self._attempt.version(steps), "evaluation"
        try:
            try:
                if self._recipe.ahead:
                    self._end_evaluation(version)
            finally:
                self._beside.close()
                what = "publication to the engines"
                self._publish(version, last=True)
                what = "evaluation"
            if (evaluation := self._evaluations.begin(version, last=True)) is not None:
                self._roll_out([], version, evaluation)
            self._evaluations.append(version, steps, self._console.print)
        except RolltapError as error:
            raise EngineError(
                f"the training is finished, and its model is in {self._run / FINISHED}: only the last {what} failed: "
                f"{error}"
            ) from error

    def __call__(self, rows: list[dict[str, Any]]) -> TraceBatch:
        """Return the batch of a step: one group of sessions for each row (`task_id`), and those that replace others.

        Tokens of other weights than the step's are left out, with a warning. Raises `EngineError` when nothing else is
        left, and when an engine was stolen; `RecorderError` when no session has a reward to train on; and `RunError`
        when the run lacks a session of a step that was trained.
        """
        version = self._attempt.version(self.trainer.state.global_step)
        if (trained := self._trained.get(version.step)) is None:
            groups, stale = (self._groups_of(rows, version), []) if self._ahead is None else self._take(version)
            sessions = [session for group in groups for session in group]
            self._require_reward(sessions, version)
            self._serving.engines.require_owned()
            batch = self._load(sessions, version, stale)
            revisions = [(session.session_id, session.revision) for session in sessions]
            self._trained.add(TrainedBatch(step=version.step, sessions=revisions, stale=stale))
        else:
            sessions = [self._revision(name, number) for name, number in trained.sessions]
            batch = self._load(sessions, version, trained.stale)
        if not self._recipe.ahead and (metrics := self._evaluations.metrics(version, self._console.print)):
            self.trainer.log_metrics(metrics)
        own = f".{self._attempt.number}"
        new = [session.session_id for session in sessions if place_of(session.session_id).endswith(own)]
        before = f" ({len(sessions) - len(new)} recorded before)" if len(new) < len(sessions) else ""
        self._console.print(f"step {version.step + 1}/{self.trainer.args.max_steps}  {len(sessions)} sessions{before}")
        return batch

    def _roll_out(self, groups: Sequence[Group], version: Version, evaluation: Evaluation | None) -> list[Session]:
        """Run the sessions of groups, and an evaluation beside them. Returns all tries of the first, as they ended."""
        with watched(self._engines.silent, self._console) as advance:
            running = self._worker.run(groups, policy_version=str(version), advance=advance, evaluation=evaluation)
            return run_blocking(running)

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

    def _start_ahead(self, step: int) -> Ahead:
        recipe, size = self._recipe, self._recipe.groups_per_step
        over = {group_id.rpartition("-")[2] for group_id in self._trained.groups()}  # of each the run, step and place
        places = (f"{self._attempt.run}.{n // size * recipe.iterations}.{n % size}" for n in count())
        numbers = (number for number, place in enumerate(places) if place not in over)
        flow = Flow(recipe.ahead, size, recipe.steps, numbers, begun=step * size)
        schedule = partial(self._worker.schedule, share=recipe.evaluation.share if recipe.evaluation else 0.0)
        show = self._beside.enter_context(watched(self._serving.engines.silent, self._console))
        ahead = Ahead(flow, schedule, group_of=self._group, finished=self._finished.of, show=show)
        return self._beside.enter_context(ahead)

    def _end_evaluation(self, version: Version) -> None:
        """Wait for the evaluation that runs ahead, and append the metrics of the weights a step before `version`."""
        if self._ahead is not None:
            with self.phase("evaluation"):
                self._ahead.end_evaluation()
        if (before := version.step - self._recipe.iterations) >= 0:
            self._evaluations.append(self._attempt.version(before), version.step, self._console.print)

    def _group(self, number: int) -> Group:
        step, position = divmod(number, self._recipe.groups_per_step)
        task = self._tasks[self.trainer.rows_of(step)[position]["task_id"]]
        return step_group(self._attempt.version(step * self._recipe.iterations), position, task, self._recipe.sessions)

    def _take(self, version: Version) -> tuple[list[list[Session]], list[str]]:
        """Return the groups of a step out of those that ran ahead, and the ids of the sessions of those too old.

        As many as `replace_zero_variance` without signal are replaced by others, and stay in the step.
        """
        assert self._ahead is not None
        groups, stale = list[list[Session]](), list[str]()
        replaced = 0
        dropped = 0
        while len(groups) - replaced < self._recipe.groups_per_step:
            group = self._ahead.take()
            self._sessions.refresh()
            if is_stale(self._sessions, group, self._options(version)):
                stale += [session.session_id for session in group]
                dropped += 1
                self._ahead.give_up()
                continue
            if replaced < self._recipe.replace_zero_variance and not has_signal(group, self._trace_options.rewards):
                replaced += 1
                self._ahead.give_up()
            groups.append(group)
        self.trainer.log_metrics({"seconds_idle": self._ahead.idle_seconds(), "groups_dropped": float(dropped)})
        return groups, stale

    def _groups_of(self, rows: list[dict[str, Any]], version: Version) -> list[list[Session]]:
        """Return the groups of a step that was not trained before."""
        tasks = [self._tasks[row["task_id"]] for row in rows]
        every, most = list(self._tasks.values()), self._recipe.replace_zero_variance
        further = further_tasks(every, tasks, most, seed=self._seed, step=version.step)
        groups, drawn, forked = list[list[Session]](), tasks, 0
        while drawn:
            begun = [
                step_group(version, place, task, self._recipe.sessions) for place, task in enumerate(drawn, len(groups))
            ]
            recorded = self._record(begun, version)
            forks = self._record(self._forks(begun, recorded, version), version)
            forked += len(forks)
            groups += [*recorded, *forks]
            lacking = len(tasks) - sum(has_signal(group, self._trace_options.rewards) for group in groups)
            drawn, further = further[:lacking], further[lacking:]
        if self._recipe.forks is not None:
            self.trainer.log_metrics({"groups_forked": float(forked)})
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

    def _forks(self, groups: Sequence[Group], recorded: list[list[Session]], version: Version) -> list[Group]:
        """Return the groups of forks for those of `groups` that have no signal. `recorded` are their sessions."""
        forks, rules, begun = self._recipe.forks, self._trace_options.rewards, list[Group]()
        if forks is None:
            return []
        for group, sessions in zip(groups, recorded, strict=True):
            if has_signal(sessions, rules):
                continue
            if (source := find_fork(sessions, rules, forks, self._run, self._rows)) is not None:
                place = int(group.group_id.rpartition(".")[2])
                begun.append(step_group(version, place, group.task, forks.sessions, FORK, source))
        return begun

    def _record(self, groups: Sequence[Group], version: Version) -> list[list[Session]]:
        """Return the sessions of groups, group by group."""
        sessions = {name: session for group in groups for name, session in self._finished.of(group).items()}
        missing = [[name for name in group.session_ids if name not in sessions] for group in groups]
        evaluation = self._evaluations.begin(version)
        if evaluation is not None or any(missing):
            begun = [replace(group, session_ids=names) for group, names in zip(groups, missing, strict=True)]
            ended = self._roll_out(begun, version, evaluation)
            for group in groups:
                sessions |= placed(group, ended)
        return [[sessions[name] for name in group.session_ids] for group in groups]

    def _publish(self, version: Version, *, last: bool = False) -> None:
        self._serving.publish(self.trainer, str(version), last=last)

    def _load(self, sessions: Sequence[Session], version: Version, stale: Sequence[str] = ()) -> TraceBatch:
        """Return the batch of sessions, in their order. Its ledger has the tokens of the `stale` ones too."""
        # the order on the disk is another one after an interruption, and sums of floats depend on it
        order = {session.session_id: place for place, session in enumerate(sessions)}
        rows = {session.session_id: session for session in sessions}
        options = self._options(version)
        self._sessions.refresh()
        if self._recipe.teacher is not None:
            score_run(self._sessions, self._teacher, sessions=order.keys())
            self._sessions.refresh()
        batch = read_batch(self._sessions, order.keys(), options, rows)
        others = Counter[str]()
        if batch.ledger.left_out.get("stale"):
            others = other_weights(self._sessions, order.keys(), options)
        if others:
            what = (
                f"{others.total():,} tokens of step {version.step + 1} were sampled by other weights than {version} "
                f"({', '.join(sorted(others))}): an engine was started again, or something else loads weights into it"
            )
            if not batch.traces:
                fix = "nothing else is left to train: start the training again, which goes on from here"
                raise EngineError(f"{what}; {fix}")
            self._console.print(f"warning: {what}; they are kept, and not trained")
        if batch.ledger.left_out.get("missing_routing") and not batch.traces:
            raise EngineError(
                f"no call of step {version.step + 1} has the experts of its tokens: start the engines with "
                "`rolltap serve --routing`, and the training again"
            )
        if stale:
            late = read_batch(self._sessions, stale, options)
            batch.accounts |= {name: account.leave_out("stale") for name, account in late.accounts.items()}
            batch.ledger += late.ledger
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
