import shutil

import pytest

from rolltap.addons.errors import EngineError, InputError
from rolltap.trainer.rollouts.harness import Harness

MINIMAL = 'name = "x"\nversion = "1"\nprogram = "x"\nheadless = ["-p", "{instruction}"]\n'


@pytest.mark.parametrize("name", Harness.names())
def test_every_preset_loads_and_takes_the_instruction(name):
    harness = Harness.load(name)
    assert harness.name == name
    assert harness.command_for("do {this}")[-1].endswith("do {this}")
    assert harness.version in harness.install
    assert any("window" in quirk for quirk in harness.quirks)  # the one that its program assumes


def test_a_program_that_is_not_installed_and_an_unknown_name_are_named():
    harness = Harness(
        name="h",
        program="no-such",
        install="npm it",
        arguments=["{a}"],
        headless=["-t={instruction}"],
    )
    assert harness.command_for("{instruction} {b}") == ["no-such", "{a}", "-t={instruction} {b}"]
    with pytest.raises(
        InputError, match=r"'no-such' is not on the PATH: install it \(npm it\), or"
    ):
        harness.require_program()
    with pytest.raises(
        InputError, match=r"named 'clod': choose aider, claude-code, .*, or give a \.toml"
    ):
        Harness.load("clod")


def test_the_engines_context_window_is_asked_for_only_if_a_variable_holds_it(scripted_engine):
    harness = Harness.load("claude-code")
    assert (
        harness.environment(scripted_engine.url + "/")["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "8192"
    )
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9/v1/models: no engine answers"):
        harness.environment("http://127.0.0.1:9")
    assert Harness.load("codex").environment("http://127.0.0.1:9") == Harness.load("codex").env


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "is not TOML"),
        (MINIMAL + "argument = []", "unknown key 'argument'"),
        ('name = "x"\nversion = "1"\nheadless = []', "'program' is missing"),
    ],
)
def test_a_bad_preset_is_named(tmp_path, text, message):
    (tmp_path / "x.toml").write_text(MINIMAL)
    assert Harness.load(str(tmp_path / "x.toml")).command_for("go") == ["x", "-p", "go"]
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(InputError, match=message):
        Harness.load(str(tmp_path / "x.toml"))


BESIDE = """
name = "own"
program = "../bin/run"
arguments = ["./agent", "-v", "agent.py"]
headless = ["--config=./x", "./{instruction}"]
version_arguments = ["./agent.py", "--version"]
"""


@pytest.fixture
def beside(tmp_path):
    for name in ("bin/run", "own/agent/__main__.py", "own/agent.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path / "own" / "own.toml"


def test_a_word_that_begins_with_a_dot_and_a_slash_is_a_path_relative_to_the_preset(
    beside, tmp_path, monkeypatch
):
    beside.write_text(BESIDE.replace(', "./{instruction}"', ', "{instruction}"'))
    monkeypatch.chdir(tmp_path)
    harness = Harness.load("own/own.toml")
    own = str(tmp_path / "own")
    command = [str(tmp_path / "bin/run"), f"{own}/agent", "-v", "agent.py", "--config=./x", "./go"]
    assert harness.command_for("./go") == command
    assert harness.version_arguments == [f"{own}/agent.py", "--version"]
    (tmp_path / "copy").mkdir()
    shutil.copytree(tmp_path / "bin", tmp_path / "copy" / "bin")
    shutil.copytree(tmp_path / "own", tmp_path / "copy" / "own")
    assert Harness.load("copy/own/own.toml").digest() == harness.digest()
    assert harness.files == (
        tmp_path / "bin/run",
        tmp_path / "own/agent",
        tmp_path / "own/agent.py",
    )


def test_a_path_to_nothing_is_an_error_and_the_name_of_a_file_beside_the_preset_a_warning(
    beside, caplog
):
    beside.write_text(BESIDE.replace("./{instruction}", "./agnet.py"))
    with pytest.raises(
        InputError, match=r"own\.toml: './agnet\.py' is .*/own/agnet\.py, which does not exist"
    ):
        Harness.load(str(beside))
    assert "'agent.py' does not name the file beside it: write './agent.py' for that" in caplog.text


def test_an_absolute_path_of_a_preset_is_no_warning(beside, tmp_path, caplog):
    beside.write_text(
        f'name = "x"\nprogram = "{tmp_path}/bin/run"\nheadless = ["{tmp_path}/own/agent.py"]\n'
    )
    assert Harness.load(str(beside)).command_for("go") == [
        f"{tmp_path}/bin/run",
        f"{tmp_path}/own/agent.py",
    ]
    assert caplog.text == ""
