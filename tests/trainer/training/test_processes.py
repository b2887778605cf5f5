"""A training as several processes of `torchrun`: they end together, and leave nothing running."""

import json
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rolltap.addons.errors import InputError
from rolltap.trainer.metrics_file import METRICS, read_metrics
from rolltap.trainer.training.processes import require_machine
from rolltap.trainer.training.recipe import FINISHED, Machine
from tests.trainer.grpo.tiny import largest_difference
from tests.trainer.training.stand_ins import tiny_folder

ROOT = Path(__file__).resolve().parents[3]
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
RECIPE = """
model = "model"
tasks = "tasks.jsonl"
harness = "harness.toml"
steps = 2
groups_per_step = 2
sessions_per_group = 2
[grpo]
learning_rate = 1e-2
gradient_accumulation_steps = 2
"""
LORA = '[lora]\nr = 2\ntarget_modules = "all-linear"\n'
ENGINES = "http://127.0.0.1:9,http://127.0.0.1:10"


class Training:
    """A folder with recipe, model and tasks, and the ways to train by them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tiny_folder(folder / "model")
        tasks = [{"id": name, "instruction": "go", "evaluate": ["true"]} for name in "abc"]
        (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
        (folder / "harness.toml").write_text('name = "h"\nprogram = "true"\nheadless = []\n')
        self.recipe(RECIPE)

    def recipe(self, text: str) -> None:
        (self.folder / "recipe.toml").write_text(text)

    def train(self, *launcher: str, out: str = "run", fault: str = "none", more: tuple[str, ...] = ()) -> str:
        """Train, and return what was printed, with the exit status in its first line. All its processes must end."""
        mark = secrets.token_hex(8)
        command = [sys.executable, *(launcher or ["-m"]), *(["-m"] if launcher else [])]
        command += ["tests.trainer.training.started", str(self.folder), fault]
        command += ["train", str(self.folder / "recipe.toml"), "--out", str(self.folder / out)]
        command += more or ("--engine", ENGINES)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "ROLLTAP_MARK": mark}
        process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150)
        assert running(mark) == []
        return f"{process.returncode}\n{process.stderr}"

    def weights(self, out: str = "run"):
        return load_file(self.folder / out / FINISHED / "model.safetensors")

    def owners(self) -> list[Path]:
        return list(self.folder.glob("engine/*/owner"))


def running(mark: str) -> list[str]:
    """Return the commands of the processes that have a mark in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.fixture
def training(tmp_path):
    return Training(tmp_path)


@pytest.mark.parametrize("lora", [False, True])
def test_two_processes_train_what_one_does(training, lora):
    training.recipe('publish = "lora"\n' + RECIPE + LORA if lora else RECIPE)
    printed = training.train(*TORCHRUN)
    assert printed.startswith("0\n"), printed
    assert printed.count("step 2/2  4 sessions in") == 1
    run, again = training.folder / "run", training.folder / "again"
    shutil.copytree(run, again, ignore=shutil.ignore_patterns("checkpoints", FINISHED, METRICS))
    # the engines' weights differ in rounding, but batches.jsonl says which sessions each step trains
    printed = training.train(out="again")
    assert printed.startswith("0\n"), printed
    assert "step 2/2  4 sessions (4 recorded before)" in printed
    assert largest_difference(training.weights(), training.weights("again")) < 1e-5
    base = load_file(training.folder / "model" / "model.safetensors")
    assert largest_difference(training.weights(), base) > 1e-3
    differences = [line["engine_difference"] for line in read_metrics(run / METRICS)]
    assert len(differences) == 2
    assert max(differences) < 1e-4
    assert training.owners() == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("engine_refuses", "the engine lacks an endpoint"),
        ("second_rollout_fails", "the disk is full"),
        ("publish_is_refused", "the engine at http://127.0.0.1:10 refuses policy-"),
    ],
)
def test_an_error_of_the_first_process_ends_all_and_is_said_once(training, fault, message):
    printed = training.train(*TORCHRUN, fault=fault)
    assert not printed.startswith("0\n")
    said = [line for line in printed.splitlines() if message in line]
    assert len(said) == 1, printed
    assert said[0].startswith("error: ")
    assert training.owners() == []


def test_a_wrong_recipe_is_said_once(training):
    training.recipe(RECIPE.replace("steps = 2", "steps = 0"))
    printed = training.train(*TORCHRUN)
    assert printed.count("error: ") == 1, printed
    assert "'steps' is 0" in printed


@pytest.mark.parametrize("fault", ["second_dies", "first_is_stopped"])
def test_processes_end_when_another_one_is_stopped_and_a_new_start_goes_on(training, fault):
    printed = training.train(*TORCHRUN, fault=fault)
    assert not printed.startswith("0\n")
    assert training.owners() == []
    printed = training.train(*TORCHRUN)
    assert printed.startswith("0\n"), printed
    assert "resuming from" in printed


def test_recorded_runs_are_trained_by_two_processes_as_by_one(training):
    assert training.train().startswith("0\n")
    recorded = ("--from", str(training.folder / "run"))
    assert training.train(*TORCHRUN, out="two", more=recorded).startswith("0\n")
    assert training.train(out="one", more=recorded).startswith("0\n")
    assert largest_difference(training.weights("one"), training.weights("two")) < 1e-5


class TestMachine:
    @pytest.mark.parametrize(
        ("machine", "message"),
        [
            (Machine(processes=4), r"machine\.processes is 4, but .* is 2: start them with `torchrun .* 4 -m rolltap"),
            (Machine(engines=4), r"machine\.engines is 4, but the number of engine URLs is 1: give --engine as many"),
        ],
    )
    def test_other_numbers_than_the_recipes_are_refused(self, monkeypatch, machine, message):
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(InputError, match=message):
            require_machine(machine, 1)

    @pytest.mark.parametrize("machine", [None, Machine(), Machine(processes=2, engines=3), Machine(gpu_gib=80.0)])
    def test_numbers_that_the_recipe_does_not_give_are_free(self, monkeypatch, machine):
        monkeypatch.setenv("WORLD_SIZE", "2")
        require_machine(machine, 3)

    def test_recorded_runs_need_no_engines(self):
        require_machine(Machine(engines=2))
