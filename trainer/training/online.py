"""The source of an online training: it publishes the weights, runs the sessions, and reads their
traces.

A step that an earlier attempt trained has the same batch again. Another step of a resumed run takes
the sessions that it finds in the run folder, and runs only those that are missing or were faults.
"""

import json
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
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
from rolltap.trainer.names import SessionName, Version
from rolltap.trainer.nodes.worker import make_worker
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.rollouts.worker import Worker
from rolltap.trainer.runs.views.score import Teacher, score_run
from rolltap.trainer.service.node import ServiceWorker
from rolltap.trainer.tasks.sources import load_tasks
from rolltap.trainer.traces.build import TraceBatch
from rolltap.trainer.traces.reader import SessionRows, load_sessions
from rolltap.trainer.traces.sessions import TraceOptions, label_session, open_sessions, read_batch
from rolltap.trainer.training.ages import age_metrics, is_older, is_stale, other_weights, token_ages
from rolltap.trainer.training.arguments import check_arguments, require_rows, sampling
from rolltap.trainer.training.attempt import Attempt, claimed_attempt, online_fingerprint
from rolltap.trainer.training.evaluation import Evaluations
from rolltap.trainer.training.loop import Source
from rolltap.trainer.training.recipe import FINISHED, Recipe
from rolltap.trainer.training.rollouts import AsyncRollouts, CompleteGroup, StalenessBound
from rolltap.trainer.training.serving import Serving, published_folder
from rolltap.trainer.training.step.trainer import TraceGRPOTrainer
from rolltap.trainer.training.steps import (
    BATCHES,
    FinishedSessions,
    TrainedBatch,
    TrainedBatches,
    find_fork,
    fork_group,
    has_signal,
    step_group,
)


def typed_recipe(recipe: Recipe, engine: str) -> Recipe:
    """Return the recipe with the first engine's type of the weights, if it has none and the engine
    answers."""
    if recipe.dtype is not None:
        return recipe
    with suppress(EngineError):
        dtype = Engines(engine).admins[0].dtype()
        return recipe.model_copy(update={"dtype": dtype})
    return recipe


