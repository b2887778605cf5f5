"""`rolltap train`, `serve` and `engine`."""

import json
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
from tests.trainer.cli.program import ROLLTAP
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
    ("options", "message"),
    [
        ("", "Missing option '--out'"),
        ("--out o --json", "--json prints a plan: add --dry-run"),
        ("--out o --from . --steal", "--from trains without an engine"),
    ],
)
def test_options_that_do_not_go_together_are_refused(recipe, options, message):
    refused = train(recipe(), *options.split())
    assert refused.exit_code == 2
    assert message in refused.output


class TestStart:
    """With stand-ins for engines, harness and recorder."""

    @pytest.fixture
    def training(self, tmp_path):
        return Training(tmp_path)

    @pytest.fixture
    def run_here(self, training, monkeypatch):
        """Return a function that trains in this process, with these options."""

        def run_here(*more, out="run"):
            return training.here(monkeypatch, out, more=more or ENGINES)

        return run_here

    def test_an_engine_of_another_training_is_taken_only_if_asked_for(self, training, run_here):
        assert run_here(out="first").exit_code == 0
        FolderEngine(URLS[1]).register("PUT", owner="deadbeef", about="elsewhere")
        refused = run_here()
        assert isinstance(refused.exception, EngineError)
        owned = f"another training owns the engine at {URLS[1]}: deadbeef (the other training)"
        assert owned in str(refused.exception)
        assert training.owners() == ["deadbeef"]
        ended = run_here(*ENGINES, "--steal")
        assert ended.exit_code == 0, ended.output
        assert training.owners() == []

    def test_its_end_says_what_it_did_where_model_and_plots_are_and_prints_no_table(
        self, training, run_here
    ):
        ended = run_here()
        run = training.folder / "run"
        done = r"\ntrained 2 steps in 0:\d\d:\d\d, reward \d\.\d{3} at first and"
        assert re.search(done, ended.output)
        assert ended.output.splitlines()[-4:] == [
            f"The trained model is in {run / 'model'}.",
            f"This command shows the groups, and the tokens of each step: rolltap inspect {run}",
            "The next command shows the plots.",
            f"next: rolltap view {run}",
        ]
        assert "mean reward" not in ended.output
        phases = {"seconds_rollout", "seconds_publication", "seconds_training"}
        for line in rolltap.read_training(run).metrics:
            assert phases <= line.keys()

    @pytest.mark.parametrize(
        ("recipe", "message"),
        [
            (
                f"{SMALL}[machine]\nprocesses = 2\n",
                r"machine\.processes is 2, but there are 1: .*--nnodes 1 --nproc-per-node 2 ",
            ),
            (
                f"{SMALL}[machine]\nprocesses = 4\nnodes = 2\n",
                r"machine\.nodes is 2, but there are 1: .*--nnodes 2 --nproc-per-node 2 ",
            ),
            (
                SMALL.replace("groups_per_step = 2", "groups_per_step = 4"),
                r"groups_per_step is 4, but .*tasks\.jsonl has 3 tasks",
            ),
        ],
    )
    def test_other_numbers_than_those_of_machine_and_tasks_are_refused_by_start_and_plan(
        self, training, run_here, recipe, message
    ):
        training.recipe(recipe)
        refused = run_here()
        assert isinstance(refused.exception, InputError)
        assert re.search(message, str(refused.exception))
        if "groups_per_step" in message:
            planned = run_here(*ENGINES, "--dry-run")
            assert re.search(message, planned.output)
        elif "processes is 2" in message:
            offline = run_here("--from", str(training.folder))
            assert "machine.processes is 2" in str(offline.exception)
        assert not (training.folder / "run").exists()


@pytest.mark.parametrize("ends", [click.UsageError("no such option"), KeyboardInterrupt()])
@pytest.mark.parametrize(("rank", "says"), [(None, True), ("0", True), ("1", False)])
def test_of_several_processes_the_first_one_alone_says_what_ends_all(
    monkeypatch, capsys, ends, rank, says
):
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


class TestServe:
    @pytest.fixture
    def serve(self, tmp_path, monkeypatch):
        """Return a function that serves by a script in place of vLLM's program. It returns the
        process, and the URL that it has."""
        monkeypatch.delenv("ROLLTAP_ENGINE_KEY_FILE", raising=False)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")

        def serve(script, *options):
            port = str(free_port())
            command = [ROLLTAP, "serve", "a-model", "--vllm", fake_vllm(tmp_path, script)]
            command += ["--port", port, *options]
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            return process, f"http://127.0.0.1:{port}"

        return serve

    def test_it_prints_what_other_commands_need_to_know_of_the_key(self, serve):
        process, url = serve(AS_VLLM, "--lora-rank", "8", "--max-staleness", "3")
        with process:
            assert process.stderr.readline() == f"vLLM serves a-model at {url}\n"
            adapters = "5 adapters in a batch and 11 in memory"
            places = f"It has places for {adapters}, as max_staleness = 3 needs.\n"
            assert process.stderr.readline() == places
            export, _, key_file = process.stderr.readline().strip().partition("=")
            assert export == "export ROLLTAP_ENGINE_KEY_FILE"
            EngineAdmin(url, key_file).require_endpoints()
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
                    "ended by signal 9 (Killed): often the machine's memory was used up",
                ),
                ("kill -11 $$", 139, "ended by signal 11 (Segmentation fault)"),
                ("exit 7", 7, "vLLM ended with status 7"),
            ]
        ),
    )
    def test_it_ends_as_vllm_does_and_says_how(self, serve, tmp_path, end, status, said):
        killed = tmp_path / "killed"
        wait = f"until [ -e {killed} ]; do sleep 0.01; done"
        process, _ = serve(f"{AS_VLLM.removeprefix('exec ')} & {wait}; kill $!; {end}")
        with process:
            process.stderr.readline()
            process.stderr.readline()
            killed.touch()
            assert process.stderr.read().splitlines()[-1].endswith(said)
        assert process.returncode == status


class TestEngine:
    @pytest.fixture
    def engine(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        with acting(tmp_path) as engine:
            engine.version = "1a2b3c4d.3.0"
            engine.adapters["policy-1a2b3c4d.3.0"] = "/1"
            yield engine

    def test_its_status_is_a_line_or_json_and_1_when_it_is_not_healthy(self, engine):
        said = CliRunner().invoke(main.rolltap, ["engine", "status", engine.url])
        assert said.exit_code == 0
        assert said.output == f"{engine_status(EngineAdmin(engine.url))}\n"
        engine.answers["/health"] = (503, "")
        said = CliRunner().invoke(main.rolltap, ["engine", "status", engine.url, "--json"])
        assert said.exit_code == 1
        found = json.loads(said.output)
        assert found["healthy"] is False
        assert found["version"] == "1a2b3c4d.3.0"
        assert found["adapters"] == ["policy-1a2b3c4d.3.0"]
        assert found["owner"] is None

    def test_a_reset_says_what_is_served_after_it(self, engine):
        said = CliRunner().invoke(main.rolltap, ["engine", "reset", engine.url])
        assert said.exit_code == 0, said.output
        served = f"the engine at {engine.url} serves {engine.root}: its base weights; last owned"
        assert said.output.startswith(served)
        assert not engine.adapters
