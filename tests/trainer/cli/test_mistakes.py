"""Mistakes of a first hour: the cause in one line, before anything is started or imported that
takes seconds."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rolltap.addons.errors import InputError, RolltapError
from rolltap.trainer import training
from rolltap.trainer.cli.main import rolltap
from rolltap.trainer.viewer.serve import listen

GIVEN = "--out new --model Qwen/Qwen3-4B"
SERVICE = "service new --tasks tasks.jsonl --harness own.toml --model Qwen/Qwen3-4B"
ROLLOUT = f"rollout tasks.jsonl --harness own.toml {GIVEN}"
RECIPE = 'model = "model"\ntasks = "tasks.jsonl"\nharness = "pi"\nsteps = 1\n'
FILES = {
    "tasks.jsonl": '{"id": "a", "instruction": "go", "evaluate": ["true"]}\n',
    "array.jsonl": '[{"id": "a"}]\n',
    "own.toml": 'name = "own"\nprogram = "true"\nheadless = []\n',
    "key.toml": 'name = "own"\nprogramm = "true"\nheadless = []\n',
    "syntax.toml": "name = \n",
    "model/config.json": "{}",
    "printed.json": '[\n  {"id": "a"}\n]\n',
    "text.jsonl": '{"id": "a", "instruction": "go", "evaluate": "pytest -q \'a b\'"}\n',
    "slash.jsonl": '{"id": "a/b", "instruction": "go", "evaluate": ["true"]}\n',
    "quoted.toml": 'name = "own"\nprogram = "true"\nheadless = "-p"\n',
    "file": "",
    "folder/readme": "",
    "agent.sh": "#!/bin/sh\n",
    "r.toml": "",
}


@pytest.fixture
def said(tmp_path, monkeypatch):
    """Return a function that runs a command line where the trainer and the recorder cannot be
    started. It returns the message."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    # --engine-key-file sets it, and it is put back afterwards
    monkeypatch.setenv("ROLLTAP_ENGINE_KEY_FILE", "")
    for module in ("loop", "plan.plan", "offline"):
        monkeypatch.setitem(sys.modules, f"rolltap.trainer.training.{module}", None)
        # where it was imported before
        monkeypatch.delattr(training, module, raising=False)
    monkeypatch.setattr("rolltap.trainer.rollouts.recorder.Mitmdump", None)
    before = sorted(tmp_path.iterdir())

    def said(line):
        result = CliRunner().invoke(rolltap, line.split(" "))
        assert sorted(tmp_path.iterdir()) == before
        if result.exit_code == 2:
            return result.stderr.splitlines()[-1]
        assert result.exit_code == 1
        assert isinstance(result.exception, RolltapError)
        assert "\n" not in str(result.exception)
        return str(result.exception)

    return said


@pytest.mark.parametrize("folder", ["folder", "."])
@pytest.mark.parametrize(
    "line",
    [
        "rollout tasks.jsonl --harness own.toml --model Qwen/Qwen3-4B --out",
        "record --model Qwen/Qwen3-4B -- true --out",
        "train r.toml --out",
        "merge folder --out",
        "split folder --parts 2 --out",
        "export folder --to parquet --out",
        "service --tasks tasks.jsonl --harness own.toml --model Qwen/Qwen3-4B",
    ],
)
def test_a_folder_of_other_files_is_not_written_to(said, line, folder):
    given, dashes, command = line.partition(" -- true")
    assert f"{folder!r} has other files and no run: give a new folder" in said(
        f"{given}{command} {folder}{dashes}"
    )


@pytest.mark.parametrize("log", ["recorder.log", "recorder-2.log"])
def test_a_folder_whose_recorder_did_not_start_may_be_given_again(said, log):
    Path("folder/readme").rename(f"folder/{log}")
    what = said("record --model Qwen/Qwen3-4B --out folder --engine http://127.0.0.1:9 -- true")
    assert "no engine answers" in what


def test_a_port_in_use_is_named_with_the_option_for_another():
    refused = pytest.raises(InputError, match="is in use: give another --port")
    with listen("127.0.0.1", 0) as taken, refused:
        listen(*taken.getsockname())


READ = "the trainer is not installed"
RECIPES = {  # online and planned, offline
    "syntax": ("model = ", "r.toml is not TOML: Invalid value (at", "r.toml is not TOML"),
    "type": (
        RECIPE.replace("1", "'1'"),
        "r.toml: 'steps' is '1': Input should be a valid integer",
        "'steps' is '1'",
    ),
    "key": (
        RECIPE.replace("steps", "step"),
        "r.toml: 'steps' is missing; unknown key 'step'",
        "unknown key 'step'",
    ),
    "model": (
        RECIPE.replace('"model"', '"mine"'),
        "r.toml: model: the folder ",
        "r.toml: model: the folder ",
    ),
    "preset": (RECIPE.replace("pi", "pie"), "no harness is named 'pie': choose", READ),
    "preset's key": (
        RECIPE.replace("pi", "key.toml"),
        "key.toml: 'program' is missing; unknown key 'programm'",
        READ,
    ),
    "tasks": (
        RECIPE.replace("tasks.jsonl", "array.jsonl"),
        "array.jsonl, line 1 is not a JSON object",
        READ,
    ),
    "none": (RECIPE, READ, READ),
}


