"""Evaluations of a training, with rewards from a table in place of harness and engine."""

import json
from io import StringIO
from unittest.mock import Mock

import pytest
from rich.console import Console

from rolltap import plan_training
from rolltap.addons.engine.policy import PolicyFile
from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.hiding import HidingRuntime
from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.names import Version
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.worker import Worker
from rolltap.trainer.runs.views.report import summarize
from rolltap.trainer.runs.views.training import EVALUATION
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.reader import load_sessions
from rolltap.trainer.training.attempt import TRAINING_FILE
from rolltap.trainer.training.evaluation import MOST_TASKS, Evaluations
from rolltap.trainer.training.plan import plan
from rolltap.trainer.training.recipe import Recipe
from rolltap.trainer.training.report import METRICS, append_metrics, read_metrics
from tests.factories import add_rows, make_session, write_run
from tests.trainer.training.test_online import HELD_OUT, RUN, Loop
from tests.trainer.training.trainings import RECIPE, Training

OF_STEP_0 = [f"evaluation~{task}-{RUN}.0.0-{index}.0" for task in "xy" for index in (0, 1)]


@pytest.fixture
def make_loop(tmp_path):
    """A function: keys of [evaluation], and other keys of the recipe -> a loop."""

    def make_loop(silent="", *, every=1, **settings):
        table = {"tasks": "held_out", "sessions": 2, "every": every}
        return Loop(tmp_path / "run", silent, evaluation=table, **settings)

    return make_loop


def test_the_held_out_tasks_are_run_beside_a_step_with_its_weights_and_nothing_of_them_is_trained(
    make_loop,
):
    loop = make_loop()
    batch = loop.step(0, "ab")
    assert loop.evaluated == OF_STEP_0
    assert list(batch.rewards) == loop.ran
    assert load_sessions(loop.folder).keys() == batch.rewards.keys()
    assert batch.ledger.sampled == 2 * len(loop.ran)
    sessions = load_sessions(loop.folder / EVALUATION)
    assert sessions.keys() == {*OF_STEP_0}
    assert {session.policy_version for session in sessions.values()} == {f"{RUN}.0.0"}
    assert PolicyFile(loop.folder / EVALUATION).read().version == f"{RUN}.0.0"
    assert len(loop.logged) == 1
    expected = {"eval/step": 0.0, "eval/sessions": 4.0, "eval/reward": 0.5}
    assert loop.metrics.items() >= expected.items()
    assert f"evaluated {RUN}.0.0: reward 0.500, pass@1 0.500 (" in loop.printed
    assert "), 4 sessions of 2 held-out tasks\n" in loop.printed


@pytest.mark.parametrize(("iterations", "evaluated"), [(1, {0, 2, 4, 6}), (2, {0, 4})])
def test_steps_of_the_recipe_are_between_evaluations_whatever_the_iterations_of_one(
    make_loop, iterations, evaluated
):
    loop = make_loop(every=2, grpo={"num_iterations": iterations})
    for number in range(0, 8, iterations):
        loop.step(number, "a")
    assert {int(name.split(".")[1]) for name in loop.evaluated} == evaluated
    assert {line["eval/step"] for line in loop.logged} == evaluated


def test_a_step_with_further_groups_is_evaluated_once_also_when_an_evaluation_fails(make_loop):
    loop = make_loop("ax", replace_zero_variance=2)
    loop.lost = {*OF_STEP_0}
    loop.step(0, "a")
    assert len(loop.ran) == 4
    assert loop.evaluated == OF_STEP_0
    assert loop.logged == []
    warning = f"warning: none of the 4 sessions of the evaluation of {RUN}.0.0 has a reward"
    assert warning in loop.printed


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
        Loop(tmp_path / "run").step(0, "a")
        loop = make_loop()
        loop.step(0, "a", attempt=1)
        assert len(loop.evaluated) == 4
        assert loop.ran == []
        assert loop.published == [f"{RUN}.0.1"]

    def test_only_the_missing_sessions_are_run_though_those_of_the_step_have_ended(self, make_loop):
        loop = make_loop()
        loop.step(0, "a")
        loop.forget_batches()
        evaluation = loop.folder / EVALUATION
        lost = load_sessions(evaluation)[OF_STEP_0[3]]
        lost.status, lost.reward, lost.revision = "infrastructure", None, 1
        add_rows(evaluation, lost)
        loop.step(0, "a", attempt=1)
        assert loop.evaluated[4:] == [f"evaluation~y-{RUN}.0.0-1.1"]
        assert loop.ran == []
        assert PolicyFile(evaluation).read().version == f"{RUN}.0.1"

    def test_sessions_of_other_weights_are_run_again_and_do_not_count(self, make_loop):
        loop = make_loop()
        loop.other = dict.fromkeys(OF_STEP_0[2:], "default")
        loop.step(0, "a")
        assert loop.metrics["eval/sessions"] == 2


