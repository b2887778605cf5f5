"""The examples in every command's help, and the help itself."""

import json
import re
import shlex
import subprocess
import sys

import click
import pytest

from rolltap.trainer.cli.main import rolltap

COMMANDS = sorted(rolltap.commands)


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
from rolltap.trainer.cli.main import rolltap
runner = CliRunner(env={"COLUMNS": "80"})
paths = [[*filter(None, [name]), option] for name in ("", *rolltap.commands) for option in ("-h", "--help")]
json.dump([runner.invoke(rolltap, path).output for path in paths], sys.stdout)
"""
"""In a process of its own: a command that was once called by itself keeps that call's name of the help option."""


@pytest.fixture(scope="module")
def helps():
    """Return the help of each command, by its name and the option that asks for it."""
    told = subprocess.run([sys.executable, "-c", HELPS], capture_output=True, text=True, check=True).stdout
    asked = [(name, option) for name in ("", *rolltap.commands) for option in ("-h", "--help")]
    return dict(zip(asked, json.loads(told), strict=True))


def examples(command):
    """Return the arguments of each call of `command` in the examples of its help."""
    lines = (rolltap.commands[command].epilog or "").replace("\\\n", " ")
    calls = re.findall(rf"\brolltap ({command}\b[^|>)\n]*)", lines)
    return [shlex.split(call)[1:] for call in calls]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_that_it_accepts(name, there):
    assert examples(name)
    for arguments in examples(name):
        rolltap.commands[name].make_context(name, arguments).close()


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_shown_as_they_are_written_on_a_terminal_of_80_columns(name, helps):
    epilog = rolltap.commands[name].epilog.removeprefix("\b\n")
    assert epilog in re.sub(r"^  ", "", helps[name, "-h"], flags=re.MULTILINE)
    assert [line for line in epilog.splitlines() if len(line) > 78] == []


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_h_is_help(name, helps):
    assert helps[name, "-h"].startswith("Usage: rolltap")
    assert helps[name, "-h"] == helps[name, "--help"]


def test_h_behind_a_commands_separator_is_the_commands_own(there):
    command = rolltap.commands["record"]
    with command.make_context("record", ["--model", "m", "--out", "runs/new", "--", "pi", "-h"]) as context:
        assert context.params["command"] == ("pi", "-h")


def test_the_help_begins_with_what_a_user_begins_with():
    assert rolltap.list_commands(click.Context(rolltap))[:2] == ["serve", "record"]
