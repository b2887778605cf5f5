"""Evaluations of a training, with rewards from a table in place of harness and engine."""

import json
from io import StringIO
from unittest.mock import Mock

import pytest
from rich.console import Console

from rolltap import plan_training
from rolltap.addons.engine.policy import PolicyFile
from rolltap.addons.errors import EngineError, InputError, RecorderError
from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Session
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.boxes.hiding import HidingRuntime
from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.names import Version
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.worker import Worker
from rolltap.trainer.runs.views.report import summarize
from rolltap.trainer.runs.views.training import EVALUATION
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.reader import load_sessions
from rolltap.trainer.training import evaluation
from rolltap.trainer.training.attempt import TRAINING_FILE
from rolltap.trainer.training.evaluation import Evaluations
from rolltap.trainer.training.plan import plan
from rolltap.trainer.training.recipe import Recipe
from rolltap.trainer.training.report import METRICS, append_metrics, read_metrics
from rolltap.trainer.training.steps import BATCHES
from tests.trainer.training.test_online import HELD_OUT, Loop
from tests.trainer.training.trainings import RECIPE, Training

OF_STEP_0 = [f"evaluation~{task}-1a2b3c4d.0.0-{index}.0" for task in "xy" for index in (0, 1)]


@pytest.fixture
def make_loop(tmp_path):
    """A function: keys of [evaluation], and other keys of the recipe -> a loop."""

    def make(silent="", *, settings=None, **keys):
        return Loop(
            tmp_path,
            silent,
            evaluation={"tasks": "held_out", "sessions": 2, **keys},
            **(settings or {}),
        )

    return make


def test_the_held_out_tasks_are_run_beside_a_step_with_its_weights_and_nothing_of_them_is_trained(
    make_loop,
):
    loop = make_loop()
    batch = loop.step(0, "ab")
    assert loop.evaluated == OF_STEP_0
    assert list(batch.rewards) == loop.run
    assert load_sessions(loop.folder).keys() == batch.rewards.keys()
    assert batch.ledger.sampled == 2 * len(loop.run)
    sessions = load_sessions(loop.folder / EVALUATION)
    assert sessions.keys() == {*OF_STEP_0}
    assert {session.policy_version for session in sessions.values()} == {"1a2b3c4d.0.0"}
    assert PolicyFile(loop.folder / EVALUATION).read().version == "1a2b3c4d.0.0"
    (logged,) = loop.logged
    assert (logged["eval/step"], logged["eval/sessions"], logged["eval/reward"]) == (0.0, 4.0, 0.5)
    assert "evaluated 1a2b3c4d.0.0: reward 0.500, pass@1 0.500 (" in loop.console.file.getvalue()
    assert "), 4 sessions of 2 held-out tasks\n" in loop.console.file.getvalue()


def test_a_recipe_without_the_table_evaluates_nothing(tmp_path):
    loop = Loop(tmp_path)
    loop.step(0, "a")
    with loop.source(9) as source:
        source.finish(9)
    assert (loop.evaluated, loop.logged, (tmp_path / EVALUATION).exists()) == ([], [], False)


@pytest.mark.parametrize(("iterations", "evaluated"), [(1, {0, 2, 4, 6}), (2, {0, 4})])
def test_steps_of_the_recipe_are_between_evaluations_whatever_the_iterations_of_one(
    make_loop, iterations, evaluated
):
    loop = make_loop(every=2, settings={"grpo": {"num_iterations": iterations}})
    for number in range(0, 8, iterations):
        loop.step(number, "a")
    assert {int(name.split(".")[1]) for name in loop.evaluated} == evaluated
    assert {line["eval/step"] for line in loop.logged} == evaluated


