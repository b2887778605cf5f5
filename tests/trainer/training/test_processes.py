"""A training as several processes of `torchrun`: they end together, and leave nothing running."""

import shutil

import pytest

from rolltap.trainer.training.recipe import FINISHED
from rolltap.trainer.training.report import METRICS, read_metrics
from tests.trainer.training.step.tiny import largest_difference
from tests.trainer.training.trainings import LORA, RECIPE, Training, apart


@pytest.fixture
def training(tmp_path):
    return Training(tmp_path)


@pytest.mark.deep  # short, test_nodes.py has two processes that go on after one was killed
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_two_processes_go_on_after_one_died_and_train_what_one_does(
    training, monkeypatch, sharding
):
    training.recipe(f'{RECIPE}sharding = "{sharding}"\n')
    died = training.in_two(fault="second_dies")
    assert not died.startswith("0\n")
    assert training.owners() == []
    printed = training.in_two()
    assert printed.startswith("0\n"), printed
    assert "resuming from" in printed
    assert printed.count("step 2/2  4 sessions ") == 1
    run, again = training.folder / "run", training.folder / "again"
    shutil.copytree(run, again, ignore=shutil.ignore_patterns("checkpoints", FINISHED, METRICS))
    # the engines' weights differ in rounding, but batches.jsonl says which sessions each step
    # trains
    ended = training.here(monkeypatch, "again")
    assert ended.exit_code == 0, ended.output
    assert "step 2/2  4 sessions (4 recorded before)" in ended.output
    base = training.base()
    assert apart(training.weights(), training.weights("again"), base) < 0.01
    assert largest_difference(training.weights(), base) > 1e-3
    # a step whose batch was on the disk when the process died publishes nothing
    differences = [
        line["engine_difference"]
        for line in read_metrics(run / METRICS)
        if "engine_difference" in line
    ]
    assert differences
    assert max(differences) < 1e-4
    assert training.owners() == []


@pytest.mark.deep  # short, the processes of two launchers, in test_nodes.py
def test_an_error_of_the_main_process_ends_all_and_is_printed_once(training):
    printed = training.in_two(fault="publish_is_refused")
    assert not printed.startswith("0\n")
    message = "the engine at http://127.0.0.1:10 refuses policy-"
    lines = [line for line in printed.splitlines() if message in line]
    assert [line.partition(": ")[0] for line in lines] == ["error"]
    assert training.owners() == []


@pytest.mark.deep  # the short suite has an error and the end of the other process, above
def test_processes_end_when_the_first_is_stopped_and_a_new_start_goes_on(training):
    assert not training.in_two(fault="first_is_stopped").startswith("0\n")
    assert training.owners() == []
    ended = training.in_two()
    assert ended.startswith("0\n"), ended
    assert "resuming from" in ended


@pytest.mark.deep  # as an error in the middle, above
def test_a_wrong_recipe_is_refused_once(training):
    training.recipe(RECIPE.replace("steps = 2", "steps = 0"))
    printed = training.in_two()
    assert printed.count("error: ") == 1, printed
    assert "'steps' is 0" in printed


# step/test_checkpoint.py trains an adapter on two ranks, test_offline.py recorded runs on one
@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_is_trained_on_recorded_runs_by_two_processes_as_by_one(training, monkeypatch):
    training.recipe('publish = "lora"\n' + RECIPE + LORA)
    assert training.here(monkeypatch).exit_code == 0
    recorded = ("--from", str(training.folder / "run"))
    assert training.in_two("two", more=recorded).startswith("0\n")
    assert training.here(monkeypatch, "one", more=recorded).exit_code == 0
    base = training.base()
    assert apart(training.weights("one"), training.weights("two"), base) < 0.01
