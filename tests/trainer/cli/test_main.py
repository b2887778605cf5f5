"""The command line as a whole: help, examples and exit status."""

import json
import os
import re
import shlex
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from rolltap.addons.store.metadata import write_metadata
from rolltap.trainer.cli.main import COMMANDS, load, rolltap
from tests.trainer.cli.program import run_rolltap


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["record", "--out", "x", "--model", "m", "--", "no-such-harness"],
            "'no-such-harness' is not on the PATH",
        ),
        (
            ["record", "--out", "x", "--model", "m", "--harness", "clod"],
            "no harness is named 'clod': choose",
        ),
        (
            ["env", "--proxy", "127.0.0.1:8080"],
            "the proxy '127.0.0.1:8080' is not written as http://HOST:PORT",
        ),
        (
            ["env", "--proxy", "http://h:1", "--ca", "none.pem"],
            "the recorder makes it when it first starts",
        ),
        (
            ["record", "--out", "x", "--model", "m", "--set", "rolltap_samplin={}", "--", "true"],
            "rolltap_samplin is no option of the recorder: did you mean rolltap_sampling?",
        ),
        (["serve", "m", "--vllm", "no-such-vllm"], "'no-such-vllm' is not on the PATH"),
    ],
)
def test_a_users_mistake_is_a_message_and_status_1(arguments, message, tmp_path):
    ended = run_rolltap(*arguments, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert message in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "--engine", "http://127.0.0.1:9"],
        ["export", "--to", "messages", "--out", "out"],
        ["inspect"],
        ["score", "--engine", "http://127.0.0.1:9", "--as", "teacher"],
        ["traces"],
        ["verify"],
        ["view"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_run_folder_that_is_not_there_has_one_message_in_all_commands(arguments):
    ended = CliRunner().invoke(rolltap, [*arguments, "/nowhere"])
    assert ended.exit_code == 2
    assert "Directory '/nowhere' does not exist." in ended.output


def test_a_session_is_compared_by_the_same_options_when_it_is_recorded_and_when_it_is_rewarded():
    options = []
    for name in ("record", "reward"):
        parameters = load(name).to_info_dict(click.Context(load(name)))["params"]
        options.append([each for each in parameters if each["name"] in ("task", "group")])
    assert options[0] == options[1] != []


def test_a_table_that_is_no_file_is_a_warning_which_names_it_and_damage(tmp_path):
    (tmp_path / "calls-0.arrow").mkdir()
    write_metadata(tmp_path, {})
    read = run_rolltap("inspect", tmp_path)
    assert (read.returncode, "calls-0.arrow" in read.stderr) == (0, True)
    checked = run_rolltap("verify", tmp_path)
    assert (checked.returncode, "damage: calls-0.arrow" in checked.stdout) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["record", "--out", "x", "--model", "m", "--set", "a", "--", "true"],
            "'a' is not written as NAME=VALUE",
        ),
        (["record", "--out", "x", "--model", "m"], "give a COMMAND after --, or --harness"),
        (
            ["rollout", "--max-calls", "0"],
            "Invalid value for '--max-calls': 0 is not in the range x>=1",
        ),
        (["inspekt"], "Did you mean 'inspect'?"),
    ],
)
def test_a_wrong_command_line_is_a_message_and_status_2(arguments, message):
    result = CliRunner().invoke(rolltap, arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("command", "completed"), [("ins", "inspect"), ("record --eng", "--engine")]
)
def test_a_shell_completes_commands_and_options(command, completed):
    words = {"COMP_WORDS": f"rolltap {command}", "COMP_CWORD": str(command.count(" ") + 1)}
    ended = run_rolltap(env={**os.environ, **words, "_ROLLTAP_COMPLETE": "bash_complete"})
    assert f"plain,{completed}" in ended.stdout.splitlines()