def test_a_step_with_further_groups_is_evaluated_once_also_when_an_evaluation_fails(make_loop):
    loop = make_loop("ax", settings={"replace_zero_variance": 2})
    record = loop.record

    def fail(folder, group, version):
        loop.faults = "infrastructure" if folder.name == EVALUATION else ""
        return record(folder, group, version)

    loop.record = fail
    loop.step(0, "a")
    assert (len(loop.run), loop.evaluated) == (4, OF_STEP_0)
    assert loop.logged == []
    assert "warning: none of the 4 sessions of the evaluation of 1a2b3c4d.0.0 has a reward" in (
        loop.console.file.getvalue()
    )


class TestRestart:
    def test_a_step_that_was_trained_is_not_evaluated_again_and_has_the_same_metrics(
        self, make_loop
    ):
        loop = make_loop()
        loop.step(0, "a")
        loop.step(0, "a", attempt=1)
        assert loop.evaluated == OF_STEP_0
        assert loop.logged == [loop.logged[0]] * 2

    def test_a_step_that_was_trained_before_there_was_a_table_is_evaluated_when_it_is_taken_again(
        self, make_loop, tmp_path
    ):
        Loop(tmp_path).step(0, "a")
        loop = make_loop()
        loop.step(0, "a", attempt=1)
        assert (len(loop.evaluated), loop.run, loop.published) == (4, [], ["1a2b3c4d.0.1"])

    def test_only_the_missing_sessions_are_run_though_those_of_the_step_have_ended(self, make_loop):
        loop = make_loop()
        loop.step(0, "a")
        (loop.folder / BATCHES).unlink()  # as if it had been killed before the batch was trained
        with RunWriter(loop.folder / EVALUATION, "never") as writer:
            session = load_sessions(loop.folder / EVALUATION)[OF_STEP_0[3]]
            session.status, session.reward, session.revision = "infrastructure", None, 1
            writer.add_session(session)
        loop.step(0, "a", attempt=1)
        assert loop.evaluated[4:] == ["evaluation~y-1a2b3c4d.0.0-1.1"]
        assert len(loop.run) == 2
        assert PolicyFile(loop.folder / EVALUATION).read().version == "1a2b3c4d.0.1"

    def test_sessions_of_other_weights_are_run_again_and_do_not_count(self, make_loop):
        loop = make_loop()
        loop.other = {f"y-1a2b3c4d.0.0-{index}.0": "default" for index in (0, 1)}
        loop.step(0, "a")
        assert loop.logged[0]["eval/sessions"] == 2


class TestLast:
    def test_the_finished_weights_are_evaluated_after_their_publication_whatever_the_step(
        self, make_loop
    ):
        loop = make_loop(every=100)
        append_metrics(loop.folder / METRICS, 9, {"reward": 1.0})
        with loop.source(9) as source:
            source.finish(9)
        assert loop.published == ["1a2b3c4d.9.0"]
        assert loop.evaluated == [name.replace(".0.0-", ".9.0-") for name in OF_STEP_0]
        assert loop.run == []
        trained, last = read_metrics(loop.folder / METRICS)
        assert ("eval/step" in trained, last["step"], last["eval/step"], last["eval/reward"]) == (
            False,
            9,
            9,
            0.5,
        )
        with loop.source(9, attempt=1) as source:
            source.finish(9)
        assert (len(loop.evaluated), len(read_metrics(loop.folder / METRICS))) == (4, 2)

    def test_one_that_fails_is_told_from_a_training_that_failed(self, make_loop):
        loop = make_loop()

        def fail(*_):
            raise RecorderError("gave up")

        loop.record = fail
        message = r"is finished, and its model is in .*: only the last evaluation .*gave"
        with loop.source(9) as source, pytest.raises(EngineError, match=message):
            source.finish(9)


