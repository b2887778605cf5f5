"""The trace source of an online run, with rewards from a table in place of harness and engine."""

import asyncio
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from io import StringIO
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from rolltap.addons.errors import EngineError, RecorderError, RunError
from rolltap.addons.options import RecordedFrom
from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Session, VersionSpan
from rolltap.addons.store.rewards import GivenReward, give_reward
from rolltap.addons.store.segment import SegmentReader
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.weights import write_policy
from rolltap.trainer.runs.views.score import Teacher
from rolltap.trainer.runs.views.training import EVALUATION
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.traces.reader import iter_sessions
from rolltap.trainer.training import online
from rolltap.trainer.training.attempt import Attempt
from rolltap.trainer.training.online import OnlineTraces
from rolltap.trainer.training.recipe import Recipe
from rolltap.trainer.training.report import METRICS, read_metrics
from rolltap.trainer.training.steps import BATCHES, TrainedBatch, TrainedBatches
from tests.factories import START, make_call
from tests.trainer.engine.acting import serving
from tests.trainer.runs.views.test_score import Scoring, logprob

TASKS = [Task(id=name, instruction="go", evaluate=["true"]) for name in "abcde"]
FORKED: dict[str, Any] = {"forks": {"sessions": 3}, "silent": "a"}
"""Settings with which the sessions of task `a` are forked."""
FORKS = "fork~a-1a2b3c4d.0.0-0.0"
HELD_OUT = [Task(id=name, instruction="go", evaluate=["true"]) for name in "xy"]


def sampled(session_id, version, number=0):
    """Return a call with two tokens that these weights sampled."""
    spans = [VersionSpan(version=version, start=0, end=2)]
    return make_call(number, [1], [2, 3], session_id=session_id, weight_versions=spans)


