"""The folder of a training: its starts are counted, and its settings may not change."""

import json
import os
import signal
from pathlib import Path

import pytest

from rolltap.addons.errors import InputError, RunError
from rolltap.addons.store import staging
from rolltap.trainer.rollouts.config import Budget
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.sessions import Outcomes
from rolltap.trainer.training.attempt import (
    TRAINING_FILE,
    Attempt,
    claimed_attempt,
    offline_fingerprint,
    online_fingerprint,
    require_same_fingerprint,
    require_shared,
)
from rolltap.trainer.training.recipe import Forks, HeldOut, Machine, Recipe

BEGUN = {"kind": "online", "seed": 0}


def start(run, begun=BEGUN) -> Attempt:
    """Start a training that ends at once."""
    with claimed_attempt(run, begun) as attempt:
        return attempt


def test_the_run_keeps_its_name_and_every_start_has_a_number_of_its_own(tmp_path):
    first, second, third = attempts = [start(tmp_path / "run") for _ in range(3)]
    assert [attempt.number for attempt in attempts] == [0, 1, 2]
    assert first.run == second.run == third.run != start(tmp_path / "other").run
    assert str(second.version(7)) == f"{first.run}.7.1"
    file = json.loads((tmp_path / "run" / TRAINING_FILE).read_text())
    assert file == {"run": first.run, "starts": 3, "begun": BEGUN}


def test_a_machine_that_does_not_see_the_folder_of_an_attempt_is_told_its_path(tmp_path):
    attempt = start(tmp_path / "run")
    require_shared(tmp_path / "run", attempt)
    start(tmp_path / "another")
    for name in ("another", "nothing"):
        with pytest.raises(
            InputError, match=rf"{name} is not that of the first process: all nodes must share it"
        ):
            require_shared(tmp_path / name, attempt)


@pytest.mark.parametrize(("killed_before", "next_number"), [("rename", 1), ("block", 2)])
def test_a_start_that_is_killed_leaves_a_count_that_can_be_read(
    tmp_path, monkeypatch, killed_before, next_number
):
    first = start(tmp_path)
    child = os.fork()
    if child == 0:
        try:
            if killed_before == "rename":
                monkeypatch.setattr(
                    staging.Path, "rename", lambda *_: os.kill(os.getpid(), signal.SIGKILL)
                )
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
        '{"run": "x", "starts": 1}',
        '{"run": "1a2b3c4d", "starts": -1}',
        '{"run": "1a2b3c4d", "starts": 1}',
    ],
)
def test_a_damaged_file_is_not_counted_on(tmp_path, text):
    (tmp_path / TRAINING_FILE).write_text(text)
    with pytest.raises(RunError, match=r"training\.json is damaged .*train into a new folder"):
        start(tmp_path)
    assert (tmp_path / TRAINING_FILE).read_text() == text


def test_two_trainings_do_not_run_on_one_folder(tmp_path):
    with claimed_attempt(tmp_path, BEGUN) as attempt:
        for _ in range(2):
            with pytest.raises(
                RunError, match=r"another training is running on .*: wait until it has ended"
            ):
                start(tmp_path)
    assert start(tmp_path) == Attempt(attempt.run, 1)


def test_a_start_that_would_train_other_steps_is_refused_and_not_counted(tmp_path):
    attempt = start(tmp_path)
    with pytest.raises(
        InputError,
        match=r"was begun with other values of seed \(it was 0\): start in another folder",
    ):
        start(tmp_path, {**BEGUN, "seed": 1})
    assert start(tmp_path) == Attempt(attempt.run, 1)


