"""Each start of a training gets an attempt of its own."""

import json
import os
import signal

import pytest

from rolltap.addons.errors import InputError, RunError
from rolltap.addons.store import staging
from rolltap.trainer.training.attempt import TRAINING_FILE, Attempt, claimed_attempt

BEGUN = {"kind": "online", "seed": 0}


def start(run, begun=BEGUN) -> Attempt:
    """Start a training that ends at once."""
    with claimed_attempt(run, begun) as attempt:
        return attempt


def test_the_run_keeps_its_name_and_every_start_has_a_number_of_its_own(tmp_path):
    attempts = [start(tmp_path / "run") for _ in range(3)]
    assert [attempt.number for attempt in attempts] == [0, 1, 2]
    assert len({attempt.run for attempt in attempts}) == 1
    assert str(attempts[1].version(7)) == f"{attempts[0].run}.7.1"


def test_two_runs_have_two_names(tmp_path):
    assert start(tmp_path / "a").run != start(tmp_path / "b").run


@pytest.mark.parametrize(("killed_before", "next_number"), [("rename", 1), ("block", 2)])
def test_a_start_that_is_killed_leaves_a_count_that_can_be_read(tmp_path, monkeypatch, killed_before, next_number):
    first = start(tmp_path)
    child = os.fork()
    if child == 0:
        try:
            if killed_before == "rename":
                monkeypatch.setattr(staging.Path, "rename", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            with claimed_attempt(tmp_path, BEGUN):
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert start(tmp_path) == Attempt(first.run, next_number)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"run": "short", "starts": 1}',
        '{"run": "1a2b3c4d", "starts": -1}',
        '{"run": "1a2b3c4d", "starts": 1}',
    ],
)
def test_a_damaged_file_is_not_counted_on(tmp_path, text):
    (tmp_path / TRAINING_FILE).write_text(text)
    with pytest.raises(RunError, match=r"training\.json is damaged .*train into a new folder"):
        start(tmp_path)
    assert (tmp_path / TRAINING_FILE).read_text() == text


def test_the_file_says_what_it_counts(tmp_path):
    attempt = start(tmp_path)
    assert json.loads((tmp_path / TRAINING_FILE).read_text()) == {"run": attempt.run, "starts": 1, "begun": BEGUN}


def test_two_trainings_do_not_run_on_one_folder(tmp_path):
    with claimed_attempt(tmp_path, BEGUN) as attempt:
        for _ in range(2):
            with pytest.raises(RunError, match=r"another training is running on .*: wait until it has ended"):
                start(tmp_path)
    assert start(tmp_path) == Attempt(attempt.run, 1)


def test_a_start_that_would_train_other_steps_is_refused_and_not_counted(tmp_path):
    attempt = start(tmp_path)
    with pytest.raises(InputError, match=r"was begun with other values of seed \(it was 0\): start in another folder"):
        start(tmp_path, {**BEGUN, "seed": 1})
    assert start(tmp_path) == Attempt(attempt.run, 1)


def test_checkpoints_of_an_unknown_training_are_not_gone_on_with(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    with pytest.raises(RunError, match=r"checkpoint-2 exists, but not .*training\.json"):
        start(tmp_path)
