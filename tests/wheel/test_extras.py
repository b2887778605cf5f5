"""Commands where exactly the packages of some extras are installed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rolltap.trainer.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "tests" / "stored_run"
LEFT_OUT = ("datasets", "pandas", "torch", "transformers", "pyarrow.dataset")
ASK = """
import json, urllib.request
ask = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
url = "https://api.openai.com/v1/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(ask).encode(), {"content-type": "application/json"}))
"""


@pytest.fixture
def run(tmp_path):
    return shutil.copytree(STORED / "run", tmp_path / "run")


def rolltap(environment, *arguments, folder):
    """Run `rolltap` of an environment, and return its exit status and its output."""
    program = ROOT / ".venvs" / environment / "bin" / "rolltap"
    if not program.exists():
        pytest.skip(f"there is no {program}: tests/run.sh installs it")
    command = [str(argument) for argument in (program, *arguments)]
    # with no other environment's mitmdump
    env = {**os.environ, "PATH": f"{program.parent}:{os.defpath}"}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ended = subprocess.run(command, cwd=folder, env=env, **output)
    assert "Traceback" not in ended.stdout
    return ended.returncode, " ".join(ended.stdout.split())


@pytest.mark.parametrize(
    "arguments",
    [
        "--version",
        "-h",
        "inspect run",
        "verify run",
        "traces run --out traces",
        "export run --to parquet --out exported",
        "addon",
    ],
)
def test_the_base_shows_checks_and_exports_runs(arguments, run):
    status, output = rolltap("base", *arguments.split(), folder=run.parent)
    assert (status, "pip install" in output) == (0, False)


MODULES = """
import importlib, sys
from rolltap.trainer.cli.main import COMMANDS
for module, _ in COMMANDS.values():
    importlib.import_module(f"rolltap.trainer.cli.{module}")
print(*sys.modules)
"""


def test_the_help_of_every_command_needs_the_base_alone_and_nothing_that_takes_seconds(tmp_path):
    rolltap("base", "--version", folder=tmp_path)
    python = ROOT / ".venvs" / "base" / "bin" / "python"
    loaded = subprocess.run(
        [python, "-I", "-c", MODULES], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()
    assert {f"rolltap.trainer.cli.{module}" for module, _ in COMMANDS.values()} <= set(loaded)
    assert set(LEFT_OUT).isdisjoint(loaded)


TASKS = str(STORED / "tasks.jsonl")


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        ("record --out new --model m -- true", "record"),
        (f"rollout {TASKS} --harness {STORED}/harness.toml --model m --out new", "record"),
        ("doctor -- true", "record"),
        ("doctor --model m", "record"),
        ("view run", "service"),
        ("fleet status", "ray"),
        ("train recipe.toml --dry-run", "train"),
    ],
)
def test_a_command_whose_extra_is_not_there_names_the_extra_and_the_wheel(arguments, extra, run):
    (run.parent / "recipe.toml").write_text(
        f'model = "."\nsteps = 1\nharness = "pi"\ntasks = "{TASKS}"\n'
    )
    status, output = rolltap("base", *arguments.split(), folder=run.parent)
    assert status == 1
    assert re.search(rf"pip install '\S+\.whl\[{extra}\]'", output), output


def test_a_run_is_viewed_with_the_service_alone(run):
    status, output = rolltap("base-service", "view", "run", "--out", "run.html", folder=run.parent)
    assert (status, (run.parent / "run.html").exists()) == (0, True), output


def test_a_program_is_tried_with_the_recorder_alone(tmp_path):
    status, output = rolltap(
        "base-record", "doctor", "--", sys.executable, "-I", "-c", ASK, folder=tmp_path
    )
    assert status == 3, output
    assert "agent" in output
