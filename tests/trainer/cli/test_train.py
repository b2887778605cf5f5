"""`rolltap train` and `rolltap serve`."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import rolltap
from rolltap.addons.errors import EngineError, InputError
from rolltap.trainer.cli import main
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.status import engine_status
from tests.conftest import ROOT, free_port
from tests.deep import cases
from tests.trainer.cli.program import ROLLTAP, run_rolltap
from tests.trainer.engine.acting import acting
from tests.trainer.engine.answering import AS_VLLM
from tests.trainer.engine.test_serve import fake_vllm
from tests.trainer.training.stand_ins import FolderEngine
from tests.trainer.training.trainings import ENGINES, URLS, Training
from tests.trainer.training.trainings import RECIPE as SMALL

MODELS = Path(__file__).resolve().parents[2] / "models"
RECIPE = f"""
model = "{MODELS / "qwen3-4b"}"
tasks = "tasks.jsonl"
harness = "codex"
steps = 3
publish = "lora"
[machine]
gpu_gib = 80.0
[lora]
r = 8
target_modules = "all-linear"
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "tasks.jsonl").write_text(
        '{"id": "a", "instruction": "go", "evaluate": ["true"]}\n'
    )

    def recipe(text=RECIPE):
        (tmp_path / "r.toml").write_text(text)
        return str(tmp_path / "r.toml")

    return recipe


def train(*arguments):
    return CliRunner().invoke(main.rolltap, ["train", *arguments])


def test_a_dry_run_plans_a_folder_without_weights_and_has_status_1_for_what_cannot_work(recipe):
    planned = train(recipe(), "--dry-run", "--json")
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["can_start"] is True
    planned = train(recipe(RECIPE + "bias = 'some'\n"), "--dry-run")
    assert planned.exit_code == 1
    assert "bias" in planned.stdout


@pytest.mark.parametrize("package", cases(["torch", "accelerate"]))
def test_without_a_package_of_the_trainer_it_says_what_to_install(recipe, package):
    script = (
        f"import sys; sys.modules[{package!r}] = None; from rolltap.trainer.cli.main import main;"
        " main()"
    )
    program = [sys.executable, "-c", script, "train", recipe(), "--dry-run"]
    ended = subprocess.run(program, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "error: the trainer is not installed" in ended.stderr
    assert f"pip install -e '{ROOT}[train]'" in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing option '--out'"),
        (("--out", "o", "--json"), "--json prints a plan: add --dry-run"),
        (("--out", "o", "--from", ".", "--steal"), "--from trains without an engine"),
    ],
)
def test_options_that_do_not_go_together_are_refused(recipe, arguments, message):
    refused = train(recipe(), *arguments)
    assert refused.exit_code == 2
    assert message in refused.output


class TestStart:
    """With stand-ins for engines, harness and recorder."""

    @pytest.fixture
    def training(self, tmp_path):
        return Training(tmp_path)

    def test_an_engine_of_another_training_is_taken_only_if_asked_for(self, training, monkeypatch):
        assert training.here(monkeypatch, "first").exit_code == 0
        FolderEngine(URLS[1]).register("PUT", owner="deadbeef", about="elsewhere")
        refused = training.here(monkeypatch)
        assert isinstance(refused.exception, EngineError)
        assert (
            f"another training owns the engine at {URLS[1]}: deadbeef (the other training)"
            in str(refused.exception)
        )
        assert training.owners() == ["deadbeef"]
        ended = training.here(monkeypatch, more=(*ENGINES, "--steal"))
        assert ended.exit_code == 0, ended.output
        assert training.owners() == []

    def test_its_end_says_what_it_did_where_model_and_plots_are_and_prints_no_table(
        self, training, monkeypatch
    ):
        ended = training.here(monkeypatch)
        run = training.folder / "run"
        assert re.search(
            r"\ntrained 2 steps in 0:\d\d:\d\d, reward \d\.\d{3} at first and", ended.output
        )
        last = [
            f"The trained model is in {run / 'model'}.",
            f"This command shows the groups, and the tokens of each step: rolltap inspect {run}",
            "The next command shows the plots.",
            f"next: rolltap view {run}",
        ]
        assert ended.output.splitlines()[-4:] == last
        assert "mean reward" not in ended.output
        lines = rolltap.read_training(run).metrics
        assert all(
            {"seconds_rollout", "seconds_publication", "seconds_training"} <= line.keys()
            for line in lines
        )

    def test_other_numbers_than_those_of_the_table_machine_are_refused(self, training, monkeypatch):
        for table, message in [
            (
                "processes = 2",
                r"machine\.processes is 2, but there are 1: .*--nnodes 1 --nproc-per-node 2 ",
            ),
            (
                "processes = 4\nnodes = 2",
                r"machine\.nodes is 2, but there are 1: .*--nnodes 2 --nproc-per-node 2 ",
            ),
            (
                "processes = 3\nnodes = 2",
                r"processes = 3 is no multiple of nodes = 2: change \[machine\]",
            ),
            ("engines = 3", r"machine\.engines is 3, but there are 2: give --engine as many URLs"),
        ]:
            training.recipe(f"{SMALL}[machine]\n{table}\n")
            refused = training.here(monkeypatch)
            with pytest.raises(InputError, match=message):
                raise refused.exception
        training.recipe(f"{SMALL}[machine]\nprocesses = 2\n")
        refused = training.here(monkeypatch, more=("--from", str(training.folder)))
        with pytest.raises(InputError, match=r"machine\.processes is 2"):
            raise refused.exception
        assert not (training.folder / "run").exists()

    def test_a_step_of_more_groups_than_there_are_tasks_is_refused_by_start_and_plan(
        self, training, monkeypatch
    ):
        training.recipe(SMALL.replace("groups_per_step = 2", "groups_per_step = 4"))
        message = r"groups_per_step is 4, but .*tasks\.jsonl has 3 tasks"
        refused = training.here(monkeypatch)
        with pytest.raises(InputError, match=message):
            raise refused.exception
        assert re.search(message, training.here(monkeypatch, more=(*ENGINES, "--dry-run")).output)