def test_the_finished_weights_are_evaluated_after_their_publication_whatever_the_step(make_loop):
    loop = make_loop(every=100)
    append_metrics(loop.folder / METRICS, 9, {"reward": 1.0})
    with loop.source(9) as source:
        source.finish(9)
    assert loop.published == [f"{RUN}.9.0"]
    assert loop.evaluated == [name.replace(".0.0-", ".9.0-") for name in OF_STEP_0]
    assert loop.ran == []
    trained, last = read_metrics(loop.folder / METRICS)
    assert "eval/step" not in trained
    assert last.items() >= {"step": 9, "eval/step": 9, "eval/reward": 0.5}.items()
    with loop.source(9, attempt=1) as source:
        source.finish(9)
    assert len(loop.evaluated) == 4
    assert len(read_metrics(loop.folder / METRICS)) == 2


def test_a_training_is_evaluated_before_it_after_its_steps_and_at_its_end(tmp_path, monkeypatch):
    training = Training(tmp_path)
    lines = [json.dumps({"id": name, "instruction": name, "evaluate": ["true"]}) for name in "xa"]
    (tmp_path / "held_out.jsonl").write_text("\n".join(lines))
    recipe = RECIPE.replace("steps = 2", "steps = 3")
    training.recipe(recipe + "[evaluation]\ntasks = 'held_out.jsonl'\nsessions = 1\nevery = 2\n")
    ended = training.here(monkeypatch)
    assert ended.exit_code == 0, ended.output
    assert "warning: 1 task of evaluation.tasks, which the training has too: a\n" in ended.output
    run = tmp_path / "run"
    lines = read_metrics(run / METRICS)
    assert [(line["step"], line.get("eval/step"), "reward" in line) for line in lines] == [
        (1, 0, True),
        (2, None, True),
        (3, None, True),  # its evaluation's sessions were all faults
        (3, 3, False),
    ]
    name = json.loads((run / TRAINING_FILE).read_text())["run"]
    warning = f"warning: none of the 2 sessions of the evaluation of {name}.2.0 has a reward"
    assert warning in ended.output
    steps = [(row.step, row.trained) for row in summarize(run).trained]
    assert steps == [(line["step"], line["tokens_trained"]) for line in lines[:3]]
    found = set()
    for session in load_sessions(run / EVALUATION).values():
        found.add((session.policy_version.removeprefix(f"{name}."), session.task_id))
    assert found == {(f"{step}.0", task) for step in (0, 2, 3) for task in "ax"}
    assert "x" not in {session.task_id for session in load_sessions(run).values()}


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

        def metrics_of(rewards, step=3):
            rows = []
            for task in rewards:
                group = f"evaluation~{task}-{RUN}.3.0"
                labels = {"group_id": group, "task_id": task, "harness": "my own"}
                for index, reward in enumerate(rewards[task]):
                    session = make_session(
                        f"{group}-{index}.0",
                        "failed" if reward is None else "completed",
                        reward=reward,
                        policy_version=f"{RUN}.3.0",
                        **labels,
                    )
                    rows.append(session)
            write_run(tmp_path / EVALUATION, *rows)
            recipe = Recipe(model="m", steps=9, evaluation={"tasks": "t", "sessions": 4})
            evaluations = Evaluations(recipe, tmp_path, str)
            evaluations.tasks = [
                Task(id=name, instruction="go", evaluate=["true"]) for name in rewards
            ]
            return evaluations.metrics(Version(RUN, step, 0))

        return metrics_of

    def test_each_task_has_the_same_weight_and_sessions_without_a_reward_do_not_count(
        self, metrics_of
    ):
        metrics = metrics_of({"x": [1.0, None, None], "y": [0.0, 0.0, 1.0, 0.5], "z": [None]})
        expected = {
            "eval/sessions": 5,
            "eval/reward": 0.6875,
            "eval/reward/task/x": 1.0,
            "eval/reward/task/y": 0.375,
            "eval/reward/harness/my%20own": 0.6875,
        }
        assert metrics.items() >= expected.items()
        assert "eval/reward/task/z" not in metrics

    def test_passes_have_intervals_up_to_the_sessions_that_every_task_has(self, metrics_of):
        metrics = metrics_of({"x": [1.0, 1.0], "y": [0.0, 1.0]})
        expected = {"eval/pass@1": 0.75, "eval/pass@2": 1.0, "eval/pass^2": 0.5}
        assert metrics.items() >= expected.items()
        assert 0 < metrics["eval/pass^2_low"] < 0.5 < metrics["eval/pass^2_high"] < 1
        assert "eval/pass@4" not in metrics

    @pytest.mark.parametrize(("tasks", "each"), [(MOST_TASKS, True), (MOST_TASKS + 1, False)])
    def test_many_tasks_have_no_metric_each(self, metrics_of, tasks, each):
        metrics = metrics_of({f"task-{number}": [1.0] for number in range(tasks)})
        assert ("eval/reward/task/task-0" in metrics) == each

    def test_other_weights_have_none(self, metrics_of):
        assert metrics_of({"x": [1.0]}, step=4) == {}


