"""The trace source of an online run, with rewards from a table in place of harness and engine."""

import asyncio
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from io import StringIO
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from rich.console import Console

from rolltap.addons.errors import EngineError, RecorderError, RunError
from rolltap.addons.options import RecordedFrom
from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Session
from rolltap.addons.store.rewards import GivenReward, give_reward
from rolltap.addons.store.segment import SegmentReader
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.engine.weights import write_policy
from rolltap.trainer.runs.views.score import Teacher
from rolltap.trainer.runs.views.training import EVALUATION
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.traces.reader import iter_sessions
from rolltap.trainer.training.attempt import Attempt
from rolltap.trainer.training.online import OnlineTraces
from rolltap.trainer.training.recipe import Recipe
from rolltap.trainer.training.report import METRICS, read_metrics
from rolltap.trainer.training.steps import BATCHES, TrainedBatch, TrainedBatches
from tests.factories import START, add_rows, make_call
from tests.trainer.engine.acting import serving
from tests.trainer.runs.views.test_score import Scoring, logprob
from tests.trainer.training.stand_ins import FolderEngine
from tests.trainer.training.trainings import RECIPE, Training

RUN = "1a2b3c4d"
TASKS = [Task(id=name, instruction="go", evaluate=["true"]) for name in "abcde"]
HELD_OUT = [Task(id=name, instruction="go", evaluate=["true"]) for name in "xy"]
AHEAD = {"max_staleness": 1, "publish": "lora", "lora": {"r": 1}}


