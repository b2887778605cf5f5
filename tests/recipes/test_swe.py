"""The recipes for models of real size: their plans are those of the README, every harness of the
table is planned, and their engines hold by vLLM's own functions what is planned.

`python -m tests.recipes.test_swe` writes the plans into the README.
"""

import io
import json
import os
import shutil
import subprocess
import tempfile
from contextlib import chdir
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
from rich.console import Console

from rolltap.trainer.engine.serve import Parts, engine_command
from rolltap.trainer.models.loading import kernels
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.training.plan import findings, plan
from rolltap.trainer.training.plan.engine import Blocks, sequences_of
from rolltap.trainer.training.plan.model import model_numbers
from rolltap.trainer.training.plan.plan import TrainingPlan
from rolltap.trainer.training.recipe import load_recipe
from tests.conftest import ROOT
from tests.deep import cases

SWE = ROOT / "recipes" / "swe"
README = SWE / "README.md"
HYBRID = "one-gpu-lora.toml"
RECIPES = sorted(path.name for path in SWE.glob("*.toml"))
PLANNED = cases(RECIPES, RECIPES.index(HYBRID))
HARNESSES = ["codex", "claude-code", "qwen-code", "pi"]
pytestmark = pytest.mark.filterwarnings(
    "ignore:The following:RuntimeWarning"
)  # PEFT, of patterns for experts
_numbers = {}
VERSIONS = {"0.32": "ROLLTAP_VLLM", "0.33": "ROLLTAP_VLLM_NEXT"}
"""Versions of vLLM -> the variable that names its program."""


def planned(name: str, folder: Path) -> TrainingPlan:
    """Plan a recipe with the model of the tests, on a machine without a GPU and without kernels for
    one with both."""
    recipe = load_recipe(Path(shutil.copy(SWE / name, folder)))
    model = recipe.model.name
    for source in ("qwen3-4b", model.lower()):  # the tokenizer of the first, if the second has none
        shutil.copytree(ROOT / "tests" / "models" / source, folder / model, dirs_exist_ok=True)
    recipe = recipe.model_copy(update={"model": Path(model)})

    def numbers(recipe, dtype, gpu):
        key = (recipe.model, repr(recipe.lora), dtype)
        if key not in _numbers:
            _numbers[key] = model_numbers(recipe, dtype, gpu=gpu)
        return _numbers[key]

    with (
        chdir(folder),
        patch.object(plan, "model_numbers", numbers),
        patch.object(findings, "kernels", lambda kind: dict.fromkeys(kernels(kind), False)),
        patch("torch.cuda.is_available", lambda: False),
    ):
        return plan.plan(recipe, file=Path("recipes/swe", name), out=Path("runs/swe"))


def printed(name: str) -> str:
    """Return a recipe's plan as the dry run prints it."""
    with tempfile.TemporaryDirectory() as folder:
        # CI may ask every program for colours, with FORCE_COLOR
        console = Console(file=io.StringIO(), soft_wrap=True, highlight=False, color_system=None)
        console.print(planned(name, Path(folder)))
        text = console.file.getvalue()
    return text.rstrip()


def with_plans(readme: str) -> str:
    """Return the README's text with the plan of each recipe below its command."""
    for name in RECIPES:
        before, command, after = readme.partition(
            f"$ rolltap train recipes/swe/{name} --out runs/swe --dry-run\n"
        )
        assert command, f"the README has no plan of {name}"
        readme = f"{before}{command}{printed(name)}\n{after[after.index('```') :]}"
    return readme


@pytest.mark.deep  # short, the next test plans two recipes
def test_the_plans_of_the_readme_are_those_that_are_printed():
    assert with_plans(README.read_text()) == README.read_text()


@pytest.mark.parametrize("name", PLANNED)
def test_each_recipe_can_start(name, tmp_path):
    found = planned(name, tmp_path)
    assert found.can_start, found.findings
    assert {finding.text for finding in found.findings if finding.level == "note"} >= {
        "the task file tasks.jsonl is not there",
        f"the folder {found.recipe.model} has no weights",
    }