def test_checkpoints_of_an_unknown_training_are_not_gone_on_with(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    with pytest.raises(RunError, match=r"checkpoint-2 exists, but not .*training\.json"):
        start(tmp_path)


TASK = Task(id="a", instruction="go", evaluate=["true"])
HARNESS = Harness(name="h", program="p", headless=[])


def online(*, tasks=(TASK,), harness=HARNESS, seed=0, **recipe):
    return online_fingerprint(Recipe(**{"model": "m", "steps": 1} | recipe), tasks, harness, seed)


@pytest.mark.parametrize(
    "changed",
    [
        {"concurrency": 1, "recorders": 2, "timeout": 1.0, "save_steps": 2},
        {
            "publish": "lora",
            "publish_folder": Path("/dev/shm"),
            "adapters": 9,
            "max_difference": 1.0,
        },
        {"machine": Machine(processes=2, engines=2)},
        {"evaluation": HeldOut(tasks=Path("held_out.jsonl"))},
        {
            "grpo": {
                "report_to": "wandb",
                "logging_steps": 2,
                "save_total_limit": 9,
                "run_name": "x",
            }
        },
        {"grpo": {"offload_checkpoints": True, "forward": "padded"}},
        {"recorder": {"rolltap_patience": "9"}},
        {
            "retries": 5,
            "give_up_after": 1,
            "tools": (Path("/opt"),),
            "container_arguments": ("--cpus=2",),
        },
    ],
)
def test_how_a_step_is_computed_and_reported_may_change(changed):
    require_same_fingerprint("here", json.loads(json.dumps(online())), online(**changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 1}, r"seed \(it was 0\)"),
        ({"model": Path("n")}, r'model \(it was "m"\)'),
        ({"dtype": "bfloat16"}, r'dtype \(it was "float32"\)'),
        ({"tasks": (TASK.model_copy(update={"instruction": "stop"}),)}, "tasks"),
        ({"tasks": (TASK.model_copy(update={"evaluate": ["false"]}),)}, "tasks"),
        ({"harness": HARNESS.model_copy(update={"env": {"A": "1"}})}, "harness"),
        ({"groups_per_step": 2}, r"groups_per_step \(it was 1\)"),
        ({"sessions": 2}, r"sessions \(it was 8\)"),
        ({"replace_zero_variance": 2}, "replace_zero_variance"),
        ({"max_staleness": 1}, r"max_staleness \(it was not given\)"),
        ({"forks": Forks()}, r"forks\.at \(it was not given\), forks\.from .*, forks\.sessions"),
        ({"strategy": "tree"}, "strategy"),
        ({"roles": ("agent",)}, "roles"),
        ({"max_tokens": 9}, r"max_tokens \(it was null\)"),
        (
            {"recorder": {"rolltap_sampling": "{}"}},
            r"recorder\.rolltap_sampling \(it was not given\)",
        ),
        ({"runtime": "sandbox"}, r'runtime \(it was "process"\)'),
        ({"suspicious": "exclude"}, r'suspicious \(it was "keep"\)'),
        ({"outcomes": Outcomes(timeout=0)}, r'outcomes\.timeout \(it was "judge"\)'),
        ({"budget": Budget(calls=3)}, r"budget\.calls \(it was not given\)"),
        ({"teacher": "big"}, r"teacher \(it was not given\)"),
        ({"lora": {"r": 8}}, r"lora\.r \(it was not given\)"),
        ({"grpo": {"beta": 0.1}, "seed": 2}, r"grpo\.beta \(it was not given\), seed \(it was 0\)"),
    ],
)
def test_what_decides_the_steps_may_not(changed, message):
    values = (
        rf"^here was begun with other values of {message}( \(it was .*\))?: start in another folder"
    )
    with pytest.raises(InputError, match=values):
        require_same_fingerprint("here", json.loads(json.dumps(online())), online(**changed))


@pytest.mark.parametrize(
    "grpo",
    [
        {},
        {"lr_scheduler_type": "cosine"},
        {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.1},
    ],
)
def test_the_number_of_steps_decides_the_learning_rates_and_may_not_change(grpo):
    message = (
        r"other values of steps \(it was 1, and the learning rates .* is constant\): start in"
        r" another folder"
    )
    with pytest.raises(InputError, match=message):
        require_same_fingerprint("here", online(grpo=grpo), online(grpo=grpo, steps=2))


@pytest.mark.parametrize("kind", ["constant", "constant_with_warmup"])
def test_the_number_of_steps_may_change_with_constant_learning_rates(kind):
    grpo = {"lr_scheduler_type": kind, "warmup_steps": 3}
    require_same_fingerprint("here", online(grpo=grpo), online(grpo=grpo, steps=2))


def offline(*rewards):
    group = (0, "a", ("a-0", "a-1"), (), "t", rewards)
    return offline_fingerprint(Recipe(model="m", steps=1), [group], 0)


@pytest.mark.parametrize(
    ("known", "begun", "message"),
    [
        (offline(0.0, 1.0), online(), r'kind \(it was "offline"\)'),
        (online(), offline(0.0, 1.0), r'kind \(it was "online"\)'),
        (offline(0.0, 1.0), offline(0.0, -5.0), "the recorded groups"),
    ],
)
def test_an_offline_training_is_no_online_one_and_none_with_another_reward(known, begun, message):
    with pytest.raises(InputError, match=f"other values of {message}"):
        require_same_fingerprint("here", known, begun)


def test_the_content_of_folders_decides_and_not_their_place(tmp_path):
    for name, text in (("old", "1"), ("moved", "1"), ("changed", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test_a.py").write_text(text)

    def begun(name):
        return online(tasks=[TASK.model_copy(update={"workspace": tmp_path / name})])

    require_same_fingerprint("here", begun("old"), begun("moved"))
    with pytest.raises(InputError, match="other values of tasks"):
        require_same_fingerprint("here", begun("old"), begun("changed"))