def test_a_training_is_evaluated_before_it_after_its_steps_and_at_its_end(tmp_path, monkeypatch):
    training = Training(tmp_path)
    lines = [json.dumps({"id": name, "instruction": name, "evaluate": ["true"]}) for name in "xa"]
    (tmp_path / "held_out.jsonl").write_text("\n".join(lines))
    recipe = RECIPE.replace("steps = 2", "steps = 3")
    training.recipe(recipe + "[evaluation]\ntasks = 'held_out.jsonl'\nsessions = 1\nevery = 2\n")
    ended = training.here(monkeypatch)
    assert ended.exit_code == 0, ended.output
    assert "warning: 1 task of evaluation.tasks, which the training has too: a\n" in ended.output
    lines = read_metrics(tmp_path / "run" / METRICS)
    name = json.loads((tmp_path / "run" / TRAINING_FILE).read_text())["run"]
    assert [(line["step"], line.get("eval/step"), "reward" in line) for line in lines] == [
        (1, 0, True),
        (2, None, True),
        (3, None, True),  # its evaluation's sessions were all faults
        (3, 3, False),
    ]
    assert (
        f"warning: none of the 2 sessions of the evaluation of {name}.2.0 has a reward"
        in ended.output
    )
    steps = [(row.step, row.trained) for row in summarize(tmp_path / "run").trained]
    assert steps == [(line["step"], line["tokens_trained"]) for line in lines[:3]]
    sessions = load_sessions(tmp_path / "run" / EVALUATION).values()
    versions = sorted(
        (session.policy_version.partition(".")[2], session.task_id) for session in sessions
    )
    assert versions == [(f"{step}.0", task) for step in (0, 2, 3) for task in "ax"]
    assert not [each for each in load_sessions(tmp_path / "run").values() if each.task_id == "x"]


def test_tasks_that_are_not_there_are_refused_before_anything_starts_but_in_a_plan(
    tmp_path, monkeypatch
):
    training = Training(tmp_path)
    training.recipe(RECIPE + "[evaluation]\ntasks = 'none.jsonl'\n")
    refused = training.here(monkeypatch)
    with pytest.raises(InputError, match=r"recipe\.toml: evaluation\.tasks: .*none\.jsonl"):
        raise refused.exception
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(plan, "plan", planned := Mock())
    assert plan_training(tmp_path / "recipe.toml") is planned.return_value
    recorded = training.here(monkeypatch, more=("--from", str(tmp_path / "first")))
    assert "none.jsonl" not in str(recorded.exception)  # it needs no tasks


class TestMetrics:
    @pytest.fixture
    def metrics_of(self, tmp_path):
        """A function: task -> the rewards of its sessions, None without one -> the metrics of step
        3."""

        def metrics_of(tasks, step=3):
            folder = tmp_path / EVALUATION
            folder.mkdir()
            write_metadata(folder, {})
            with RunWriter(folder, "never") as writer:
                for task, rewards in tasks.items():
                    for index, reward in enumerate(rewards):
                        group = f"evaluation~{task}-1a2b3c4d.3.0"
                        writer.add_session(
                            Session(
                                session_id=f"{group}-{index}.0",
                                group_id=group,
                                task_id=task,
                                harness="my own",
                                status="failed" if reward is None else "completed",
                                reward=reward,
                                policy_version="1a2b3c4d.3.0",
                            )
                        )
            recipe = Recipe(model="m", steps=9, evaluation={"tasks": "t", "sessions": 4})
            evaluations = Evaluations(recipe, tmp_path, lambda line: None)
            evaluations.tasks = [
                Task(id=name, instruction="go", evaluate=["true"]) for name in tasks
            ]
            return evaluations.metrics(Version("1a2b3c4d", step, 0))

        return metrics_of

    def test_each_task_has_the_same_weight_and_sessions_without_a_reward_do_not_count(
        self, metrics_of
    ):
        metrics = metrics_of({"x": [1.0, None, None], "y": [0.0, 0.0, 1.0, 0.5], "z": [None]})
        assert (metrics["eval/sessions"], metrics["eval/reward"]) == (5, 0.6875)
        assert (metrics["eval/reward/task/x"], metrics["eval/reward/task/y"]) == (1.0, 0.375)
        assert "eval/reward/task/z" not in metrics
        assert metrics["eval/reward/harness/my%20own"] == 0.6875

    def test_passes_have_intervals_up_to_the_sessions_that_every_task_has(self, metrics_of):
        metrics = metrics_of({"x": [1.0, 1.0], "y": [0.0, 1.0]})
        assert (metrics["eval/pass@1"], metrics["eval/pass@2"], metrics["eval/pass^2"]) == (
            0.75,
            1.0,
            0.5,
        )
        assert 0 < metrics["eval/pass^2_low"] < 0.5 < metrics["eval/pass^2_high"] < 1
        assert "eval/pass@4" not in metrics

    def test_many_tasks_have_no_metric_each(self, metrics_of, monkeypatch):
        monkeypatch.setattr(evaluation, "MOST_TASKS", 1)
        assert not [name for name in metrics_of({"x": [1.0], "y": [0.0]}) if "task/" in name]

    def test_other_weights_have_none(self, metrics_of):
        assert metrics_of({"x": [1.0]}, step=4) == {}