class Loop:
    """An online run. `silent` are the tasks whose rewards are all equal, `at_first` those that are
    faults in the first attempt; `run`, `forked`, `evaluated` and `published` note what it did.
    `other` are weights that sample in place of the published ones: a session's end -> their
    version. Each session has so many `calls`."""

    def __init__(self, folder, silent="", at_first="", **settings):
        for run in (folder, folder / EVALUATION) if "evaluation" in settings else (folder,):
            run.mkdir(exist_ok=True)
            write_metadata(run, {})
        self.at_first = at_first
        self.folder, self._run, self.silent = folder, folder, silent
        self.recipe = Recipe(model="m", tasks="t", harness="h", steps=9, sessions=2, **settings)
        self.calls = 1
        self.run: list[str] = []
        self.forked: dict[str, RecordedFrom] = {}
        self.evaluated: list[str] = []
        self.logged: list[dict[str, float]] = []
        self.published: list[str] = []
        self.faults = ""
        self.other: dict[str, str] = {}
        self.stolen = False
        self.held: set[str] = set()
        self.waiting: dict[str, Any] = {}
        self.refusal: EngineError | None = None
        admins = [SimpleNamespace(url="http://a"), SimpleNamespace(url="http://b")]
        self.tasks: dict[int, str] = {}
        self.engines = SimpleNamespace(admins=admins, require_owned=self.require_owned, silent=list)
        self.console = Console(file=StringIO(), width=1000)

    def require_owned(self):
        if self.stolen:
            raise EngineError("another training owns the engine")

    def verify_base(self, trainer, version, console):
        self.published.append(f"base {version}")

    def publish(self, trainer, version, *, last=False):
        if self.refusal is not None:
            raise self.refusal
        self.published.append(version)
        write_policy(self.folder, None, version)

    def run_sessions(self, group, version, evaluates):
        if evaluates:
            sessions = self.record(self.folder / EVALUATION, group, version)
            self.evaluated += [session.session_id for session in sessions]
            return sessions
        sessions = self.record(self.folder, group, version)
        self.run += [session.session_id for session in sessions]
        if group.fork:
            self.forked[group.group_id] = group.fork
        return sessions

    def record(self, folder, group, version):
        sessions = [
            Session(
                session_id=session_id,
                group_id=group.group_id,
                task_id=group.task.id,
                status="completed",
                reward=(
                    0.5
                    if group.task.id in self.silent and not group.fork
                    else float(session_id.partition(".")[2].count("-0"))
                ),
                policy_version=next(
                    (self.other[end] for end in self.other if session_id.endswith(end)), version
                ),
            )
            for session_id in group.session_ids
        ]
        for session in sessions:
            if self.faults or (session.task_id in self.at_first and version.endswith(".0")):
                session.status, session.reward = self.faults or "infrastructure", None
                session.error = "the engine is down"
        with RunWriter(folder, "never") as writer:
            for session in reversed(sessions):
                for number in range(self.calls):
                    writer.add_call(sampled(session.session_id, session.policy_version, number))
                writer.add_session(session)
        return sessions

    @contextmanager
    def source(self, number, attempt=0):
        """Yield a source before a step."""
        source = OnlineTraces(
            self.recipe, self.folder, engine="http://a", seed=7, console=self.console
        )
        source._worker = SimpleNamespace(runner=self.open_runner)
        source._tasks = {task.id: task for task in TASKS}
        if self.recipe.evaluation is not None:
            source._evaluations.tasks = HELD_OUT
        source.trainer = SimpleNamespace(
            state=SimpleNamespace(global_step=number),
            args=SimpleNamespace(max_steps=9),
            model=None,
            rows_of=self.rows_of,
            log_metrics=lambda metrics: self.logged.append(metrics) if metrics else None,
        )
        with ExitStack() as stack:
            source.take(Attempt("1a2b3c4d", attempt), self, stack)
            yield source

    @property
    def metrics(self):
        return {name: value for line in self.logged for name, value in line.items()}

    def rows_of(self, step):
        """Return the rows of a step."""
        groups = self.recipe.groups_per_step
        if step in self.tasks:
            return [{"task_id": task} for task in self.tasks[step]]
        return [
            {"task_id": TASKS[number % 5].id}
            for number in range(step * groups, (step + 1) * groups)
        ]

    def open_runner(self, advance, *, share):
        return AtOnce(self, advance)

    def step(self, number, tasks, attempt=0):
        """Return the batch of a step, by a source of its own as after a restart."""
        iterations = self.recipe.iterations
        self.tasks[number // iterations] = tasks
        self.recipe = self.recipe.model_copy(update={"groups_per_step": len(tasks)})
        trained = TrainedBatches(self.folder)
        for earlier in range(len(trained), number // iterations):
            place = f"1a2b3c4d.{earlier * iterations}"
            names = [
                f"{row['task_id']}-{place}.{n}-0.0" for n, row in enumerate(self.rows_of(earlier))
            ]
            trained.add(TrainedBatch(step=earlier * iterations, sessions=[], stale=names))
        with self.source(number, attempt) as source:
            source.before_batch()
            return source([])


class AtOnce:
    """A runner that runs a group as soon as it gets it, by the weights that are published then.
    Those of the tasks in `loop.held` end when the test calls what is in `loop.waiting`; `forks` are
    all forks."""

    running = 0

    def __init__(self, loop, advance):
        self.loop = loop

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    async def submit(self, group):
        events = asyncio.get_running_loop()
        result = events.create_future()
        sessions = self.loop.run_sessions(group, self.loop.published[-1], group.evaluates)
        name = "forks" if group.fork else group.task.id
        if name in self.loop.held:
            end = partial(events.call_soon_threadsafe, result.set_result, sessions)
            self.loop.waiting[name] = end
        else:
            result.set_result(sessions)
        return result

    def cancel_running(self, too_old, why):
        self.loop.cancelled = [version for version in self.loop.published if too_old(version)]


@pytest.fixture
def loop(tmp_path):
    return Loop(tmp_path)


def test_a_step_runs_one_group_for_each_row_and_has_their_order(loop):
    batch = loop.step(3, "ba")
    ids = ["b-1a2b3c4d.3.0-0.0", "b-1a2b3c4d.3.0-1.0", "a-1a2b3c4d.3.1-0.0", "a-1a2b3c4d.3.1-1.0"]
    assert loop.run == list(batch.rewards) == [trace.session_id for trace in batch.traces] == ids
    assert batch.on_policy
    assert loop.published == ["1a2b3c4d.3.0"]
    assert "step 4/9  4 sessions\n" in loop.console.file.getvalue()


def test_a_step_that_is_on_the_disk_is_neither_run_nor_published_again(loop):
    first = loop.step(3, "ba")
    loop.run.clear()
    assert loop.step(3, "ba", attempt=1) == first
    assert (loop.run, loop.published) == ([], ["1a2b3c4d.3.0"])
    assert "4 sessions (4 recorded before)\n" in loop.console.file.getvalue()


def test_only_the_missing_sessions_of_a_step_are_run_by_newly_published_weights(loop):
    loop.step(3, "b")
    (loop.folder / BATCHES).unlink()  # as if it had been killed before the batch was trained
    batch = loop.step(3, "ba", attempt=1)
    assert loop.run[2:] == ["a-1a2b3c4d.3.1-0.1", "a-1a2b3c4d.3.1-1.1"]
    assert loop.published == ["1a2b3c4d.3.0", "1a2b3c4d.3.1"]
    assert list(batch.rewards) == loop.run


@pytest.mark.parametrize("status", ["infrastructure", "unjudged"])
def test_a_step_whose_sessions_all_lack_a_reward_ends_the_training_and_runs_again_at_the_next_start(
    loop, status
):
    loop.faults = status
    message = r"none of the 4 sessions of step 4 .*reason.* \(4\): the engine is down; put"
    with pytest.raises(RecorderError, match=message):
        loop.step(3, "ba")
    assert TrainedBatches(loop.folder).get(3) is None
    loop.faults = ""
    loop.run.clear()
    assert len(loop.step(3, "ba", attempt=1).rewards) == len(loop.run) == 4


def test_an_engine_that_refuses_the_last_weights_is_told_from_a_training_that_failed(loop):
    loop.refusal = EngineError("the engine at http://b is gone")
    message = r"is finished, and its model is in .*/model: only the last .*http://b is gone"
    with loop.source(9) as source, pytest.raises(EngineError, match=message):
        source.finish(9)


def test_the_engines_are_verified_before_anything_is_published_and_get_the_trained_weights_last(
    loop,
):
    with loop.source(0) as source:
        source.begin(source.trainer)
        source.before_batch()
        source.finish(9)
    assert loop.published == ["base 1a2b3c4d.0.0", "1a2b3c4d.0.0", "1a2b3c4d.9.0"]


class TestOtherWeights:
    @pytest.mark.parametrize("other", ["default", "deadbeef.3.0", "1a2b3c4d.2.0"])
    def test_their_calls_are_kept_and_left_out_with_a_warning_that_names_them(self, loop, other):
        loop.other = {"a-1a2b3c4d.3.1-0.0": other}
        batch = loop.step(3, "ba")
        assert [trace.session_id for trace in batch.traces] == [
            name for name in loop.run if name not in loop.other
        ]
        assert batch.ledger == Ledger(sampled=8, trained=6, left_out={"stale": 2})
        printed = loop.console.file.getvalue()
        assert (
            "warning: 2 tokens of step 4 were sampled by other weights than 1a2b3c4d.3.0"
            f" ({other}): " in printed
        )
        assert {call.session_id for s in iter_sessions(loop.folder) for call in s.calls} == {
            *loop.run
        }

    def test_a_step_with_nothing_else_is_not_trained_and_is_run_again_at_the_next_start(self, loop):
        loop.other = {".0": "default"}
        with pytest.raises(
            EngineError,
            match=r"4 tokens of step 4 .* \(default\): .*; nothing else is left to train: ",
        ):
            loop.step(3, "b")
        assert TrainedBatches(loop.folder).get(3) is None
        batch = loop.step(3, "b", attempt=1)
        assert list(batch.rewards) == loop.run[2:] == ["b-1a2b3c4d.3.0-0.1", "b-1a2b3c4d.3.0-1.1"]

    def test_a_step_during_which_an_engine_was_stolen_is_not_trained(self, loop):
        loop.stolen = True
        with pytest.raises(EngineError, match="another training owns the engine"):
            loop.step(3, "b")
        assert TrainedBatches(loop.folder).get(3) is None


def test_a_step_whose_calls_have_no_experts_to_replay_ends_the_training(tmp_path):
    with pytest.raises(
        EngineError, match=r"step 4 has the experts of its tokens: .*`rolltap serve --routing`"
    ):
        Loop(tmp_path, grpo={"routing": "recorded"}).step(3, "ba")


def test_the_sessions_of_a_step_are_scored_by_the_teacher_and_not_again_after_a_restart(
    tmp_path, tokenizer, tokenizer_folder
):
    loop = Loop(tmp_path / "run", silent="a", teacher="big")
    with serving(Scoring(tmp_path / "big", tokenizer)) as engine:
        teacher, batches = Teacher(engine.url, str(tokenizer_folder)), []
        for attempt in range(2):
            with loop.source(0, attempt) as source:
                source._teacher = teacher
                source.before_batch()
                batches.append(source([]))
        assert engine.scored == [[1, 2, 3]] * 2
    scores = [logprob([1], 2), logprob([1, 2], 3)]
    assert [trace.scores for batch in batches for trace in batch.traces] == [scores] * 4
    assert loop.run == ["a-1a2b3c4d.0.0-0.0", "a-1a2b3c4d.0.0-1.0"]


def test_a_step_reads_no_session_of_earlier_steps(
    tmp_path, tokenizer, tokenizer_folder, monkeypatch
):
    loop = Loop(tmp_path / "run", teacher="big")
    read, seen = SegmentReader.read, set[str]()

    def watched(reader, offset):
        batch = read(reader, offset)
        seen.update(batch.column("session_id").to_pylist())
        return batch

    monkeypatch.setattr(SegmentReader, "read", watched)
    with serving(Scoring(tmp_path / "big", tokenizer)) as engine, loop.source(0) as source:
        source._teacher = Teacher(engine.url, str(tokenizer_folder))
        for step in range(3):
            source.trainer.state.global_step = step
            loop.other = {"-1.0": "other"} if step == 2 else {}
            source.before_batch()
            seen.clear()
            batch = source([])
            assert seen == batch.accounts.keys()
    assert batch.ledger.left_out == {"stale": 2}, "and their weights were read"


class TestAhead:
    """Rollouts of one group a step, beside the steps: task `a` is of the first step, `b` of the
    second."""

    @pytest.fixture
    def make(self, tmp_path):
        with ExitStack() as stack:

            def make(number=0, attempt=0, **settings):
                settings = {"max_staleness": 1, "publish": "lora", "lora": {"r": 1}, **settings}
                self.loop = Loop(tmp_path, **settings)
                return stack.enter_context(self.loop.source(number, attempt))

            yield make

    def step(self, source, number):
        source.trainer.state.global_step = number
        source.before_batch()
        return source([])

    def test_a_step_trains_what_older_weights_sampled_and_says_how_old_they_are(self, make):
        source = make()
        first, second, third = (self.step(source, number) for number in range(3))
        assert [batch.on_policy for batch in (first, second, third)] == [True, False, False]
        found = [
            {
                (trace.task_id, span.version)
                for trace in batch.traces
                for span in trace.weight_versions
            }
            for batch in (first, second, third)
        ]
        assert found == [{("a", "1a2b3c4d.0.0")}, {("b", "1a2b3c4d.0.0")}, {("c", "1a2b3c4d.1.0")}]
        assert third.ledger == Ledger(sampled=4, trained=4)
        expected = {
            "age/mean": 1.0,
            "age/max": 1.0,
            "age/share/0": 0.0,
            "age/share/1": 1.0,
            "stale_share": 0.0,
        }
        assert self.loop.metrics.items() >= expected.items()
        assert {"seconds_idle", "groups_dropped"} <= self.loop.metrics.keys()
        assert self.loop.cancelled == ["1a2b3c4d.0.0"], (
            "of these no token could be trained in the third step"
        )

    def test_a_group_that_is_too_old_is_left_out_as_stale_and_its_place_is_filled(self, make):
        source = make()
        self.loop.held = {"b"}
        self.step(source, 0)
        assert {trace.task_id for trace in self.step(source, 1).traces} == {"c"}
        self.loop.waiting["b"]()
        batch = self.step(source, 2)
        assert {reward.task_id for reward in batch.rewards.values()} == {"d"}
        assert batch.ledger == Ledger(sampled=8, trained=4, left_out={"stale": 4})
        stale = ["b-1a2b3c4d.1.0-0.0", "b-1a2b3c4d.1.0-1.0"]
        assert (
            sum((account.ledger for account in batch.accounts.values()), Ledger()) == batch.ledger
        )
        assert {name for name, account in batch.accounts.items() if account.reason == "stale"} == {
            *stale
        }
        assert TrainedBatches(self.loop.folder).get(2).stale == stale
        assert [
            line["groups_dropped"] for line in self.loop.logged if "groups_dropped" in line
        ] == [0, 0, 1]
        assert "other weights" not in self.loop.console.file.getvalue()
        assert self.step(make(2, attempt=1), 2) == batch

    def test_after_a_restart_only_groups_that_were_not_taken_go_on_and_nothing_ended_is_run_again(
        self, make
    ):
        source = make()
        first = self.step(source, 0)
        run = self.loop.run
        again = make(0, attempt=1)
        assert self.step(again, 0) == first
        second = self.step(again, 1)
        assert list(second.rewards) == run[2:4], "by the weights of the first attempt"
        assert {name.partition("-")[0] for name in self.loop.run} == {"c"}
        assert {trace.task_id for trace in self.step(again, 2).traces} == {"c"}

    def test_groups_without_signal_are_replaced_by_those_that_run_ahead(self, make):
        source = make(replace_zero_variance=2, silent="ab")
        batch = self.step(source, 0)
        assert [reward.task_id for reward in batch.rewards.values()] == [
            "a",
            "a",
            "b",
            "b",
            "c",
            "c",
        ]
        assert {trace.task_id for trace in self.step(source, 1).traces} == {"d"}

    def test_what_the_age_of_the_rollouts_does_not_explain_is_told_or_ends_the_training(self, make):
        source = make()
        self.loop.other = {"a-1a2b3c4d.0.0-0.0": "deadbeef.3.0"}
        assert self.step(source, 0).ledger == Ledger(sampled=4, trained=2, left_out={"stale": 2})
        assert (
            "warning: 2 tokens of step 1 were sampled by other weights"
            in self.loop.console.file.getvalue()
        )
        self.loop.other = {".0": "default"}
        self.step(source, 1)
        with pytest.raises(EngineError, match=r"\(default\): .*; nothing else is left to train"):
            self.step(source, 2)

    def forks_of(self, batch):
        return [name for name in batch.rewards if name.startswith("fork~")]

    def test_a_step_trains_the_forks_that_have_ended_and_no_step_waits_for_others(self, make):
        source = make(**FORKED)
        self.loop.calls = 4
        self.loop.held = {"forks"}
        assert {label.task_id for label in self.step(source, 0).rewards.values()} == {"a", "b"}
        self.loop.waiting["forks"]()
        second, third = (self.step(source, number) for number in (1, 2))
        assert self.forks_of(second) == [*second.rewards]
        assert self.forks_of(second) == [f"{FORKS}-{index}.0" for index in range(3)]
        assert {label.task_id for label in third.rewards.values()} == {"c"}
        forked = [line["groups_forked"] for line in self.loop.logged if "groups_forked" in line]
        assert forked == [0, 1, 0]

    def test_forks_that_are_too_old_are_dropped_and_another_group_takes_their_place(self, make):
        source = make(**FORKED)
        self.loop.calls = 4
        self.loop.held = {"forks"}
        assert {label.task_id for label in self.step(source, 0).rewards.values()} == {"a", "b"}
        self.step(source, 1)
        self.loop.waiting["forks"]()
        batch = self.step(source, 2)
        assert {label.task_id for label in batch.rewards.values()} == {"d"}
        stale = [f"{FORKS}-{index}.0" for index in range(3)]
        assert TrainedBatches(self.loop.folder).get(2).stale == stale

    def test_forks_that_no_step_has_trained_go_on_after_a_restart(self, make):
        source = make(**FORKED)
        self.loop.calls = 4
        self.loop.held = {"forks"}
        first = self.step(source, 0)
        again = make(0, attempt=1, **FORKED)
        self.loop.calls = 4
        assert self.step(again, 0) == first
        second, third = (self.step(again, number) for number in (1, 2))
        assert self.forks_of(second) == [f"{FORKS}-{index}.0" for index in range(3)]
        assert {label.task_id for label in third.rewards.values()} == {"c"}
        last = make(3, attempt=2, **FORKED)
        assert {label.task_id for label in self.step(last, 3).rewards.values()} == {"d"}

    def test_two_groups_of_a_task_that_are_forked_in_one_step_have_forks_of_their_own(self, make):
        source = make(**FORKED | {"max_staleness": 2})
        self.loop.calls = 4
        self.loop.held = {"forks"}
        self.loop.tasks = {1: "a"}
        self.step(source, 0)
        assert [*self.loop.forked] == [FORKS, "fork~a-1a2b3c4d.1.0-0.0"]

    def lines(self):
        """Return the lines of metrics with an evaluation: the step, the weights' step, and the
        sessions."""
        lines = read_metrics(self.loop.folder / METRICS)
        return [(line["step"], line["eval/step"], line["eval/sessions"]) for line in lines]

    def test_an_evaluation_runs_beside_the_steps_and_ends_before_the_next_weights(self, make):
        source = make(evaluation={"tasks": "held", "every": 2, "sessions": 1})
        found = []
        for number in range(3):
            self.step(source, number)
            found.append(self.lines())
        assert found == [[], [(1, 0, 2)], [(1, 0, 2)]]
        assert {name.partition(".")[2][0] for name in self.loop.evaluated} == {"0", "2"}
        source.finish(3)
        assert self.lines() == [(1, 0, 2), (3, 2, 2), (3, 3, 2)]

    def test_an_evaluation_that_a_kill_cut_is_completed_by_the_same_weights(self, make):
        table = {"tasks": "held", "every": 1, "sessions": 1}
        source = make(evaluation=table)
        whole, loop = self.loop.record, self.loop
        loop.record = lambda folder, group, version: (
            [] if group.task.id == "y" else whole(folder, group, version)
        )
        self.step(source, 0)
        again = make(0, attempt=1, evaluation=table)
        for number in range(2):
            self.step(again, number)
        assert [name for name in self.loop.evaluated if "~y-" in name] == [
            "evaluation~y-1a2b3c4d.0.0-0.1",
            "evaluation~y-1a2b3c4d.1.0-0.1",
        ]
        assert self.lines() == [(1, 0, 2)]

    def test_the_metrics_of_an_evaluation_that_a_kill_left_out_come_with_the_next_step(self, make):
        table = {"tasks": "held", "every": 1, "sessions": 1}
        source = make(evaluation=table)
        for number in range(2):
            self.step(source, number)
        (self.loop.folder / METRICS).unlink()
        make(2, attempt=1, evaluation=table).finish(2)
        assert self.lines() == [(2, 1, 2), (2, 2, 2)]

    def test_weights_are_published_at_the_end_whatever_fails_beside_the_last_step(self, make):
        source = make()
        self.step(source, 0)
        source._rollouts.end_evaluation = Mock(side_effect=RecorderError("gave up"))
        with pytest.raises(
            EngineError, match=r"training is finished, .*: only the last evaluation failed: gave up"
        ):
            source.finish(1)
        assert self.loop.published[-1] == "1a2b3c4d.1.0"

    def test_ages_are_in_steps_whatever_the_iterations_of_a_step(self, make):
        source = make(grpo={"num_iterations": 2})
        self.step(source, 0)
        batch = self.step(source, 2)
        assert (batch.ledger.trained, self.loop.metrics["age/max"]) == (4, 1.0)


class TestGroupsWithoutSignal:
    @pytest.mark.parametrize(
        ("silent", "limit", "groups"),
        [("", 2, 2), ("a", 0, 2), ("a", 1, 3), ("ab", 1, 3), ("ab", 9, 4)],
    )
    def test_each_is_replaced_by_one_further_group_up_to_the_limit(
        self, tmp_path, silent, limit, groups
    ):
        loop = Loop(tmp_path, silent, replace_zero_variance=limit)
        batch = loop.step(3, "ab")
        assert len({labelled.group_id for labelled in batch.rewards.values()}) == groups
        assert batch.ledger.sampled == 2 * 2 * groups
        assert loop.published == ["1a2b3c4d.3.0"]

    def test_a_further_group_without_signal_is_replaced_too_until_the_limit(self, tmp_path):
        loop = Loop(tmp_path, "abcde", replace_zero_variance=4)
        loop.step(3, "a")
        groups = [session_id.removesuffix("-0.0") for session_id in loop.run[::2]]
        further = [f"{task}-1a2b3c4d.{step}.0" for step, task in enumerate("eabc", 4)]
        assert groups == ["a-1a2b3c4d.3.0", *further]

    def test_a_restarted_step_takes_the_same_groups_and_their_sessions(self, tmp_path):
        loop = Loop(tmp_path, "abc", replace_zero_variance=4)
        first = loop.step(3, "ab")
        loop.run.clear()
        assert loop.step(3, "ab", attempt=1) == first
        assert loop.run == []


class TestForks:
    """Groups of forks for groups whose rewards are all equal."""

    @pytest.fixture
    def loop(self, tmp_path):
        loop = Loop(tmp_path, "ab", forks={"sessions": 3}, replace_zero_variance=1)
        loop.calls = 4
        return loop

    def test_the_first_session_of_each_is_forked_at_its_middle_call_and_the_forks_are_a_group_of_the_step(
        self, loop
    ):
        batch = loop.step(3, "ca")
        source = RecordedFrom(loop.folder, "a-1a2b3c4d.3.1-0.0", START + timedelta(seconds=2))
        assert loop.forked == {"fork~a-1a2b3c4d.3.1-0.0": source}
        assert len(loop.run) == 2 + 2 + 3
        (forks,) = loop.forked
        forked = [name for name, label in batch.rewards.items() if label.group_id == forks]
        assert forked == [f"{forks}-{index}.0" for index in range(3)]
        assert batch.ledger.sampled == 7 * 4 * 2
        assert loop.metrics["groups_forked"] == 1

    def test_a_restarted_step_takes_the_same_forks(self, loop, monkeypatch):
        with monkeypatch.context() as killed:
            killed.setattr(online, "read_batch", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                loop.step(3, "ab")
        assert len(loop.forked) == 2
        first = [*loop.run]
        loop.run.clear()
        batch = loop.step(3, "ab", attempt=1)
        assert (loop.run, sorted(batch.rewards)) == ([], sorted(first))
        assert loop.step(3, "ab", attempt=2) == batch

    def test_a_restarted_step_takes_no_forks_of_another_session_than_it_forks(
        self, loop, monkeypatch
    ):
        record = loop.record

        def lose_first(folder, group, version):
            loop.faults = "infrastructure"
            lost = [name for name in group.session_ids if name == "a-1a2b3c4d.3.0-0.0"]
            sessions = record(folder, replace(group, session_ids=lost), version)
            loop.faults = ""
            others = [name for name in group.session_ids if name not in lost]
            return sessions + record(folder, replace(group, session_ids=others), version)

        loop.record = lose_first
        with monkeypatch.context() as killed:
            killed.setattr(online, "read_batch", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                loop.step(3, "a")
        batch = loop.step(3, "a", attempt=1)
        assert [*loop.forked] == ["fork~a-1a2b3c4d.3.0-1.0", "fork~a-1a2b3c4d.3.0-0.1"]
        groups = {label.group_id for label in batch.rewards.values()}
        assert groups == {"a-1a2b3c4d.3.0", "fork~a-1a2b3c4d.3.0-0.1"}

    def test_a_further_group_comes_only_when_no_session_can_be_forked(self, loop):
        loop.calls = 1
        loop.step(3, "a")
        assert loop.forked == {}
        assert len(loop.run) == 4


class TestFaults:
    """`at_first` are tasks of which all sessions of the first attempt are faults."""

    @pytest.fixture
    def loop(self, tmp_path):
        return Loop(tmp_path, replace_zero_variance=2, at_first="a")

    def test_a_step_that_was_trained_without_a_group_is_trained_without_it_again(self, loop):
        first = loop.step(3, "a")
        assert first.rewards
        loop.run.clear()
        assert loop.step(3, "a", attempt=1) == first
        assert loop.run == []

    def test_the_faults_of_a_step_that_was_not_trained_are_run_again(self, loop, monkeypatch):
        with monkeypatch.context() as killed:
            killed.setattr(online, "read_batch", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                loop.step(3, "ab")
        loop.run.clear()
        batch = loop.step(3, "ab", attempt=1)
        assert loop.run == ["a-1a2b3c4d.3.0-0.1", "a-1a2b3c4d.3.0-1.1"]
        assert list(batch.rewards) == [*loop.run, "b-1a2b3c4d.3.1-0.0", "b-1a2b3c4d.3.1-1.0"]
        loop.run.clear()
        assert loop.step(3, "ab", attempt=2) == batch
        assert loop.run == []

    @pytest.mark.parametrize(
        ("old", "new", "lacks"),
        [
            (",0]]", ',0],["gone",0]]', "gone of revision 0"),
            (",0]", ",5]", "b-1a2b3c4d.3.0-0.0 of revision 5"),
        ],
    )
    def test_a_step_whose_sessions_or_revisions_are_gone_is_not_taken_again(
        self, loop, old, new, lacks
    ):
        loop.step(3, "b")
        text = (loop.folder / BATCHES).read_text()
        assert old in text
        (loop.folder / BATCHES).write_text(text.replace(old, new))
        with pytest.raises(
            RunError,
            match=rf"has no session {lacks}, but batches\.jsonl says .*train into a new folder",
        ):
            loop.step(3, "b", attempt=1)

    def test_a_step_that_was_trained_is_taken_again_with_the_rewards_that_it_had(self, loop):
        first = loop.step(3, "b")
        with RunWriter(loop.folder, "never") as writer:
            give_reward(
                writer, loop.run[0], GivenReward(value=-9.0, group="mine", source="x"), change=True
            )
        assert loop.step(3, "b", attempt=1) == first


def test_a_temperature_other_than_1_asks_each_engine_for_log_probabilities_at_it(
    tmp_path, monkeypatch
):
    for name, value in (
        ("check_arguments", Mock()),
        ("make_worker", Mock()),
        ("load_tasks", Mock(return_value=TASKS)),
    ):
        monkeypatch.setattr(online, name, value)
    required = Mock(side_effect=EngineError("raw_logprobs"))
    monkeypatch.setattr(EngineAdmin, "require_endpoints", Mock())
    monkeypatch.setattr(EngineAdmin, "require_processed", required)

    def check(**grpo):
        recipe = Recipe(model=tmp_path, tasks="t", harness="h", steps=1, grpo=grpo)
        engine = "http://127.0.0.1:9"
        OnlineTraces(
            recipe, tmp_path, engine=engine, seed=0, console=Console(file=StringIO())
        ).check()

    with pytest.raises(EngineError, match="raw_logprobs"):
        check(temperature=0.7)
    with suppress(ValueError):  # the worker is none
        check(temperature=1.0)
    required.assert_called_once_with()
