"""A preset's command line, and which program ran, in which version."""

import hashlib
import logging
import shutil
import sys
from pathlib import Path

import pytest

from rolltap.addons.errors import EngineError, InputError
from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.rollouts.harness import Harness, Provenances, find_version

MINIMAL = 'name = "x"\nversion = "1"\nprogram = "x"\nheadless = ["-p", "{instruction}"]\n'


@pytest.mark.parametrize("name", Harness.names())
def test_every_preset_loads_and_takes_the_instruction(name):
    harness = Harness.load(name)
    assert harness.name == name
    assert harness.command_for("do {this}")[-1].endswith("do {this}")
    assert harness.version in harness.install
    assert any("window" in quirk for quirk in harness.quirks)  # the one that its program assumes


def test_a_program_that_is_not_installed_and_an_unknown_name_are_named():
    how = {"arguments": ["{a}"], "headless": ["-t={instruction}"], "install": "npm it"}
    harness = Harness(name="h", program="no-such", **how)
    assert harness.command_for("{instruction} {b}") == ["no-such", "{a}", "-t={instruction} {b}"]
    with pytest.raises(InputError, match=r"'no-such' is not on the PATH: install it \(npm it\)"):
        harness.require_program()
    with pytest.raises(InputError, match=r"named 'clod': choose aider, claude-code, .*, or give"):
        Harness.load("clod")


def test_the_engines_context_window_is_asked_for_only_if_a_variable_holds_it(scripted_engine):
    harness = Harness.load("claude-code")
    environment = harness.environment(f"{scripted_engine.url}/")
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "8192"
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9/v1/models: no engine answers"):
        harness.environment("http://127.0.0.1:9")
    other = Harness.load("codex")
    assert other.environment("http://127.0.0.1:9") == other.env


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
    files = [tmp_path / name for name in ("bin/run", "own/agent", "own/agent.py")]
    assert [*harness.files] == files
    shutil.copytree(tmp_path / "bin", tmp_path / "copy" / "bin")
    shutil.copytree(tmp_path / "own", tmp_path / "copy" / "own")
    assert Harness.load("copy/own/own.toml").digest() == harness.digest()


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
    program = f"{tmp_path}/bin/run"
    agent = f"{tmp_path}/own/agent.py"
    beside.write_text(f'name = "x"\nprogram = "{program}"\nheadless = ["{agent}"]\n')
    assert Harness.load(str(beside)).command_for("go") == [program, agent]
    assert caplog.text == ""


OPENHANDS = "jwt.py:25: Warning: gone\nIt will be compatible before version 2.0.0.\n\n{}\n"


@pytest.mark.parametrize(
    ("output", "version"),
    [
        ("2.1.329 (Claude Code)\n", "2.1.329"),
        ("codex-cli 0.169.0\n", "0.169.0"),
        ("This is mini-swe-agent version 2.4.6.\nCheck the v2 guide\n", "2.4.6"),
        ("v1.18.33", "1.18.33"),
        ("tool 1.2.0-beta.3+build5, 2026", "1.2.0-beta.3+build5"),
        (OPENHANDS.format("OpenHands CLI 1.16.0"), "1.16.0"),
        ("GitHub Copilot CLI 1.0.102.\nRun 'copilot update'\n", "1.0.102"),
        ("usage: sh [-c]", ""),
        ("", ""),
    ],
)
def test_the_version_is_the_first_number_at_the_end_of_a_line_or_the_first_that_a_program_prints(
    output, version
):
    assert find_version(output) == version


def harness(tmp_path, script, **fields):
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return Harness(name="x", program=str(program), headless=[], **fields)


async def test_the_program_is_asked_once_and_its_file_and_its_preset_have_digests(tmp_path):
    asked = tmp_path / "asked"
    found = harness(
        tmp_path, f'echo "$@" >> {asked}; echo x 1.2.3', version="1.2.3", version_arguments=["-V"]
    )
    provenances = Provenances(found, ProcessRuntime(), tmp_path)
    known = await provenances.of(None)
    assert known == await provenances.of(None)
    assert asked.read_text() == "-V\n"
    assert known.harness_version == "1.2.3"
    assert known.program_digest == hashlib.sha256(Path(found.program).read_bytes()).hexdigest()
    assert known.preset_digest == found.digest()


OTHER = (
    "has the version 1.3.0, and its preset was tested with 1.2.3: install it with `pip install x`,"
    " or expect"
)


@pytest.mark.parametrize(
    ("script", "version"),
    [
        ("echo 1.3.0", "1.3.0"),
        ("echo 1.2.3; exit 2", ""),
        ("echo no number", ""),
        ("kill -9 $$", ""),
    ],
)
async def test_another_version_than_the_presets_is_a_warning_and_an_untold_one_is_none(
    tmp_path, caplog, script, version
):
    caplog.set_level(logging.WARNING)
    found = harness(tmp_path, script, version="1.2.3", install="pip install x")
    assert (
        await Provenances(found, ProcessRuntime(), tmp_path).of(None)
    ).harness_version == version
    assert [OTHER in line for line in caplog.messages] == ([True] if version else [])


def test_the_digest_of_a_preset_is_that_of_how_it_is_started():
    plain = Harness(name="x", program=sys.executable, headless=[])
    assert plain.digest() == plain.model_copy(update={"quirks": ["q"], "install": "i"}).digest()
    assert plain.digest() != plain.model_copy(update={"arguments": ["-I"]}).digest()


@pytest.mark.parametrize("named", ["./agent/__main__.py", "./agent", "{folder}/agent/__main__.py"])
async def test_a_change_of_a_file_that_the_preset_names_is_another_program(tmp_path, named):
    agent = tmp_path / "agent" / "__main__.py"
    agent.parent.mkdir()
    agent.write_text("")
    word = named.format(folder=tmp_path)
    (tmp_path / "x.toml").write_text(
        f'name = "x"\nprogram = "python3"\narguments = ["{word}"]\nheadless = []\n'
    )
    harness = Harness.load(str(tmp_path / "x.toml"))

    async def digest():
        return (await Provenances(harness, ProcessRuntime(), tmp_path).of(None)).program_digest

    before = await digest()
    (agent.parent / "__pycache__").mkdir()
    (agent.parent / "__pycache__" / "agent.pyc").write_text("written by a session")
    assert await digest() == before
    agent.write_text("pass")
    assert await digest() != before
