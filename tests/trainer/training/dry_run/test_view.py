"""A plan as `rolltap train --dry-run` prints it."""

import shlex

import pytest
from click.testing import CliRunner

from rolltap.trainer.cli.train import train_command
from tests.trainer.training.grpo.tiny_models import FAMILIES

RECIPE = """
model = "a model with a long name that has spaces"
tasks = "tasks.jsonl"
harness = "pi"
steps = 10
max_tokens = 1000
publish = "lora"

[lora]
r = 4
target_modules = "all-linear"

[machine]
engines = 4
processes = 4
gpu_gib = 80
"""


def dry_run(recipe, *arguments, columns):
    environment = {"COLUMNS": columns, "ROLLTAP_ENGINE": None}
    return CliRunner().invoke(train_command, [str(recipe), "--dry-run", *arguments], env=environment)


@pytest.fixture
def recipe(tmp_path):
    """The path of a recipe for eight GPUs."""
    FAMILIES["qwen3"][1].save_pretrained(tmp_path / "a model with a long name that has spaces")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path / "recipe.toml"


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.parametrize("columns", ["80", "20", None], ids=["terminal", "narrow", "pipe"])
def test_commands_are_printed_whole(recipe, columns):
    printed = dry_run(recipe, columns=columns)
    assert printed.exit_code == 0, printed.output
    joined = printed.stdout.replace("\\\n", " ").splitlines()
    served = [shlex.split(line) for line in joined if "rolltap serve" in line]
    assert [words[3] for words in served] == [str(recipe.parent / "a model with a long name that has spaces")] * 4
    assert all(words[-2:] == ["--dtype", "bfloat16"] for words in served)
    trained = shlex.split(next(line for line in joined if "torchrun" in line))
    urls = ",".join(f"http://127.0.0.1:{8000 + i}" for i in range(4))
    assert urls in trained
    assert trained[-2] == "--out"


def test_lines_end_without_spaces_and_what_can_be_broken_fits_a_terminal(recipe):
    lines = dry_run(recipe, columns="80").stdout.splitlines()
    assert all(len(line) <= 80 for line in lines if line.endswith("\\") and " --" in line)
    commands = lines[lines.index("To start") + 1 : lines.index("", lines.index("To start"))]
    assert commands == [line.rstrip() for line in commands]
