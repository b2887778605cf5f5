"""The command line as a whole: help, examples, exit status, and the line that ends a command."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading

import click
import pytest
from click.testing import CliRunner

from rolltap.addons.store.metadata import write_metadata
from rolltap.trainer.cli.main import (
    COMMANDS,
    SIGNALS,
    load,
    rolltap,
    run,
    said_when_stopped,
)
from rolltap.trainer.cli.options import next_line
from tests.trainer.cli.program import ROLLTAP, run_rolltap

GIVEN = "--out x --model m"


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        (f"record {GIVEN} -- no-such-harness", 1, "'no-such-harness' is not on the PATH"),
        (f"record {GIVEN} --harness clod", 1, "no harness is named 'clod': choose"),
        ("env --proxy h:1", 1, "the proxy 'h:1' is not written as http://HOST:PORT"),
        ("env --proxy http://h:1 --ca no.pem", 1, "the recorder makes it when it first starts"),
        (f"record {GIVEN} --set rolltap_samplin=1 -- true", 1, "did you mean rolltap_sampling?"),
        ("serve m --vllm no-such-vllm", 1, "'no-such-vllm' is not on the PATH"),
        (f"record {GIVEN} --set a -- true", 2, "'a' is not written as NAME=VALUE"),
        ("rollout --max-calls 0", 2, "Invalid value for '--max-calls': 0 is not in the range x>=1"),
        ("inspekt", 2, "Did you mean 'inspect'?"),
    ],
)
def test_a_users_mistake_is_a_message_and_its_status(line, status, message, tmp_path):
    ended = run_rolltap(*line.split(), cwd=tmp_path)
    assert ended.returncode == status
    assert ended.stdout == ""
    assert message in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "line",
    [
        "check --engine http://127.0.0.1:9",
        "export --to messages --out out",
        "inspect",
        "score --engine http://127.0.0.1:9 --as teacher",
        "traces",
        "verify",
        "view",
    ],
)
def test_a_run_folder_that_is_not_there_has_one_message_in_all_commands(line):
    ended = CliRunner().invoke(rolltap, [*line.split(), "/nowhere"])
    assert ended.exit_code == 2
    assert "Directory '/nowhere' does not exist." in ended.output


def test_a_session_is_compared_by_the_same_options_when_it_is_recorded_and_when_it_is_rewarded():
    options = {}
    for name in ("record", "reward"):
        parameters = load(name).to_info_dict(click.Context(load(name)))["params"]
        options[name] = [each for each in parameters if each["name"] in ("task", "group")]
    assert options["record"] == options["reward"] != []


def test_a_table_that_is_no_file_is_a_warning_which_names_it_and_damage(tmp_path):
    (tmp_path / "calls-0.arrow").mkdir()
    write_metadata(tmp_path, {})
    read = run_rolltap("inspect", tmp_path)
    assert read.returncode == 0
    assert "calls-0.arrow" in read.stderr
    checked = run_rolltap("verify", tmp_path)
    assert checked.returncode == 1
    assert "damage: calls-0.arrow" in checked.stdout


@pytest.mark.parametrize(
    ("command", "completed"), [("ins", "inspect"), ("record --eng", "--engine")]
)
def test_a_shell_completes_commands_and_options(command, completed):
    words = {"COMP_WORDS": f"rolltap {command}", "COMP_CWORD": str(command.count(" ") + 1)}
    ended = run_rolltap(env={**os.environ, **words, "_ROLLTAP_COMPLETE": "bash_complete"})
    assert f"plain,{completed}" in ended.stdout.splitlines()


def run_python(*arguments):
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def test_the_package_is_the_command_too():
    assert "Usage: python -m rolltap" in run_python("-m", "rolltap", "-h").stdout


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
    shown = run_python("-c", code)
    assert shown.stderr == ""
    assert "verify" in shown.stdout


@pytest.mark.parametrize("module", ["cli.main", "training.recipe", "engine.admin", "training.step"])
def test_modules_that_take_seconds_to_import_are_imported_on_use(module):
    code = f"import sys, rolltap.trainer.{module}; print(*sys.modules)"
    modules = run_python("-c", code).stdout.split()
    assert f"rolltap.trainer.{module}" in modules
    heavy = {"torch", "trl", "peft", "transformers", "datasets", "mitmproxy"}
    assert heavy.isdisjoint(modules)


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
    return json.loads(run_python("-c", HELPS).stdout)


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
    line = ["--model", "m", "--out", "runs/new", "--", "pi", "-h"]
    with load("record").make_context("record", line) as context:
        assert context.params["command"] == ("pi", "-h")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_line_of_the_help_is_the_first_sentence_of_its_own_help(name):
    text = " ".join(load(name).help.split())
    _, line = COMMANDS[name]
    assert text.startswith(line)


def test_the_help_begins_with_what_a_user_begins_with():
    assert rolltap.list_commands(click.Context(rolltap))[:2] == ["serve", "record"]


def test_the_next_command_can_be_pasted():
    assert next_line("view", "runs/my first") == "next: rolltap view 'runs/my first'"


AGAIN = "; the same command goes on: rolltap "


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "r.toml", "--out", "a b"], f"{AGAIN}train r.toml --out 'a b'"),
        (["rollout", "t.jsonl"], f"{AGAIN}rollout t.jsonl"),
        (["record", "--", "true"], "; committed calls stay in the run"),
        (["view", "runs/first"], ""),
        ([], ""),
    ],
)
def test_a_command_that_a_signal_stopped_says_how_it_goes_on(arguments, said):
    assert said_when_stopped(arguments) == f"stopped by a signal{said}"


@pytest.fixture
def signals(monkeypatch):
    """Put the handlers of signals back afterwards."""
    monkeypatch.setattr("sys.argv", ["work"])
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *SIGNALS)}
    # a shell's background jobs ignore some of them
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, *SIGNALS])
def test_every_signal_that_asks_a_command_to_end_does_what_ctrl_c_does(signals, capsys, number):
    with pytest.raises(SystemExit) as ended:
        run(click.Command("work", callback=lambda: signal.raise_signal(number)))
    assert ended.value.code == 130
    assert "stopped by a signal" in capsys.readouterr().err


class SignalledAtItsEnd:
    """Python drops an exception of `__del__`, as of the callbacks with which an import ends."""

    def __del__(self):
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_that_python_drops_while_it_collects_an_object_comes_again(signals, capsys):
    hook = sys.unraisablehook

    def work():
        SignalledAtItsEnd()
        threading.Event().wait(120)

    with pytest.raises(SystemExit) as ended:
        run(click.Command("work", callback=work))
    assert ended.value.code == 130
    assert "Exception ignored" not in capsys.readouterr().err
    assert sys.unraisablehook is hook


def test_a_command_of_nohup_goes_on_without_its_terminal(signals):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run(click.Command("work", callback=lambda: signal.raise_signal(signal.SIGHUP)))


def test_ctrl_c_while_the_program_is_loaded_ends_it_without_a_traceback(tmp_path):
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([ROLLTAP, "-h"], env=env, capture_output=True, text=True)
    assert ended.returncode == 130
    assert ended.stdout == ended.stderr == ""
