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
    run = training.folder / "run"
    again = training.folder / "again"
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
    lines = [line for line in read_metrics(run / METRICS) if "engine_difference" in line]
    assert lines
    assert max(line["engine_difference"] for line in lines) < 1e-4
    assert training.owners() == []


@pytest.mark.deep  # short, test_nodes.py has an error of one process and the end of the other
def test_processes_end_when_the_first_is_stopped_and_a_new_start_goes_on(training):
    assert not training.in_two(fault="first_is_stopped").startswith("0\n")
    assert training.owners() == []
    ended = training.in_two()
    assert ended.startswith("0\n"), ended
    assert "resuming from" in ended


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
