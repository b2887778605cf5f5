"""The tables of keys on the pages: the site's hook makes them from the sources, one row for each
field of a model."""

import inspect
import json
import subprocess
from dataclasses import fields
from typing import get_args

import pytest
from pydantic import BaseModel
from trl import GRPOConfig

import rolltap
from rolltap.addons.options import OPTIONS, RecorderOptions
from rolltap.trainer.training.recipe import Recipe
from rolltap.trainer.training.step.config import TraceGRPOConfig
from tests.conftest import ROOT
from tests.readme.blocks import PAGES

PYTHON = ROOT / ".venvs" / "docs" / "bin" / "python"
MAKE_TABLES = """
import json, sys
from types import SimpleNamespace
import hook

tables = {}
for line in hook.TABLE.finditer(sys.stdin.read()):
    made = hook.on_page_markdown(line[0], None, SimpleNamespace(docs_dir=hook.ROOT / "recipes/site/pages"), None)
    tables[line[1]] = [row[2:-2].split(" | ") for row in made.splitlines()[2:]]
tables["presets"] = [row[2:-2].split(" | ") for row in hook.preset_rows()]
print(json.dumps(tables))
"""


@pytest.fixture(scope="module")
def tables():
    """Return the name of each model whose table a page has -> key -> the cells of its row."""
    if not PYTHON.exists():
        pytest.skip("the environment of the site is not installed: tests/run.sh installs it")
    text = "\n".join(page.read_text() for page in PAGES)
    command = [PYTHON, "-c", MAKE_TABLES]
    how = {"cwd": ROOT / "recipes" / "site", "capture_output": True, "text": True, "check": True}
    made = subprocess.run(command, input=text, **how)
    tables = {}
    for name, rows in json.loads(made.stdout).items():
        tables[name] = {key.strip("`"): cells for key, *cells in rows}
    return tables


def models_in(model):
    """Return a model, and the models that are types of its fields."""
    found = set()
    waiting = [model]
    while waiting:
        kind = waiting.pop()
        waiting += get_args(kind)
        if inspect.isclass(kind) and issubclass(kind, BaseModel) and kind not in found:
            found.add(kind)
            waiting += [field.annotation for field in kind.model_fields.values()]
    return found


@pytest.mark.parametrize("model", [Recipe, rolltap.Task, rolltap.Harness])
def test_a_table_of_the_model_and_of_each_model_in_it_has_every_key(tables, model):
    for each in models_in(model):
        keys = {field.alias or name for name, field in each.model_fields.items() if name != "kind"}
        assert tables[each.__name__].keys() == keys


def test_the_table_of_the_trainer_s_arguments_has_every_field_that_trl_does_not_explain(tables):
    trls = {field.name for field in fields(GRPOConfig)}
    own = {field.name for field in fields(TraceGRPOConfig)} - trls
    assert tables["TraceGRPOConfig"].keys() == own | {"vllm_importance_sampling_correction"}


def test_the_table_of_the_recorder_s_options_has_every_option(tables):
    assert tables["RecorderOptions"].keys() == {*OPTIONS}


def test_the_table_of_the_presets_has_the_version_and_the_command_of_each(tables):
    presets = {}
    for name in rolltap.Harness.names():
        preset = rolltap.Harness.load(name)
        presets[name] = [preset.version, f"`{preset.install}`"]
    assert tables["presets"] == presets


@pytest.mark.parametrize(
    ("model", "key", "kind", "default"),
    [
        ("Recipe", "model", "path", "required"),
        ("Recipe", "timeout", "number", "`1800.0`"),
        ("Recipe", "publish", '`"checkpoint"` or `"lora"`', '`"checkpoint"`'),
        ("HeldOut", "sampling", "table", "`{temperature = 0.0}`"),
        ("Outcomes", "unjudged", '`"exclude"` or number', '`"exclude"`'),
        ("Forks", "from", '`"failed"` or `"any"`', '`"failed"`'),
        ("RecorderOptions", "rolltap_out", "path", "required"),
        ("RecorderOptions", "rolltap_allow", "array of text", ""),
        ("RecorderOptions", "rolltap_patience", "integer", "`120`"),
        ("RecorderOptions", "rolltap_routing", "boolean", "`false`"),
        ("RecorderOptions", "rolltap_fsync", '`"never"` or `"session"` or `"call"`', '`"session"`'),
    ],
)
def test_a_row_has_type_default_and_text_of_the_field(tables, model, key, kind, default):
    shown_kind, shown_default, text = tables[model][key]
    assert (shown_kind, shown_default) == (kind, default)
    assert text


@pytest.mark.parametrize(
    ("model", "key", "field"),
    [
        ("Recipe", "service", Recipe.model_fields["service"]),
        ("RecorderOptions", "rolltap_out", RecorderOptions.model_fields["out"]),
    ],
)
def test_a_row_has_the_text_of_the_sources(tables, model, key, field):
    assert tables[model][key][-1] == " ".join(field.description.split())