@pytest.mark.parametrize(("recipe", "online", "offline"), RECIPES.values(), ids=RECIPES)
def test_a_recipe_is_read_with_what_it_names_before_the_trainer_is_imported(
    said, monkeypatch, recipe, online, offline
):
    monkeypatch.setattr("rolltap.training.require_collection", lambda runs: None)
    Path("r.toml").write_text(recipe)
    assert online in said("train r.toml --out new")
    assert online in said("train r.toml --dry-run")
    assert offline in said("train r.toml --out new --from folder")


def test_tasks_that_are_not_there_are_missed_before_a_training_starts(said):
    Path("r.toml").write_text(RECIPE.replace("tasks.jsonl", "none.jsonl"))
    assert "none.jsonl" in said("train r.toml --out new")
    assert READ in said("train r.toml --dry-run")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (f"record {GIVEN} --taks x -- true", "No such option '--taks'. Did you mean '--task'?"),
        ("doctor --harnes pi", "No such option '--harnes'. Did you mean '--harness'?"),
        (
            f"record {GIVEN} --harness key.toml",
            "key.toml: 'program' is missing; unknown key 'programm'",
        ),
        (
            f"rollout tasks.jsonl --harness syntax.toml {GIVEN}",
            "syntax.toml is not TOML: Invalid value (at line 1",
        ),
        (
            "record --out new --model ./mine -- true",
            "there is no folder ./mine: give the folder of a model, or",
        ),
        (
            "record --out new --model folder/mine -- true",
            "there is no folder folder/mine: give the folder",
        ),
        ("record --out file/run --model model -- true", "/file' is a file."),
        ("train syntax.toml --out file", "/file' is a file."),
        (f"{SERVICE} --allow-host a:https", "--allow-host: 'a:https' has the port 'https': give"),
        ("serve model --port 80000", "80000 is not in the range 1<=x<=65535"),
        (
            f"record {GIVEN} -- ",
            "give a COMMAND after --, or --harness",
        ),  # of "$AGENT", which is not set
        ("doctor -- ", "give a COMMAND after --, or --harness, or --model"),
        (
            f"record {GIVEN} --engine localhost:8000 -- true",
            "rolltap_engine is 'localhost:8000': give a URL such as",
        ),
        (
            f"{ROLLOUT} --engine http://localhost:8000/v1",
            "rolltap_engine is 'http://localhost:8000/v1': leave out /v1",
        ),
        (f"{ROLLOUT} --engine http://127.0.0.1:9", "no engine answers"),
        (
            f"{ROLLOUT} --engine-key-file none",
            "the engine's key file none cannot be read: No such file",
        ),
        (
            f"{ROLLOUT} --set rolltap_max_calls=3",
            "set budget.calls (--max-calls) instead of rolltap_max_calls",
        ),
        (
            f"rollout folder --harness own.toml {GIVEN}",
            "folder has no tasks: give a Harbor task folder",
        ),
        (
            f"rollout array.jsonl --harness own.toml {GIVEN}",
            "array.jsonl, line 1 is not a JSON object",
        ),
        (
            f"rollout printed.json --harness own.toml {GIVEN}",
            "one line: jq -c '.[]' printed.json writes that",
        ),
        (
            f"rollout text.jsonl --harness own.toml {GIVEN}",
            'give a list of words: ["pytest", "-q", "a b"]',
        ),
        (
            f"rollout slash.jsonl --harness own.toml {GIVEN}",
            "'id' is 'a/b': use letters, digits, dot, dash and",
        ),
        (
            f"record {GIVEN} -- ./agent.sh",
            "'./agent.sh' is a file that cannot be run: chmod +x ./agent.sh",
        ),
        (
            f"record {GIVEN} -- agent.sh",
            "'agent.sh' is a file that cannot be run: chmod +x agent.sh",
        ),
        (f"record {GIVEN} -- ./agent.py", "there is no file './agent.py': correct its path"),
        ("fleet status --ray foo", "--ray foo: give HOST:PORT, as `ray start` prints it, or auto"),
        ("engine status", "http://127.0.0.1:8000"),
        (
            "engine status foo",
            "the engine's URL is 'foo': give a URL such as http://127.0.0.1:8000",
        ),
        ("engine reset foo", "the engine's URL is 'foo': give a URL such as"),
        (
            "doctor --model ./modl",
            "there is no folder ./modl: give the folder of a model, or its name",
        ),
        (
            "doctor --model folder",
            "folder is no model: it has no tokenizer, such as tokenizer.json",
        ),
        ("inspect folder", "folder is not a run folder: it has no run.json"),
    ],
)
def test_a_mistake_is_named_with_what_to_do_before_anything_is_started(said, line, what):
    assert what in said(line)