class Boxes(HidingRuntime, ProcessRuntime):
    """Hides what a sandbox hides, and needs none."""


class TestCheck:
    @pytest.fixture
    def check(self, tmp_path, tokenizer_folder):
        """A function: held-out tasks, and keys -> the evaluations, the training's worker and the
        text."""

        def check(*held_out, tasks=HELD_OUT, **keys):
            path = tmp_path / "held_out.jsonl"
            lines = []
            for name, fields in held_out:
                task = {"id": name, "instruction": "go", "evaluate": ["true"], **fields}
                lines.append(json.dumps(task) + "\n")
            path.write_text("".join(lines))
            table = {"tasks": path, **keys}
            recipe = Recipe(model=tokenizer_folder, steps=1, evaluation=table)
            harness = Harness(name="h", program="true", headless=[])
            run = tmp_path / "run"
            url = "http://127.0.0.1:9"
            training = Worker(recipe, harness=harness, engine=url, model=recipe.model, out=run)
            training.runtime = Boxes()
            console = Console(file=StringIO(), width=1000)
            evaluations = Evaluations(recipe, run, console.print)
            evaluations.check(training, training.fit(tasks))
            return evaluations, training, console.file.getvalue()

        return check

    def test_tasks_that_are_trained_too_by_id_or_content_are_named(self, check):
        same_id = ("x", {"instruction": "else"})
        same_content = ("other", {})
        _, _, said = check(same_id, same_content, ("new", {"instruction": "new"}))
        assert said == (
            "warning: 2 tasks of evaluation.tasks, which the training has too: x, other\n"
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
        evaluations, _, said = check(("new", {"instruction": "new"}), **keys)
        (group,) = evaluations.missing(Version(RUN, 0, 0))
        assert group.evaluates
        assert group.sampling == sampling
        assert said == ""

    def test_boxes_of_both_hide_the_runs_and_the_tasks_of_both(self, check, tmp_path):
        for name in ("trained", "held"):
            (tmp_path / name).mkdir()
        trained = Task(id="x", instruction="go", evaluate=["true"], workspace=tmp_path / "trained")
        held = ("new", {"workspace": str(tmp_path / "held")})
        _, training, _ = check(held, tasks=[trained])
        hidden = {text.rstrip("/") for text in training.runtime._hidden}
        private = {f"{tmp_path}/{name}" for name in ("run", "trained", "held", "held_out.jsonl")}
        assert private <= hidden

    def test_tasks_that_cannot_be_run_are_refused(self, check):
        with pytest.raises(InputError, match="image"):
            check(("new", {"image": "some/image"}))
