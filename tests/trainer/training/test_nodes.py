"""A training on several nodes, each with a launcher of its own; here all are on one machine."""

import json
import os
import secrets
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.trainer.training.test_offline import write_run
from tests.trainer.training.trainings import RECIPE, Training, apart, running


def recorded_training(folder):
    """Return a folder to train in, and the options that train on its recorded run."""
    training = Training(folder)
    recorded = write_run(folder / "recorded", folder / "model", {"a": [0.0, 1.0], "b": [1.0, 0.5]})
    return training, ("--from", str(recorded))


@pytest.fixture
def recorded(tmp_path):
    return recorded_training(tmp_path)


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    """Return a folder to train in, and the report of `nodes`, whose processes have all ended."""
    training, _ = recorded_training(tmp_path_factory.mktemp("nodes"))
    mark = secrets.token_hex(8)
    command = [sys.executable, "-m", "tests.trainer.training.nodes", training.folder]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "ROLLTAP_MARK": mark},
        capture_output=True,
        text=True,
        check=True,
    )
    assert running(mark) == []
    return training, json.loads(ended.stdout)


def test_both_go_on_after_one_was_killed_and_train_what_one_process_does(forked):
    training, report = forked
    (first, said), (second, _) = report["killed"]
    assert (first, second) == (1, -9)
    assert said.count("error: another training process ended") == 1
    (first, said), (second, _) = report["resumed"]
    assert (first, second, report["alone"]) == (0, 0, 0)
    assert "resuming from" in said
    assert "step 1/2" not in said
    base = training.base()
    assert apart(training.weights("alone"), training.weights(), base) < 0.01


def test_an_error_of_the_main_process_ends_all_and_is_printed_once(forked):
    training, report = forked
    (first, said), (second, _) = report["refused"]
    assert (first, second) == (1, 1)
    message = "the engine at http://127.0.0.1:10 refuses policy-"
    assert [line.partition(": ")[0] for line in said.splitlines() if message in line] == ["error"]
    assert training.owners() == []


@pytest.mark.deep  # short, the launchers and their processes are forked, in the test above
def test_torchrun_starts_both_and_none_is_left_when_one_launcher_is_killed(recorded):
    training, more = recorded
    first, second = training.on_two_nodes(fault="second_launcher_is_killed", more=more)
    assert (first[0], second[:2]) == ("1", "-9")
    first, second = training.on_two_nodes(more=more)
    assert (first[0], second[0]) == ("0", "0")
    assert "resuming from" in first


@pytest.mark.deep
def test_a_node_needs_no_recipe_and_no_recorded_run_but_the_run_folder(recorded):
    training, more = recorded
    first, second = training.on_two_nodes(more=more, second=training.folder / "elsewhere")
    why = f"{training.folder / 'elsewhere' / 'run'} is not that of the first process"
    assert (first[0], second[0]) == ("1", "1")
    assert f"error: process 1 on {os.uname().nodename} failed: InputError: {why}" in first
    assert f"error: {why}" in second


@pytest.mark.deep
def test_a_wrong_recipe_is_said_on_the_first_node_alone(recorded):
    training, more = recorded
    training.recipe(RECIPE.replace("steps = 2", "steps = 0"))
    first, second = training.on_two_nodes(more=more)
    assert (first[0], second[0]) == ("1", "1")
    assert (first.count("error: "), second.count("error: ")) == (1, 0)