def test_each_recipe_can_have_each_harness_of_the_table():
    assert set(HARNESSES) <= set(Harness.names())
    assert all(f"`{harness}`" in README.read_text() for harness in HARNESSES)
    for name in RECIPES:
        for harness in HARNESSES:
            recipe = load_recipe(SWE / name).model_copy(update={"harness": harness})
            assert Harness.load(recipe.harness).name == harness


@pytest.fixture(scope="module")
def engines(tmp_path_factory, tiny_model):
    """The engines of the recipes, by name, as vLLM is asked for them, and the plans of recipes/swe.

    `limit` and `beyond` have as many blocks as calls, and one less.
    """
    found, plans = {}, {}
    for name in PLANNED:
        folder = tmp_path_factory.mktemp("recipe")
        plans[name] = planned(name, folder)
        found[name] = {
            "model": str(folder / plans[name].recipe.model),
            "tokens": plans[name].recipe.max_tokens,
            "sequences": plans[name].memory.engine.sequences,
            "memory": plans[name].memory.engine.sizes["cache"],
        }
    block = Blocks.of(plans[HYBRID].model).bytes
    for name, blocks in (("limit", 1024), ("beyond", 1023)):
        found[name] = found[HYBRID] | {"sequences": 1024, "memory": blocks * block}
    places = {"host": "", "port": 0, "max_model_len": None, "lora_rank": 0, "max_staleness": 0}
    command = engine_command("", str(tiny_model), **places, cpu=True, has=Parts())
    given = dict(pairwise(command))
    options = {"tokens": "max-model-len", "sequences": "max-num-seqs"}
    options["memory"] = "kv-cache-memory-bytes"
    found["quickstart"] = {key: int(given[f"--{option}"]) for key, option in options.items()}
    found["quickstart"]["model"] = str(tiny_model)
    return found, plans


@pytest.fixture(scope="module", params=cases(VERSIONS))
def answers(request, engines):
    """Return the numbers of each engine by a version of vLLM. Skips the tests without that vLLM."""
    variable = VERSIONS[request.param]
    python = Path(os.environ.get(variable, "")).with_name("python")
    if not python.is_file():
        remedy = f"tests/run.sh installs it, or set {variable}"
        pytest.skip(f"vLLM {request.param} is not installed: {remedy}")
    script = Path(__file__).with_name("in_vllm.py")
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    how = {"input": json.dumps(engines[0]), "capture_output": True, "text": True, "env": env}
    asked = subprocess.run([python, script], **how)
    assert asked.returncode == 0, asked.stderr
    return json.loads(asked.stdout.splitlines()[-1])


def test_each_recipes_engine_starts_and_holds_the_sessions_that_are_planned(engines, answers):
    asked, plans = engines
    for name, each in plans.items():
        answer = answers[name]
        assert answer["refused"] is None
        assert answer["blocks"] >= each.memory.engine.sequences
        blocks = Blocks.of(each.model)
        session = blocks.session_bytes(asked[name]["tokens"])
        planned = {"blocks": each.memory.engine.blocks, "block": blocks.bytes, "session": session}
        assert planned == pytest.approx({key: answer[key] for key in planned}, rel=0.01)


def test_vllm_starts_a_hybrid_with_as_many_blocks_as_calls_and_not_with_fewer(answers):
    assert (answers["limit"]["blocks"], answers["limit"]["refused"]) == (1024, None)
    assert "exceeds available Mamba cache blocks (1023)" in answers["beyond"]["refused"]


def test_the_quickstarts_engine_has_a_block_for_each_call(engines, answers):
    recipe = load_recipe(ROOT / "recipes" / "quickstart" / "recipe.toml")
    calls = engines[0]["quickstart"]["sequences"]
    assert answers["quickstart"]["blocks"] >= calls >= sequences_of(recipe, 1)


if __name__ == "__main__":
    README.write_text(with_plans(README.read_text()))