class Loop:
    """An online run, and what stands in for its runner, its engines and its trainer.

    Settings are keys of the recipe.
    """

    def __init__(self, folder, silent="", **settings):
        self.folder = folder
        self.recipe = Recipe(model="m", tasks="t", harness="h", steps=9, sessions=2, **settings)
        self.console = Console(file=StringIO(), width=1000)

        # what happens
        self.teacher: Teacher | None = None
        self.silent = silent
        """Tasks whose rewards are all equal."""
        self.tasks: dict[int, str] = {}
        """Step -> the tasks of its rows."""
        self.calls = 1
        """Calls of each session."""
        self.faults = ""
        """Outcome of all sessions, if they are faults."""
        self.lost: set[str] = set()
        """Sessions that are faults."""
        self.other: dict[str, str] = {}
        """End of a session's id -> the weights that sample in place of the published ones."""
        self.held: set[str] = set()
        """Tasks, or `forks`, whose groups end when the test calls what is in `waiting`."""
        self.waiting = {}
        self.cut = ""
        """Tasks whose sessions never run."""
        self.stolen = False
        self.refusal: EngineError | None = None
        self.evaluation_error: RecorderError | None = None

        # what was done
        self.ran: list[str] = []
        self.evaluated: list[str] = []
        self.forked: dict[str, RecordedFrom] = {}
        self.published: list[str] = []
        self.cancelled: list[str] = []
        self.logged: list[dict[str, float]] = []
        self.engines = SimpleNamespace(require_owned=self.require_owned, silent=list)
        for run in [folder, folder / EVALUATION] if "evaluation" in settings else [folder]:
            run.mkdir(exist_ok=True)
            write_metadata(run, {})

    @property
    def printed(self):
        return self.console.file.getvalue()

    @property
    def metrics(self):
        return {name: value for line in self.logged for name, value in line.items()}

    @property
    def evaluations(self):
        """The lines of metrics with an evaluation: step, the weights' step, and sessions."""
        lines = read_metrics(self.folder / METRICS)
        return [(line["step"], line["eval/step"], line["eval/sessions"]) for line in lines]

    # The engines

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

    # The sessions

    def run_sessions(self, group):
        """Record the sessions of a group, sampled by the published weights."""
        sessions = []
        if group.task.id not in self.cut:
            sessions = [self.session(name, group) for name in group.session_ids]
        ids = [session.session_id for session in sessions]
        if group.evaluates:
            self.record(self.folder / EVALUATION, sessions)
            self.evaluated += ids
            return sessions
        self.record(self.folder, sessions)
        self.ran += ids
        if group.fork:
            self.forked[group.group_id] = group.fork
        return sessions

    def session(self, session_id, group):
        version = self.published[-1]
        for end, other in self.other.items():
            if session_id.endswith(end):
                version = other
        session = Session(
            session_id=session_id,
            group_id=group.group_id,
            task_id=group.task.id,
            status="completed",
            reward=float(session_id.partition(".")[2].count("-0")),
            policy_version=version,
        )
        if group.task.id in self.silent and not group.fork:
            session.reward = 0.5
        if self.faults or session_id in self.lost:
            session.status = self.faults or "infrastructure"
            session.reward = None
            session.error = "the engine is down"
        return session

    def record(self, folder, sessions):
        """Record sessions in another order than theirs."""
        for session in reversed(sessions):
            calls = []
            for number in range(self.calls):
                version = session.policy_version
                call = make_call(
                    number, [1], [2, 3], version=version, session_id=session.session_id
                )
                calls.append(call)
            add_rows(folder, *calls, session, sync="never")

    # The steps

    @contextmanager
    def source(self, number, attempt=0):
        """Yield a source before a step."""
        source = OnlineTraces(
            self.recipe, self.folder, engine="http://a", seed=7, console=self.console
        )
        source._worker = SimpleNamespace(runner=self.open_runner)
        source._tasks = {task.id: task for task in TASKS}
        source._teacher = self.teacher
        if self.recipe.evaluation is not None:
            source._evaluations.tasks = HELD_OUT
        source.trainer = SimpleNamespace(
            state=SimpleNamespace(global_step=number),
            args=SimpleNamespace(max_steps=9),
            model=None,
            rows_of=self.rows_of,
            log_metrics=self.log,
        )
        with ExitStack() as stack:
            source.open_run(Attempt(RUN, attempt), self, stack)
            yield source

    def open_runner(self, advance, *, share):
        return AtOnce(self)

    def log(self, metrics):
        if metrics:
            self.logged.append(metrics)

    def rows_of(self, step):
        if step in self.tasks:
            return [{"task_id": task} for task in self.tasks[step]]
        size = self.recipe.groups_per_step
        numbers = range(step * size, (step + 1) * size)
        return [{"task_id": TASKS[number % 5].id} for number in numbers]

    def step(self, number, tasks, attempt=0):
        """Return the batch of a step, by a source of its own as after a restart. Earlier steps are
        trained."""
        iterations = self.recipe.iterations
        self.tasks[number // iterations] = tasks
        self.recipe = self.recipe.model_copy(update={"groups_per_step": len(tasks)})
        trained = TrainedBatches(self.folder)
        for earlier in range(len(trained), number // iterations):
            step = earlier * iterations
            stale = []
            for place, row in enumerate(self.rows_of(earlier)):
                stale.append(f"{row['task_id']}-{RUN}.{step}.{place}-0.0")
            trained.add(TrainedBatch(step=step, sessions=[], stale=stale))
        with self.source(number, attempt) as source:
            source.before_batch()
            return source([])

    def forget_batches(self):
        """Leave what a training leaves that was killed before its batch was trained."""
        (self.folder / BATCHES).unlink()
        self.ran.clear()


class AtOnce:
    """A runner that runs a group as soon as it gets it."""

    running = 0

    def __init__(self, loop):
        self.loop = loop

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    async def submit(self, group):
        events = asyncio.get_running_loop()
        result = events.create_future()
        name = "forks" if group.fork else group.task.id
        sessions = self.loop.run_sessions(group)
        if group.evaluates and self.loop.evaluation_error is not None:
            result.set_exception(self.loop.evaluation_error)
        elif name in self.loop.held:
            end = partial(events.call_soon_threadsafe, result.set_result, sessions)
            self.loop.waiting[name] = end
        else:
            result.set_result(sessions)
        return result

    def cancel_running(self, too_old, why):
        self.loop.cancelled = [version for version in self.loop.published if too_old(version)]


class Ahead(Loop):
    """Rollouts of one group a step, one step ahead: task `a` is of the first step, `b` of the
    second. One source takes all steps, from `first` on."""

    def __init__(self, folder, stack, *, first=0, attempt=0, **settings):
        super().__init__(folder, **{**AHEAD, **settings})
        self.taking = stack.enter_context(self.source(first, attempt))

    def step(self, number):
        self.taking.trainer.state.global_step = number
        self.taking.before_batch()
        return self.taking([])


@pytest.fixture
def make_loop(tmp_path):
    """A function: tasks without a signal, and keys of the recipe -> a loop."""
    return partial(Loop, tmp_path / "run")


@pytest.fixture
def loop(make_loop):
    return make_loop()


@pytest.fixture
def ahead(tmp_path):
    """A function that starts a loop with rollouts ahead, or starts it again."""
    with ExitStack() as stack:
        yield partial(Ahead, tmp_path / "run", stack)


def tasks_of(batch):
    """Return the tasks of a batch, each once."""
    return "".join(dict.fromkeys(label.task_id for label in batch.rewards.values()))


def test_a_step_runs_one_group_for_each_row_and_has_their_order(loop):
    batch = loop.step(3, "ba")
    ids = [f"b-{RUN}.3.0-0.0", f"b-{RUN}.3.0-1.0", f"a-{RUN}.3.1-0.0", f"a-{RUN}.3.1-1.0"]
    assert loop.ran == list(batch.rewards) == [trace.session_id for trace in batch.traces] == ids
    assert batch.on_policy
    assert loop.published == [f"{RUN}.3.0"]
    assert "step 4/9  4 sessions\n" in loop.printed


def test_a_step_that_is_on_the_disk_is_neither_run_nor_published_again(loop):
    first = loop.step(3, "ba")
    loop.ran.clear()
    assert loop.step(3, "ba", attempt=1) == first
    assert loop.ran == []
    assert loop.published == [f"{RUN}.3.0"]
    assert "4 sessions (4 recorded before)\n" in loop.printed


def test_only_the_missing_sessions_of_a_step_are_run_by_newly_published_weights(loop):
    before = list(loop.step(3, "b").rewards)
    loop.forget_batches()
    batch = loop.step(3, "ba", attempt=1)
    assert loop.ran == [f"a-{RUN}.3.1-0.1", f"a-{RUN}.3.1-1.1"]
    assert loop.published == [f"{RUN}.3.0", f"{RUN}.3.1"]
    assert list(batch.rewards) == before + loop.ran


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
    loop.ran.clear()
    assert list(loop.step(3, "ba", attempt=1).rewards) == loop.ran
    assert len(loop.ran) == 4


def test_an_engine_that_refuses_the_last_weights_is_told_from_a_training_that_failed(loop):
    loop.refusal = EngineError("the engine at http://b is gone")
    message = r"is finished, and its model is in .*/model: only the last .*http://b is gone"
    with loop.source(9) as source, pytest.raises(EngineError, match=message):
        source.finish(9)


@pytest.mark.parametrize("settings", [{}, AHEAD], ids=["at the end", "beside the last step"])
def test_weights_are_published_at_the_end_though_the_last_evaluation_fails(make_loop, settings):
    loop = make_loop(evaluation={"tasks": "held"}, **settings)
    loop.evaluation_error = RecorderError("gave up")
    message = r"training is finished, .*: only the last evaluation failed: gave up"
    with loop.source(0) as source:
        source.before_batch()
        with pytest.raises(EngineError, match=message):
            source.finish(1)
    assert loop.published[-1] == f"{RUN}.1.0"


def test_the_engines_are_verified_before_anything_is_published_and_get_the_trained_weights_last(
    loop,
):
    with loop.source(0) as source:
        source.begin(source.trainer)
        source.before_batch()
        source.finish(9)
    assert loop.published == [f"base {RUN}.0.0", f"{RUN}.0.0", f"{RUN}.9.0"]


class TestOtherWeights:
    @pytest.mark.parametrize("other", ["default", "deadbeef.3.0", f"{RUN}.2.0"])
    def test_their_calls_are_kept_and_left_out_with_a_warning_that_names_them(self, loop, other):
        name = f"a-{RUN}.3.1-0.0"
        loop.other = {name: other}
        batch = loop.step(3, "ba")
        trained = [trace.session_id for trace in batch.traces]
        assert trained == [each for each in loop.ran if each != name]
        assert batch.ledger == Ledger(sampled=8, trained=6, left_out={"stale": 2})
        warning = f"warning: 2 tokens of step 4 were sampled by other weights than {RUN}.3.0"
        assert f"{warning} ({other}): " in loop.printed
        kept = {recorded.session_id for recorded in iter_sessions(loop.folder) if recorded.calls}
        assert kept == {*loop.ran}

    def test_a_step_with_nothing_else_is_not_trained_and_is_run_again_at_the_next_start(self, loop):
        loop.other = {".0": "default"}
        message = r"4 tokens of step 4 .* \(default\): .*; nothing else is left to train: "
        with pytest.raises(EngineError, match=message):
            loop.step(3, "b")
        assert TrainedBatches(loop.folder).get(3) is None
        batch = loop.step(3, "b", attempt=1)
        assert list(batch.rewards) == loop.ran[2:] == [f"b-{RUN}.3.0-0.1", f"b-{RUN}.3.0-1.1"]

    def test_a_step_during_which_an_engine_was_stolen_is_not_trained(self, loop):
        loop.stolen = True
        with pytest.raises(EngineError, match="another training owns the engine"):
            loop.step(3, "b")
        assert TrainedBatches(loop.folder).get(3) is None


def test_a_step_whose_calls_have_no_experts_to_replay_ends_the_training(make_loop):
    loop = make_loop(grpo={"routing": "recorded"})
    message = r"step 4 has the experts of its tokens: .*`rolltap serve --routing`"
    with pytest.raises(EngineError, match=message):
        loop.step(3, "ba")


@pytest.fixture
def teacher(tmp_path, tokenizer):
    with serving(Scoring(tmp_path / "big", tokenizer)) as engine:
        yield engine


def test_the_sessions_of_a_step_are_scored_by_the_teacher_and_not_again_after_a_restart(
    make_loop, teacher, tokenizer_folder
):
    loop = make_loop("a", teacher="big")
    loop.teacher = Teacher(teacher.url, str(tokenizer_folder))
    traces = []
    for attempt in range(2):
        with loop.source(0, attempt) as source:
            source.before_batch()
            traces += source([]).traces
    assert teacher.scored == [[1, 2, 3]] * 2
    scores = [logprob([1], 2), logprob([1, 2], 3)]
    assert [trace.scores for trace in traces] == [scores] * 4
    assert loop.ran == [f"a-{RUN}.0.0-0.0", f"a-{RUN}.0.0-1.0"]


def test_a_step_reads_no_session_of_earlier_steps(
    make_loop, teacher, tokenizer_folder, monkeypatch
):
    loop = make_loop(teacher="big")
    loop.teacher = Teacher(teacher.url, str(tokenizer_folder))
    seen = set()
    read = SegmentReader.read

    def watched(reader, offset):
        batch = read(reader, offset)
        seen.update(batch.column("session_id").to_pylist())
        return batch

    monkeypatch.setattr(SegmentReader, "read", watched)
    with loop.source(0) as source:
        for step in range(3):
            source.trainer.state.global_step = step
            loop.other = {"-1.0": "other"} if step == 2 else {}
            source.before_batch()
            seen.clear()
            batch = source([])
            assert seen == batch.accounts.keys()
    assert batch.ledger.left_out == {"stale": 2}, "and their weights were read"


class TestAhead:
    def test_a_step_trains_what_older_weights_sampled_and_says_how_old_they_are(self, ahead):
        loop = ahead()
        batches = [loop.step(number) for number in range(3)]
        assert [batch.on_policy for batch in batches] == [True, False, False]
        found = []
        for batch in batches:
            for trace in batch.traces:
                found += [(trace.task_id, span.version) for span in trace.weight_versions]
        expected = [("a", f"{RUN}.0.0"), ("b", f"{RUN}.0.0"), ("c", f"{RUN}.1.0")]
        assert [*dict.fromkeys(found)] == expected
        assert batches[2].ledger == Ledger(sampled=4, trained=4)
        ages = {"age/mean": 1.0, "age/max": 1.0, "age/share/0": 0.0, "age/share/1": 1.0}
        assert loop.metrics.items() >= (ages | {"stale_share": 0.0}).items()
        assert {"seconds_idle", "groups_dropped"} <= loop.metrics.keys()
        assert loop.cancelled == [f"{RUN}.0.0"], "the third step could train no token of these"

    def test_a_group_that_is_too_old_is_left_out_as_stale_and_its_place_is_filled(self, ahead):
        loop = ahead()
        loop.held = {"b"}
        loop.step(0)
        assert tasks_of(loop.step(1)) == "c"
        loop.waiting["b"]()
        batch = loop.step(2)
        assert tasks_of(batch) == "d"
        assert batch.ledger == Ledger(sampled=8, trained=4, left_out={"stale": 4})
        accounts = batch.accounts
        assert sum((each.ledger for each in accounts.values()), Ledger()) == batch.ledger
        stale = [f"b-{RUN}.1.0-0.0", f"b-{RUN}.1.0-1.0"]
        assert {name for name in accounts if accounts[name].reason == "stale"} == {*stale}
        assert TrainedBatches(loop.folder).get(2).stale == stale
        lines = [line for line in loop.logged if "groups_dropped" in line]
        assert [line["groups_dropped"] for line in lines] == [0, 0, 1]
        assert "other weights" not in loop.printed
        assert ahead(first=2, attempt=1).step(2) == batch

    def test_after_a_restart_only_groups_that_were_not_taken_go_on_and_nothing_ended_is_run_again(
        self, ahead
    ):
        loop = ahead()
        first = loop.step(0)
        again = ahead(attempt=1)
        assert again.step(0) == first
        assert list(again.step(1).rewards) == loop.ran[2:4], "by the weights of the first attempt"
        assert {name[0] for name in again.ran} == {"c"}
        assert tasks_of(again.step(2)) == "c"

    def test_groups_without_signal_are_replaced_by_those_that_run_ahead(self, ahead):
        loop = ahead(replace_zero_variance=2, silent="ab")
        assert tasks_of(loop.step(0)) == "abc"
        assert tasks_of(loop.step(1)) == "d"

    def test_what_the_age_of_the_rollouts_does_not_explain_is_told_or_ends_the_training(
        self, ahead
    ):
        loop = ahead()
        loop.other = {f"a-{RUN}.0.0-0.0": "deadbeef.3.0"}
        assert loop.step(0).ledger == Ledger(sampled=4, trained=2, left_out={"stale": 2})
        assert "warning: 2 tokens of step 1 were sampled by other weights" in loop.printed
        loop.other = {".0": "default"}
        loop.step(1)
        with pytest.raises(EngineError, match=r"\(default\): .*; nothing else is left to train"):
            loop.step(2)

    def test_ages_are_in_steps_whatever_the_iterations_of_a_step(self, ahead):
        loop = ahead(grpo={"num_iterations": 2})
        loop.step(0)
        assert loop.step(2).ledger.trained == 4
        assert loop.metrics["age/max"] == 1.0


FORKED = {"forks": {"sessions": 3}, "silent": "a"}
FORKS = f"fork~a-{RUN}.0.0-0.0"
"""The group of the forks of the first step's first session."""
FORK_IDS = [f"{FORKS}-{index}.0" for index in range(3)]


class TestForksAhead:
    @pytest.fixture
    def forking(self, ahead):
        """A function that starts a loop that forks task `a`."""

        def forking(**settings):
            loop = ahead(**FORKED, **settings)
            loop.calls = 4
            return loop

        return forking

    def test_a_step_trains_the_forks_that_have_ended_and_no_step_waits_for_others(self, forking):
        loop = forking()
        loop.held = {"forks"}
        assert tasks_of(loop.step(0)) == "ab"
        loop.waiting["forks"]()
        assert list(loop.step(1).rewards) == FORK_IDS
        assert tasks_of(loop.step(2)) == "c"
        lines = [line for line in loop.logged if "groups_forked" in line]
        assert [line["groups_forked"] for line in lines] == [0, 1, 0]

    def test_forks_that_are_too_old_are_dropped_and_another_group_takes_their_place(self, forking):
        loop = forking()
        loop.held = {"forks"}
        assert tasks_of(loop.step(0)) == "ab"
        loop.step(1)
        loop.waiting["forks"]()
        assert tasks_of(loop.step(2)) == "d"
        assert TrainedBatches(loop.folder).get(2).stale == FORK_IDS

    def test_forks_that_no_step_has_trained_go_on_after_a_restart(self, forking):
        loop = forking()
        loop.held = {"forks"}
        first = loop.step(0)
        again = forking(attempt=1)
        assert again.step(0) == first
        assert list(again.step(1).rewards) == FORK_IDS
        assert tasks_of(again.step(2)) == "c"
        assert tasks_of(forking(first=3, attempt=2).step(3)) == "d"

    def test_two_groups_of_a_task_that_are_forked_in_one_step_have_forks_of_their_own(
        self, forking
    ):
        loop = forking(max_staleness=2)
        loop.held = {"forks"}
        loop.tasks = {1: "a"}
        loop.step(0)
        assert list(loop.forked) == [FORKS, f"fork~a-{RUN}.1.0-0.0"]


class TestEvaluationsAhead:
    @staticmethod
    def table(every=1):
        return {"tasks": "held", "every": every, "sessions": 1}

    def test_one_runs_beside_the_steps_and_ends_before_the_next_weights(self, ahead):
        loop = ahead(evaluation=self.table(every=2))
        found = []
        for number in range(3):
            loop.step(number)
            found.append(loop.evaluations)
        assert found == [[], [(1, 0, 2)], [(1, 0, 2)]]
        assert {name.split(".")[1] for name in loop.evaluated} == {"0", "2"}
        loop.taking.finish(3)
        assert loop.evaluations == [(1, 0, 2), (3, 2, 2), (3, 3, 2)]

    def test_one_that_a_kill_cut_is_completed_by_the_same_weights(self, ahead):
        loop = ahead(evaluation=self.table())
        loop.cut = "y"
        loop.step(0)
        again = ahead(attempt=1, evaluation=self.table())
        again.step(0)
        again.step(1)
        completed = [name for name in again.evaluated if "~y-" in name]
        assert completed == [f"evaluation~y-{RUN}.{step}.0-0.1" for step in (0, 1)]
        assert again.evaluations == [(1, 0, 2)]

    def test_the_metrics_of_one_that_a_kill_left_out_come_with_the_next_step(self, ahead):
        loop = ahead(evaluation=self.table())
        loop.step(0)
        loop.step(1)
        (loop.folder / METRICS).unlink()
        again = ahead(first=2, attempt=1, evaluation=self.table())
        again.taking.finish(2)
        assert again.evaluations == [(2, 1, 2), (2, 2, 2)]


class TestGroupsWithoutSignal:
    @pytest.mark.parametrize(
        ("silent", "limit", "groups"),
        [("", 2, 2), ("a", 0, 2), ("a", 1, 3), ("ab", 1, 3), ("ab", 9, 4)],
    )
    def test_each_is_replaced_by_one_further_group_up_to_the_limit(
        self, make_loop, silent, limit, groups
    ):
        loop = make_loop(silent, replace_zero_variance=limit)
        batch = loop.step(3, "ab")
        assert len({label.group_id for label in batch.rewards.values()}) == groups
        assert batch.ledger.sampled == 2 * 2 * groups
        assert loop.published == [f"{RUN}.3.0"]

    def test_a_further_group_without_signal_is_replaced_too_until_the_limit(self, make_loop):
        loop = make_loop("abcde", replace_zero_variance=4)
        loop.step(3, "a")
        groups = [session_id.removesuffix("-0.0") for session_id in loop.ran[::2]]
        further = [f"{task}-{RUN}.{step}.0" for step, task in enumerate("eabc", 4)]
        assert groups == [f"a-{RUN}.3.0", *further]

    def test_a_restarted_step_takes_the_same_groups_and_their_sessions(self, make_loop):
        loop = make_loop("abc", replace_zero_variance=4)
        first = loop.step(3, "ab")
        loop.ran.clear()
        assert loop.step(3, "ab", attempt=1) == first
        assert loop.ran == []


class TestForks:
    """Groups of forks for groups whose rewards are all equal."""

    @pytest.fixture
    def loop(self, make_loop):
        loop = make_loop("ab", forks={"sessions": 3}, replace_zero_variance=1)
        loop.calls = 4
        return loop

    def test_the_first_session_of_each_is_forked_at_its_middle_call_into_a_group_of_the_step(
        self, loop
    ):
        batch = loop.step(3, "ca")
        source = RecordedFrom(loop.folder, f"a-{RUN}.3.1-0.0", START + timedelta(seconds=2))
        forks = f"fork~a-{RUN}.3.1-0.0"
        assert loop.forked == {forks: source}
        assert len(loop.ran) == 2 + 2 + 3
        forked = [name for name, label in batch.rewards.items() if label.group_id == forks]
        assert forked == [f"{forks}-{index}.0" for index in range(3)]
        assert batch.ledger.sampled == 7 * 4 * 2
        assert loop.metrics["groups_forked"] == 1

    def test_a_restarted_step_takes_the_same_forks(self, loop):
        first = sorted(loop.step(3, "ab").rewards)
        assert len(loop.forked) == 2
        loop.forget_batches()
        batch = loop.step(3, "ab", attempt=1)
        assert loop.ran == []
        assert sorted(batch.rewards) == first
        assert loop.step(3, "ab", attempt=2) == batch

    def test_a_restarted_step_takes_no_forks_of_another_session_than_it_forks(self, loop):
        loop.lost = {f"a-{RUN}.3.0-0.0"}
        loop.step(3, "a")
        loop.forget_batches()
        batch = loop.step(3, "a", attempt=1)
        assert list(loop.forked) == [f"fork~a-{RUN}.3.0-1.0", f"fork~a-{RUN}.3.0-0.1"]
        groups = {label.group_id for label in batch.rewards.values()}
        assert groups == {f"a-{RUN}.3.0", f"fork~a-{RUN}.3.0-0.1"}

    def test_a_further_group_comes_only_when_no_session_can_be_forked(self, loop):
        loop.calls = 1
        loop.step(3, "a")
        assert loop.forked == {}
        assert len(loop.ran) == 4


class TestFaults:
    """All sessions of task `a` are faults in the first attempt."""

    @pytest.fixture
    def loop(self, make_loop):
        loop = make_loop(replace_zero_variance=2)
        loop.lost = {f"a-{RUN}.3.0-0.0", f"a-{RUN}.3.0-1.0"}
        return loop

    def test_a_step_that_was_trained_without_a_group_is_trained_without_it_again(self, loop):
        first = loop.step(3, "a")
        assert first.rewards
        loop.ran.clear()
        assert loop.step(3, "a", attempt=1) == first
        assert loop.ran == []

    def test_the_faults_of_a_step_that_was_not_trained_are_run_again(self, loop):
        loop.step(3, "ab")
        loop.forget_batches()
        batch = loop.step(3, "ab", attempt=1)
        assert loop.ran == [f"a-{RUN}.3.0-0.1", f"a-{RUN}.3.0-1.1"]
        assert list(batch.rewards) == [*loop.ran, f"b-{RUN}.3.1-0.0", f"b-{RUN}.3.1-1.0"]
        loop.ran.clear()
        assert loop.step(3, "ab", attempt=2) == batch
        assert loop.ran == []


@pytest.mark.parametrize(
    ("old", "new", "lacks"),
    [
        (",0]]", ',0],["gone",0]]', "gone of revision 0"),
        (",0]", ",5]", f"b-{RUN}.3.0-0.0 of revision 5"),
    ],
)
def test_a_step_whose_sessions_or_revisions_are_gone_is_not_taken_again(loop, old, new, lacks):
    loop.step(3, "b")
    text = (loop.folder / BATCHES).read_text()
    assert old in text
    (loop.folder / BATCHES).write_text(text.replace(old, new))
    message = rf"has no session {lacks}, but batches\.jsonl says .*train into a new folder"
    with pytest.raises(RunError, match=message):
        loop.step(3, "b", attempt=1)


def test_a_step_that_was_trained_is_taken_again_with_the_rewards_that_it_had(loop):
    first = loop.step(3, "b")
    given = GivenReward(value=-9.0, group="mine", source="x")
    with RunWriter(loop.folder, "never") as writer:
        give_reward(writer, loop.ran[0], given, change=True)
    assert loop.step(3, "b", attempt=1) == first


def test_a_temperature_other_than_1_asks_each_engine_for_log_probabilities_at_it(
    tmp_path, monkeypatch
):
    training = Training(tmp_path)
    required = Mock(side_effect=EngineError("raw_logprobs"))
    monkeypatch.setattr(FolderEngine, "require_processed", required, raising=False)
    assert training.here(monkeypatch).exit_code == 0
    required.assert_not_called()
    training.recipe(RECIPE + "temperature = 0.7\n")
    assert "raw_logprobs" in str(training.here(monkeypatch, "hot").exception)
