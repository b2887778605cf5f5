"""The `rolltap` command as a program: its exit status and its imports."""

import os
import subprocess
import sys

import pytest

from rolltap.addons.store.metadata import write_metadata
from tests.trainer.cli.program import rolltap


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "/nowhere"], "/nowhere is not a run folder"),
        (["record", "--out", "x", "--model", "m", "--", "no-such-harness"], "'no-such-harness' is not on the PATH"),
        (
            ["record", "--out", "x", "--model", "m", "--harness", "clod"],
            "no harness is named 'clod': choose",
        ),
        (["env", "--proxy", "127.0.0.1:8080"], "the proxy '127.0.0.1:8080' is not written as http://HOST:PORT"),
        (["env", "--proxy", "http://h:1", "--ca", "none.pem"], "the recorder makes it when it first starts"),
        (
            ["record", "--out", "x", "--model", "m", "--set", "rolltap_samplin={}", "--", "true"],
            "rolltap_samplin is no option of the recorder: did you mean rolltap_sampling?",
        ),
        (["serve", "m", "--vllm", "no-such-vllm"], "'no-such-vllm' is not on the PATH"),
    ],
)
def test_a_users_mistake_is_a_message_and_status_1(arguments, message, tmp_path):
    ended = rolltap(*arguments, cwd=tmp_path)
    assert ended.returncode == 1
    assert message in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


def test_a_wrong_option_is_a_message_and_status_2():
    ended = rolltap("record", "--out", "x", "--model", "m", "--set", "a", "--", "true")
    assert ended.returncode == 2
    assert "Invalid value for '--set': 'a' is not written as NAME=VALUE" in ended.stderr


def test_a_file_that_cannot_be_read_is_a_message_and_status_1(tmp_path):
    write_metadata(tmp_path, {})
    (tmp_path / "calls-0.arrow").mkdir()
    ended = rolltap("inspect", tmp_path)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "calls-0.arrow" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("command", "completed"), [("rolltap ins", "plain,inspect"), ("rolltap record --eng", "plain,--engine")]
)
def test_a_shell_completes_commands_and_options(command, completed):
    words = {"COMP_WORDS": command, "COMP_CWORD": str(command.count(" "))}
    assert completed in rolltap(env={**os.environ, **words, "_ROLLTAP_COMPLETE": "bash_complete"}).stdout.splitlines()


def test_a_misspelt_command_is_answered_with_the_nearest():
    ended = rolltap("inspct")
    assert (ended.returncode, "Did you mean 'inspect'?" in ended.stderr) == (2, True)


def test_the_package_is_the_command_too():
    shown = subprocess.run([sys.executable, "-m", "rolltap", "-h"], capture_output=True, text=True, check=True)
    assert "Usage: python -m rolltap" in shown.stdout


def test_an_unknown_option_is_status_2():
    assert rolltap("inspect", "--nonsense").returncode == 2


def test_without_the_extras_the_commands_for_run_folders_work():
    """The base install has no proxy, no torch and no vLLM."""
    extras = ["aiohttp", "orjson", "mitmproxy", "renderers", "transformers", "torch", "trl", "peft", "matplotlib"]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({extras}))  # importing one of them fails
from rolltap.trainer.cli.main import rolltap
from rolltap.trainer.runs.exports import atif
from rolltap.trainer.runs.exports import hub
from rolltap.trainer.runs.exports import messages
from rolltap.trainer.runs.exports import openenv
from rolltap.trainer.runs.exports import parquet
from rolltap.trainer.runs.exports import trace_dataset
rolltap(["--help"])
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "verify" in shown.stdout


@pytest.mark.parametrize("module", ["cli", "training.recipe", "engine.admin", "grpo"])
def test_modules_that_take_seconds_to_import_are_imported_on_use(module):
    code = f"import sys, rolltap.trainer.{module}; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"rolltap.trainer.{module}" in shown.stdout.split()
    heavy = {"torch", "trl", "peft", "transformers", "datasets", "mitmproxy", "matplotlib"}
    assert heavy.isdisjoint(shown.stdout.split())