def test_the_package_is_the_command_too():
    shown = subprocess.run(
        [sys.executable, "-m", "rolltap", "-h"], capture_output=True, text=True, check=True
    )
    assert "Usage: python -m rolltap" in shown.stdout


def test_without_the_extras_the_commands_for_run_folders_work():
    """The base install has no proxy, no torch and no vLLM."""
    extras = ["aiohttp", "orjson", "mitmproxy", "renderers", "transformers", "torch", "trl", "peft"]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({extras}))  # importing one of them fails
from rolltap.trainer.cli.main import COMMANDS, load, rolltap
from rolltap.trainer.runs.exports import atif, hub, messages, parquet
rolltap(["--help"])
"""
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "verify" in shown.stdout


@pytest.mark.parametrize("module", ["cli.main", "training.recipe", "engine.admin", "training.step"])
def test_modules_that_take_seconds_to_import_are_imported_on_use(module):
    code = f"import sys, rolltap.trainer.{module}; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"rolltap.trainer.{module}" in shown.stdout.split()
    heavy = {"torch", "trl", "peft", "transformers", "datasets", "mitmproxy"}
    assert heavy.isdisjoint(shown.stdout.split())


NAMES = sorted(COMMANDS)


@pytest.fixture
def there(tmp_path, monkeypatch):
    """Go to a folder that has what the examples name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROLLTAP_ENGINE_KEY_FILE", raising=False)
    for folder in ("first", "second", "damaged"):
        (tmp_path / "runs" / folder).mkdir(parents=True)
    for file in ("tasks.jsonl", "calls.jsonl", "recipe.toml"):
        (tmp_path / file).touch()


HELPS = """
import json, sys
from click.testing import CliRunner
from rolltap.trainer.cli.main import COMMANDS, load, rolltap
runner = CliRunner(env={"COLUMNS": "80"})
lines = [f"{name} {option}".strip() for name in ("", *COMMANDS) for option in ("-h", "--help")]
json.dump({line: runner.invoke(rolltap, line).output for line in lines}, sys.stdout)
"""
"""In a process of its own: a command that was once called by itself keeps that call's name of the
help option."""


@pytest.fixture(scope="module")
def helps():
    """Return the help of each command, by what asks for it."""
    return json.loads(
        subprocess.run([sys.executable, "-c", HELPS], capture_output=True, check=True).stdout
    )


def examples(command):
    """Return the arguments of each call of `command` in the examples of its help."""
    lines = (load(command).epilog or "").replace("\\\n", " ")
    calls = re.findall(rf"\brolltap ({command}\b[^|>)\n]*)", lines)
    return [shlex.split(call)[1:] for call in calls]


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_examples_that_it_accepts(name, there):
    assert examples(name)
    for arguments in examples(name):
        load(name).make_context(name, arguments).close()


@pytest.mark.parametrize("name", ["", *NAMES])
def test_h_is_help_and_shows_the_examples_as_they_are_written_on_a_terminal_of_80_columns(
    name, helps
):
    shown = helps[f"{name} -h".strip()]
    assert shown.startswith("Usage: rolltap")
    assert shown == helps[f"{name} --help".strip()]
    epilog = load(name).epilog.removeprefix("\b\n") if name else ""
    assert epilog in re.sub(r"^  ", "", shown, flags=re.MULTILINE)
    assert [line for line in epilog.splitlines() if len(line) > 78] == []


def test_h_behind_a_commands_separator_is_the_commands_own(there):
    command = load("record")
    with command.make_context(
        "record", ["--model", "m", "--out", "runs/new", "--", "pi", "-h"]
    ) as context:
        assert context.params["command"] == ("pi", "-h")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_line_of_the_help_is_the_first_sentence_of_its_own_help(name):
    text = " ".join(load(name).help.split())
    _, line = COMMANDS[name]
    assert re.split(r"(?<=\.) ", text)[0] == line


def test_the_help_begins_with_what_a_user_begins_with():
    assert rolltap.list_commands(click.Context(rolltap))[:2] == ["serve", "record"]