class Boxes(HidingRuntime, ProcessRuntime):
    """Hides what a sandbox hides, and needs none."""


class TestCheck:
    @pytest.fixture
    def check(self, tmp_path, tokenizer_folder):
        """A function: lines of the held-out tasks, and keys -> the evaluations, the training's
        worker and the text."""

        def check(lines, tasks=HELD_OUT, **keys):
            (tmp_path / "held_out.jsonl").write_text(
                "".join(json.dumps(line) + "\n" for line in lines)
            )
            recipe = Recipe(
                model=tokenizer_folder,
                steps=1,
                evaluation={"tasks": tmp_path / "held_out.jsonl", **keys},
            )
            harness = Harness(name="h", program="true", headless=[])
            run, url = tmp_path / "run", "http://127.0.0.1:9"
            training = Worker(recipe, harness=harness, engine=url, model=recipe.model, out=run)
            training.runtime = Boxes()
            console = Console(file=StringIO(), width=1000)
            evaluations = Evaluations(recipe, run, console.print)
            evaluations.check(training, training.fit(tasks))
            return evaluations, training, console.file.getvalue()

        return check

    @staticmethod
    def line(name, **keys):
        return {"id": name, "instruction": "go", "evaluate": ["true"], **keys}

    def test_tasks_that_are_trained_too_by_id_or_content_are_named(self, check):
        lines = [
            self.line("x", instruction="else"),
            self.line("other"),
            self.line("new", instruction="new"),
        ]
        _, _, said = check(lines)
        assert (
            said == "warning: 2 tasks of evaluation.tasks, which the training has too: x, other\n"
        )

    @pytest.mark.parametrize(
        ("keys", "sampling"),
        [
            ({}, {"temperature": 0.0}),
            ({"sampling": {}}, {}),
            ({"sampling": {"top_p": 0.9, "seed": 1}}, {"top_p": 0.9, "seed": 1}),
        ],
    )
    def test_the_sampling_of_its_sessions_is_the_keys_of_the_table(self, check, keys, sampling):
        evaluations, _, said = check([self.line("new", instruction="new")], **keys)
        (group,) = evaluations.missing(Version("1a2b3c4d", 0, 0))
        assert (group.evaluates, group.sampling) == (True, sampling)
        assert said == ""

    def test_boxes_of_both_hide_the_runs_and_the_tasks_of_both(self, check, tmp_path):
        for name in ("trained", "held"):
            (tmp_path / name).mkdir()
        trained = Task(id="x", instruction="go", evaluate=["true"], workspace=tmp_path / "trained")
        _, training, _ = check([self.line("new", workspace=str(tmp_path / "held"))], [trained])
        hidden = {text.rstrip("/") for text in training.runtime._hidden}
        private = {f"{tmp_path}/{name}" for name in ("run", "trained", "held", "held_out.jsonl")}
        assert private <= hidden

    def test_tasks_that_cannot_be_run_are_refused(self, check):
        with pytest.raises(InputError, match="image"):
            check([self.line("new", image="some/image")])
