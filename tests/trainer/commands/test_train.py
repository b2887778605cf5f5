import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rolltap.trainer import cli
from tests.trainer.commands.program import rolltap

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
    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "instruction": "go", "evaluate": ["true"]}\n')

    def recipe(text=RECIPE):
        (tmp_path / "r.toml").write_text(text)
        return str(tmp_path / "r.toml")

    return recipe


def train(*arguments):
    return CliRunner().invoke(cli.rolltap, ["train", *arguments])


def test_a_finished_training_is_not_overwritten(tmp_path):
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "r.toml").write_text("")
    ended = rolltap("train", tmp_path / "r.toml", "--out", tmp_path / "run")
    assert ended.returncode == 1
    assert "holds a finished training" in " ".join(ended.stderr.split())


def test_a_dry_run_plans_a_folder_without_weights_and_needs_no_run_folder(recipe):
    planned = train(recipe(), "--dry-run", "--json")
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["can_start"] is True
    assert train(recipe(), "--dry-run").stdout.strip()


def test_a_dry_run_of_what_cannot_work_has_exit_status_1_and_says_what(recipe):
    planned = train(recipe(RECIPE + "bias = 'some'\n"), "--dry-run", "--json")
    assert planned.exit_code == 1
    assert "bias" in planned.stdout


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
