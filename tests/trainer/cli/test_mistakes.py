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
    started."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "ROLLTAP_ENGINE_KEY_FILE", ""
    )  # --engine-key-file sets it, and it is put back afterwards
    for module in ("training.loop", "training.plan.plan", "training.offline"):
        monkeypatch.setitem(sys.modules, f"rolltap.trainer.{module}", None)
        monkeypatch.delattr(
            training, module.removeprefix("training."), raising=False
        )  # where it was imported before
    monkeypatch.setattr("rolltap.trainer.rollouts.recorder.Mitmdump", None)
    before = sorted(tmp_path.iterdir())

    def said(line):
        result = CliRunner().invoke(rolltap, line.split(" "))
        assert result.exit_code in (1, 2)
        assert sorted(tmp_path.iterdir()) == before
        if result.exit_code == 2:
            return result.stderr.splitlines()[-1]
        assert isinstance(result.exception, RolltapError)
        assert len(str(result.exception).splitlines()) == 1
        return str(result.exception)

    return said


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
    ],
)
def test_a_mistake_is_named_before_anything_is_started(said, line, what):
    assert what in said(line)


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
    with (
        listen("127.0.0.1", 0) as taken,
        pytest.raises(InputError, match="is in use: give another --port"),
    ):
        listen(*taken.getsockname())


SYNTAX, KEY, MODEL = (
    "model = ",
    RECIPE.replace("steps", "step"),
    RECIPE.replace('"model"', '"mine"'),
)
PRESET, PRESETS_KEY = RECIPE.replace("pi", "pie"), RECIPE.replace("pi", "key.toml")
TASKS, NO_TASKS = (
    RECIPE.replace("tasks.jsonl", "array.jsonl"),
    RECIPE.replace("tasks.jsonl", "none.jsonl"),
)
READ = "the trainer is not installed"


@pytest.mark.parametrize(
    ("recipe", "online", "planned", "offline"),
    [
        (SYNTAX, *["r.toml is not TOML: Invalid value (at"] * 3),
        (
            RECIPE.replace("1", "'1'"),
            *["r.toml: 'steps' is '1': Input should be a valid integer"] * 3,
        ),
        (KEY, *["r.toml: 'steps' is missing; unknown key 'step'"] * 3),
        (MODEL, *["r.toml: model: the folder "] * 3),
        (PRESET, *["no harness is named 'pie': choose"] * 2, READ),
        (PRESETS_KEY, *["key.toml: 'program' is missing; unknown key 'programm'"] * 2, READ),
        (TASKS, *["array.jsonl, line 1 is not a JSON object"] * 2, READ),
        (NO_TASKS, "none.jsonl", READ, READ),
        (RECIPE, READ, READ, READ),
    ],
    ids=["syntax", "type", "key", "model", "preset", "preset's key", "tasks", "no tasks", "none"],
)
def test_a_recipe_is_read_with_what_it_names_before_the_trainer_is_imported(
    said, monkeypatch, recipe, online, planned, offline
):
    monkeypatch.setattr("rolltap.training.require_collection", lambda runs: None)
    Path("r.toml").write_text(recipe)
    assert online in said("train r.toml --out new")
    assert planned in said("train r.toml --dry-run")
    assert offline in said("train r.toml --out new --from folder")


@pytest.mark.parametrize(
    ("line", "what"),
    [
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
def test_what_else_an_hour_with_the_first_page_brings_says_what_to_do(said, line, what):
    assert what in said(line)
