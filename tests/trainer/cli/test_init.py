"""`rolltap init`: the files that it writes run. The page Your own agent trains with them."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import rolltap
from rolltap.trainer.cli.init import init_command
from rolltap.trainer.training.recipe import load_recipe
from tests.boxes import sandboxed
from tests.harness.play import tool_call
from tests.scripted_engine import Say


@pytest.fixture
def init(tmp_path, monkeypatch):
    """Return a function that runs the command in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def init(*arguments, **how):
        return CliRunner().invoke(init_command, ["my-agent", *arguments], **how)

    return init


def test_the_example_is_written_and_the_next_commands_are_named(init, tmp_path):
    ended = init("--yes", "--model", "models/m")
    assert ended.exit_code == 0
    folder = tmp_path / "my-agent"
    written = {"agent.py", "agent.toml", "judge", "recipe.toml", "solution", "start", "tasks.jsonl"}
    assert {path.name for path in folder.iterdir()} == written
    recipe = load_recipe(folder / "recipe.toml")
    assert recipe.model == tmp_path / "models/m"
    assert recipe.tasks == folder / "tasks.jsonl"
    assert recipe.harness == str(folder / "agent.toml")
    commands = re.findall(r"^  rolltap (\w+)", ended.output, re.MULTILINE)
    assert commands == ["doctor", "tasks", "serve", "rollout", "train"]
    assert "my-agent is not empty: choose a new folder" in str(init("--yes").exception)


def test_a_program_of_ones_own_is_asked_for_and_found_from_the_preset(init, tmp_path):
    (tmp_path / "mine.py").touch()
    ended = init(input="python3 mine.py --fast --task={instruction} --last\nmodels/m\n")
    assert ended.exit_code == 0
    harness = rolltap.Harness.load("my-agent/agent.toml")
    assert harness.name == "mine.py"
    mine = str(tmp_path / "mine.py")
    assert harness.command_for("go") == ["python3", mine, "--fast", "--task=go", "--last"]
    assert not (tmp_path / "my-agent" / "agent.py").exists()


@pytest.mark.parametrize(
    ("arguments", "typed", "option"),
    [([], "", "--program"), ([], "\n", "--model"), (["--program", "true"], "", "--model")],
)
def test_an_end_of_the_input_is_no_signal_and_names_the_option_that_answers(
    init, tmp_path, arguments, typed, option
):
    said = str(init(*arguments, input=typed).exception)
    assert said == f"the input ended before an answer: give {option}, or --yes for the default"
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_there_yet_is_named_with_the_way_to_get_it(init, tmp_path):
    missing = "m is not there yet: hf download Qwen/Qwen3-4B --local-dir m gets a model"
    assert missing in init("--yes", "--model", "m").output
    (tmp_path / "there").mkdir()
    other = CliRunner().invoke(init_command, ["other", "--yes", "--model", "there"])
    assert "is not there yet" not in other.output


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("", "--program '' is no command line"),
        ("python3 'agent.py", "is no command line"),
        ("python3 ./agnet.py", "--program names ./agnet.py, which does not exist"),
    ],
)
def test_a_program_that_cannot_be_started_is_named_and_nothing_is_written(
    init, tmp_path, program, message
):
    assert message in str(init("--program", program, "--model", "m").exception)
    assert list(tmp_path.iterdir()) == []


def test_a_program_may_be_a_folder_of_code_and_code_itself(init):
    Path("agent").mkdir()
    code = "pass; " * 100
    ended = init("--model", "m", "--program", f"python3 -c '{code}' ./agent")
    assert ended.exit_code == 0
    harness = rolltap.Harness.load("my-agent/agent.toml")
    assert harness.command_for("go") == ["python3", "-c", code, str(Path("agent").resolve()), "go"]


@sandboxed
def test_the_example_passes_the_check_of_tasks_and_its_agent_works_in_a_sandbox(
    init, scripted_engine, tokenizer_folder
):
    init("--yes")
    [check] = rolltap.check_tasks("my-agent/tasks.jsonl", runtime="sandbox")
    assert check.passed
    command = "wc -l < words.txt > answer.txt; echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    scripted_engine.otherwise = lambda request: Say(tool_call("bash", {"command": command}))
    run = rolltap.rollout(
        "my-agent/tasks.jsonl",
        harness="my-agent/agent.toml",
        engine=scripted_engine.url,
        model=tokenizer_folder,
        out="runs/first",
        sessions=2,
        runtime="sandbox",
    )
    assert len(run.sessions()) == 2
    for session in run.sessions():
        assert session.status == "completed", session.error
        assert session.reward == 1.0