class OnlineTraces(Source):
    """Batches of the rollouts that a training makes.

    `engine` is the URL of a vLLM server, or several with commas. `steal` takes them from another
    training.
    """

    def __init__(
        self,
        recipe: Recipe,
        run: Path,
        *,
        engine: str,
        seed: int,
        console: Console,
        steal: bool = False,
    ) -> None:
        self.trainer: TraceGRPOTrainer
        self._recipe = recipe
        self._run = run
        self._engine = engine
        self._seed = seed
        self._console = console
        self._steal = steal
        self._rows = SessionRows(run)
        self._trace_options = recipe.trace_options()
        self._rules = self._trace_options.rewards
        self._evaluations = Evaluations(recipe, run, console.print)

    def check(self) -> dict[str, list[Any]]:
        """See `Source.check`. Nothing but builds of images is started. Raises `InputError` and
        `EngineError`."""
        recipe = self._recipe
        self._engines = Engines(self._engine, keep=recipe.max_staleness > 0)
        engines = self._engines.admins
        check_arguments(recipe, processes_started(), len(engines), nodes=nodes_started())
        urls = [engine.url for engine in engines]
        if recipe.teacher is not None:
            self._teacher = _teacher_of(recipe, urls)
        if recipe.tasks is None or recipe.harness is None:
            missing = "tasks" if recipe.tasks is None else "harness"
            what = f"the recipe has no key {missing!r}"
            raise InputError(f"{what}: add it for rollouts, or train on recorded runs")
        self._worker = self._make_worker(recipe.harness, ",".join(urls))
        # tasks that are refused were named when the recipe was read
        tasks = load_tasks(recipe.tasks, repositories=recipe.repositories, refused=[])
        tasks = self._worker.fit(tasks)
        self._engines.each(lambda engine: engine.require_endpoints())
        if recipe.grpo.get("temperature", 1) != 1:
            self._engines.each(lambda engine: engine.require_processed())
        if recipe.max_staleness and recipe.publish == "lora":
            self._engines.each(
                lambda engine: engine.require_adapters(recipe.max_staleness, recipe.adapters)
            )
        self._evaluations.check(self._worker, tasks)
        self._tasks = {task.id: task for task in run_blocking(self._worker.build(tasks))}
        require_rows(recipe, len(self._tasks), f"{recipe.tasks} has {len(self._tasks)} tasks")
        return {"task_id": list(self._tasks)}

    def _make_worker(self, harness: str, engine: str) -> Worker | ServiceWorker:
        recipe = self._recipe
        options = recipe.recorder | {"rolltap_sampling": json.dumps(sampling(recipe))}
        if recipe.replays_routing:
            options["rolltap_routing"] = "true"
        how: dict[str, Any] = {"harness": harness, "engine": engine, "out": self._run}
        if recipe.service:
            return ServiceWorker(recipe.service, options=options, **how)
        recipe = recipe.model_copy(update={"recorder": options})
        return make_worker(recipe, model=recipe.model, publishes=True, **how)

    def claim(self, stack: ExitStack) -> Attempt:
        """Claim run folder and engines, start the recorder, and read what the run folder has
        already."""
        recipe = self._recipe
        tasks = list(self._tasks.values())
        fingerprint = online_fingerprint(recipe, tasks, self._worker.harness, self._seed)
        attempt = stack.enter_context(claimed_attempt(self._run, fingerprint))
        folder = stack.enter_context(published_folder(recipe, self._run, attempt.run))
        place = f"on {socket.gethostname()}, process {os.getpid()}"
        about = f"the training {self._run.absolute()} {place}, since {utc_now():%F %T} UTC"
        stack.enter_context(self._engines.claimed(attempt.run, about, steal=self._steal))
        stack.enter_context(self._worker)
        self.open_run(attempt, Serving(recipe, self._engines, folder, self._run), stack)
        return attempt

    def open_run(self, attempt: Attempt, serving: Serving, stack: ExitStack) -> None:
        """Take what the claims gave, read what the run folder has already, and open the
        rollouts."""
        recipe = self._recipe
        self._attempt = attempt
        self._serving = serving
        self._sessions = open_sessions(self._run, self._trace_options, scored=False)
        self._recorded = load_sessions(self._run)
        self._finished = FinishedSessions(self._recorded.values())
        self._trained = TrainedBatches(self._run)
        size = recipe.groups_per_step
        begun = len(self._trained) * size
        bound = StalenessBound(
            recipe.max_staleness, size, recipe.steps, self._untaken(), begun=begun
        )
        share = 0.0
        if recipe.evaluation is not None:
            share = recipe.evaluation.share
        self._rollouts = AsyncRollouts(
            bound,
            partial(self._worker.runner, share=share),
            finished=self._ended_before,
        )
        stack.enter_context(self._rollouts)

    def begin(self, trainer: TraceGRPOTrainer) -> None:
        """Verify that the engines serve the weights that the trainer began with. Raises
        `EngineError`."""
        self.trainer = trainer
        self._serving.verify_base(trainer, str(self._attempt.version(0)), self._console)

    def check_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Source.check_step` and `Serving.check_step`."""
        self._serving.check_step(step, metrics, self._console)

    def before_batch(self) -> None:
        """Publish the weights that sample the next batch, unless the batch is on the disk, and
        start its groups.

        Sessions that are too old for it whatever they do are stopped before. Raises what
        `Serving.publish` raises.
        """
        recipe = self._recipe
        version = self._version()
        if recipe.max_staleness:
            self._end_evaluation(version)
        is_trained = self._trained.get(version.step) is not None
        if is_trained and not self._evaluations.missing(version):
            return
        if recipe.keeps_adapters:
            why = (
                f"its weights are older than {version} by more than max_staleness ="
                f" {recipe.max_staleness}"
            )
            self._rollouts.cancel_running(partial(is_older, options=self._options(version)), why)
        self._serving.publish(self.trainer, str(version))
        if not is_trained:
            self._rollouts.publish(version.step // recipe.iterations)
        self._evaluate(version)

    def finish(self, steps: int) -> None:
        """Publish the trained weights, of so many steps, and evaluate them. Raises
        `EngineError`."""
        version = self._attempt.version(steps)
        what = "evaluation"
        try:
            try:
                if self._recipe.max_staleness:
                    self._end_evaluation(version)
            finally:
                what = "publication to the engines"
                self._serving.publish(self.trainer, str(version), last=True)
                what = "evaluation"
            self._evaluate(version, last=True)
            with self._watched():
                self._rollouts.end_evaluation()
            self._evaluations.append(version, steps)
        except RolltapError as error:
            model = self._run / FINISHED
            done = f"the training is finished, and its model is in {model}"
            raise EngineError(f"{done}: only the last {what} failed: {error}") from error

    def __call__(self, rows: list[dict[str, Any]]) -> TraceBatch:
        """Return the batch of a step: its groups of sessions, and those that replace others.

        Tokens of other weights than the step's are left out, with a warning. Raises `EngineError`
        when nothing else is left, and when an engine was stolen; `RecorderError` when no session
        has a reward to train on; and `RunError` when the run lacks a session of a step that was
        trained.
        """
        version = self._version()
        trained = self._trained.get(version.step)
        if trained is not None:
            sessions = [self._revision(name, number) for name, number in trained.sessions]
            batch = self._load(sessions, version, trained.stale)
        else:
            groups, stale = self._take_groups(version)
            sessions = [session for group in groups for session in group.sessions]
            self._require_reward(sessions, version)
            self._serving.engines.require_owned()
            batch = self._load(sessions, version, stale)
            revisions = [(session.session_id, session.revision) for session in sessions]
            self._trained.add(TrainedBatch(step=version.step, sessions=revisions, stale=stale))
        if not self._recipe.max_staleness:
            self._rollouts.end_evaluation()
            self.trainer.log_metrics(self._evaluations.metrics(version))
        before = [each for each in sessions if self._is_of_earlier_start(each)]
        line = f"step {version.step + 1}/{self.trainer.args.max_steps}  {len(sessions)} sessions"
        if before:
            line += f" ({len(before)} recorded before)"
        self._console.print(line)
        return batch

    def _is_of_earlier_start(self, session: Session) -> bool:
        seat = SessionName.parse(session.session_id).seat
        return seat is None or seat.start != self._attempt.number

    def _version(self) -> Version:
        """Return the name of the trainer's weights."""
        return self._attempt.version(self.trainer.state.global_step)

    def _options(self, version: Version) -> TraceOptions:
        return replace(self._trace_options, weights=version)

    # Groups

    def _untaken(self) -> Iterator[tuple[int, Group]]:
        """Yield number and group of those that were neither trained nor dropped.

        The forks of trained groups are among them.
        """
        over = self._trained.groups()
        for number in count():
            group = self._group(number)
            if group.group_id not in over:
                yield number, group
            elif self._recipe.forks is not None:
                sessions = [self._revision(*session) for session in over[group.group_id]]
                if has_signal(sessions, self._rules):
                    continue
                forks = self._forks(group, sessions)
                if forks is not None and forks.group_id not in over:
                    yield number, forks

    def _group(self, number: int) -> Group:
        step, position = divmod(number, self._recipe.groups_per_step)
        task = self._tasks[self.trainer.rows_of(step)[position]["task_id"]]
        version = self._attempt.version(step * self._recipe.iterations)
        return step_group(version, position, task, self._recipe.sessions)

    def _ended_before(self, group: Group) -> Mapping[str, Session]:
        """Return the sessions of a group that need not be run."""
        return self._finished.of(group, self._version(), self._trace_options.max_staleness)

    def _take_groups(self, version: Version) -> tuple[list[CompleteGroup], list[str]]:
        """Return the groups of a step, by number, and the ids of the sessions of groups that were
        too old.

        A group without signal stays in the step, and is followed by its forks; without forks by
        another group, up to `replace_zero_variance`.
        """
        recipe = self._recipe
        groups: list[CompleteGroup] = []
        stale: list[str] = []
        wanted = recipe.groups_per_step
        dropped = 0
        replaced = 0
        with self._watched():
            while wanted:
                group = self._rollouts.take()
                self._sessions.refresh()
                if recipe.max_staleness and is_stale(
                    self._sessions, group.sessions, self._options(version)
                ):
                    stale += [session.session_id for session in group.sessions]
                    dropped += 1
                    self._rollouts.replace()
                    continue
                groups.append(group)
                wanted -= 1
                if has_signal(group.sessions, self._rules):
                    continue
                forks = self._forks(group.group, group.sessions)
                if forks is not None:
                    self._rollouts.submit(group.number, forks)
                    wanted += 1
                elif replaced < recipe.replace_zero_variance:
                    self._rollouts.replace()
                    replaced += 1
                    wanted += 1
        metrics = {}
        if recipe.max_staleness:
            metrics["seconds_idle"] = self._rollouts.idle_seconds()
            metrics["groups_dropped"] = float(dropped)
        if recipe.forks is not None:
            metrics["groups_forked"] = float(sum(group.is_fork for group in groups))
        self.trainer.log_metrics(metrics)
        return sorted(groups), stale

    def _forks(self, group: Group, sessions: Sequence[Session]) -> Group | None:
        """Return the forks of a group without signal; None if no session of it can be forked."""
        forks = self._recipe.forks
        if forks is None or group.fork is not None:
            return None
        source = find_fork(sessions, self._rules, forks, self._run, self._rows)
        if source is None:
            return None
        return fork_group(self._version(), group.task, forks.sessions, source)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Show the progress of the rollouts until the block ends."""
        with watched(self._serving.engines.silent, self._console) as advance:
            self._rollouts.show(advance)
            yield

    def _evaluate(self, version: Version, *, last: bool = False) -> None:
        """Start the evaluation of published weights, if one is due."""
        groups = self._evaluations.begin(version, last=last)
        if groups:
            self._rollouts.evaluate(groups)

    def _end_evaluation(self, version: Version) -> None:
        """Wait for the evaluation beside the steps, and append the metrics of the weights a step
        before `version`."""
        with self.phase("evaluation"):
            self._rollouts.end_evaluation()
        before = version.step - self._recipe.iterations
        if before >= 0:
            self._evaluations.append(self._attempt.version(before), version.step)

    # Batches

    def _revision(self, session_id: str, number: int) -> Session:
        """Return the row of a session with which a step was trained: later rewards do not change
        the step."""
        known = self._recorded.get(session_id)
        if known is not None and known.revision != number:
            revisions = {row.revision: row for row in session_rows(self._run, session_id)}
            known = revisions.get(number)
        if known is None:
            raise RunError(
                f"{self._run} has no session {session_id} of revision {number}, but {BATCHES} says"
                " that a step was trained on it: the step cannot be taken again; train into a new"
                " folder"
            )
        return known

    def _require_reward(self, sessions: Sequence[Session], version: Version) -> None:
        """Raise `RecorderError` when no session of a step has a reward."""
        why = Counter[str]()
        for session in sessions:
            label = label_session(session, self._rules)
            if label.reason is None:
                return
            why[session.error or label.reason] += 1
        ((first, number),) = why.most_common(1)
        raise RecorderError(
            f"none of the {len(sessions)} sessions of step {version.step + 1} has a reward to train"
            f" on; the most frequent reason ({number}): {first}; put it right and start the"
            " training again, which goes on from here"
        )

    def _load(
        self, sessions: Sequence[Session], version: Version, stale: Sequence[str]
    ) -> TraceBatch:
        """Return the batch of sessions, in their order. Its ledger has the tokens of the `stale`
        ones too."""
        recipe = self._recipe
        options = self._options(version)
        rows = {session.session_id: session for session in sessions}
        self._sessions.refresh()
        if recipe.teacher is not None:
            score_run(self._sessions, self._teacher, sessions=rows.keys())
            self._sessions.refresh()
        batch = read_batch(self._sessions, rows.keys(), options, rows)
        self._require_own_tokens(batch, rows, version)
        if stale:
            late = read_batch(self._sessions, stale, options)
            # nothing in them is trained (`is_stale`): their tokens have another reason
            for name, account in late.accounts.items():
                batch.accounts[name] = account.leave_out("stale")
            batch.ledger += late.ledger
        ages = token_ages(batch, version)
        if recipe.max_staleness:
            metrics = age_metrics(
                batch, ages, iterations=recipe.iterations, max_staleness=recipe.max_staleness
            )
            self.trainer.log_metrics(metrics)
        # the order on the disk is another one after an interruption, and sums of floats depend on
        # it
        order = {session_id: place for place, session_id in enumerate(rows)}
        return replace(
            batch,
            traces=sorted(batch.traces, key=lambda trace: order[trace.session_id]),
            rewards={name: batch.rewards[name] for name in order if name in batch.rewards},
            # the weights of the step sampled all that is trained, in whatever attempt
            on_policy=not any(ages),
        )

    def _require_own_tokens(
        self, batch: TraceBatch, rows: Mapping[str, Session], version: Version
    ) -> None:
        """Raise `EngineError` when no token is left that the step can train, and warn of those of
        other weights."""
        step = version.step + 1
        others = Counter[str]()
        if batch.ledger.left_out.get("stale"):
            others = other_weights(self._sessions, rows.keys(), self._options(version))
        if others:
            what = (
                f"{others.total():,} tokens of step {step} were sampled by other weights than"
                f" {version} ({', '.join(sorted(others))}): an engine was started again, or"
                " something else loads weights into it"
            )
            if not batch.traces:
                fix = (
                    "nothing else is left to train: start the training again, which goes on from"
                    " here"
                )
                raise EngineError(f"{what}; {fix}")
            self._console.print(f"warning: {what}; they are kept, and not trained")
        if batch.ledger.left_out.get("missing_routing") and not batch.traces:
            raise EngineError(
                f"no call of step {step} has the experts of its tokens: start the engines with "
                "`rolltap serve --routing`, and the training again"
            )


def _teacher_of(recipe: Recipe, own: Sequence[str]) -> Teacher:
    """Return the teacher that scores the sessions. Raises `InputError` for the training's engines,
    `own`."""
    urls = recipe.teacher_engine
    given = Engines(urls).admins if urls is not None else []
    if urls is None or any(engine.url in own for engine in given):
        what = f"teacher_engine is {urls}"
        raise InputError(f"{what}: give the URL of another engine than the training's")
    return Teacher(urls, str(recipe.model))