class TestSeveralProcesses:
    @pytest.mark.parametrize("ends", [click.UsageError("no such option"), KeyboardInterrupt()])
    @pytest.mark.parametrize(("rank", "says"), [(None, True), ("0", True), ("1", False)])
    def test_the_first_one_alone_says_what_ends_all(self, monkeypatch, capsys, ends, rank, says):
        @click.command
        def command():
            raise ends

        if rank is not None:
            monkeypatch.setenv("WORLD_SIZE", "2")
            monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr("sys.argv", ["rolltap"])
        monkeypatch.setattr("signal.signal", lambda *_: None)
        with pytest.raises(SystemExit) as ended:
            main.run(command)
        assert ended.value.code in (2, 130)
        assert bool(capsys.readouterr().err.strip()) == says


def test_serve_prints_what_other_commands_need_to_know_of_the_key(tmp_path, monkeypatch):
    monkeypatch.delenv("ROLLTAP_ENGINE_KEY_FILE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    port = free_port()
    command = [
        ROLLTAP,
        "serve",
        "a-model",
        "--vllm",
        fake_vllm(tmp_path, AS_VLLM),
        "--port",
        str(port),
    ]
    command += ["--lora-rank", "8", "--max-staleness", "3"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline() == f"vLLM serves a-model at http://127.0.0.1:{port}\n"
        adapters = "5 adapters in a batch and 11 in memory"
        places = f"It has places for {adapters}, as max_staleness = 3 needs.\n"
        assert process.stderr.readline() == places
        (key_file,) = re.fullmatch(
            r"export ROLLTAP_ENGINE_KEY_FILE=(\S+)\n", process.stderr.readline()
        ).groups()
        EngineAdmin(f"http://127.0.0.1:{port}", key_file).require_endpoints()
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
    assert not Path(key_file).exists()


@pytest.mark.parametrize(
    ("end", "status", "said"),
    cases(
        [
            (
                "kill -9 $$",
                137,
                "vLLM was ended by signal 9 (Killed): often the machine's memory was used up",
            ),
            ("kill -11 $$", 139, "vLLM was ended by signal 11 (Segmentation fault)"),
            ("exit 7", 7, "vLLM ended with status 7"),
        ]
    ),
)
def test_serve_ends_as_vllm_does_and_says_how(tmp_path, monkeypatch, end, status, said):
    monkeypatch.delenv("ROLLTAP_ENGINE_KEY_FILE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    port, killed = free_port(), tmp_path / "killed"
    script = f"""{AS_VLLM.removeprefix("exec ")} & until [ -e {killed} ]; do sleep 0.01; done; kill $!; {end}"""
    command = [
        ROLLTAP,
        "serve",
        "a-model",
        "--vllm",
        fake_vllm(tmp_path, script),
        "--port",
        str(port),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        process.stderr.readline(), process.stderr.readline()
        killed.touch()
        assert process.stderr.read().splitlines()[-1] == said
    assert process.returncode == status


class TestEngine:
    @pytest.fixture
    def engine(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        with acting(tmp_path) as engine:
            engine.version, engine.adapters["policy-1a2b3c4d.3.0"] = "1a2b3c4d.3.0", "/1"
            yield engine

    def test_its_status_is_a_line_or_json_and_1_when_it_is_not_healthy(self, engine):
        said = CliRunner().invoke(main.rolltap, ["engine", "status", engine.url])
        assert (said.exit_code, said.output) == (0, f"{engine_status(EngineAdmin(engine.url))}\n")
        engine.answers["/health"] = (503, "")
        said = CliRunner().invoke(main.rolltap, ["engine", "status", engine.url, "--json"])
        assert said.exit_code == 1
        found = {
            "healthy": False,
            "version": "1a2b3c4d.3.0",
            "adapters": ["policy-1a2b3c4d.3.0"],
            "owner": None,
        }
        assert json.loads(said.output).items() >= found.items()

    def test_a_reset_says_what_is_served_after_it(self, engine):
        said = CliRunner().invoke(main.rolltap, ["engine", "reset", engine.url])
        assert said.exit_code == 0, said.output
        assert said.output.startswith(
            f"the engine at {engine.url} serves {engine.root}: its base weights; last owned"
        )
        assert not engine.adapters


def test_the_key_file_is_given_as_an_option(scripted_engine, tokenizer_folder, tmp_path):
    scripted_engine.key = "k" * 40
    (tmp_path / "engine.key").write_text(scripted_engine.key)
    ask = (
        'import httpx; print(httpx.get("https://api.openai.com/v1/models").json()["data"][0]["id"])'
    )
    options = [
        "--out",
        tmp_path / "run",
        "--engine",
        scripted_engine.url,
        "--model",
        tokenizer_folder,
    ]
    options += ["--engine-key-file", tmp_path / "engine.key", "--", sys.executable, "-c", ask]
    env = {name: value for name, value in os.environ.items() if name != "ROLLTAP_ENGINE_KEY_FILE"}
    ended = run_rolltap("record", *options, env=env)
    assert ended.stdout == "scripted\n", ended.stderr
