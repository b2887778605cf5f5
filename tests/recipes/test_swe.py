"""The recipes for models of real size: their plans are those of the README, and every harness of the table is planned.

`python -m tests.recipes.test_swe` writes the plans into the README.
"""

import io
import shutil
import tempfile
from contextlib import chdir
from pathlib import Path
from unittest.mock import patch

import pytest
from rich.console import Console

from rolltap.trainer.models.loading import kernels
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.training.dry_run import findings, plan
from rolltap.trainer.training.dry_run.model import model_numbers
from rolltap.trainer.training.dry_run.plan import TrainingPlan
from rolltap.trainer.training.recipe import load_recipe
from tests.conftest import ROOT

SWE = ROOT / "recipes" / "swe"
README = SWE / "README.md"
RECIPES = sorted(path.name for path in SWE.glob("*.toml"))
HARNESSES = ["codex", "claude-code", "qwen-code", "pi"]
pytestmark = pytest.mark.filterwarnings("ignore:The following:RuntimeWarning")  # PEFT, of patterns for experts
_numbers = {}


def planned(name: str, folder: Path) -> TrainingPlan:
    """Plan a recipe with the model of the tests, as on a machine without a GPU and without kernels."""
    recipe = load_recipe(Path(shutil.copy(SWE / name, folder)))
    model = recipe.model.name
    for source in ("qwen3-4b", model.lower()):  # the tokenizer of the first, if the second has none
        shutil.copytree(ROOT / "tests" / "models" / source, folder / model, dirs_exist_ok=True)
    recipe = recipe.model_copy(update={"model": Path(model)})

    def numbers(recipe, dtype):
        key = (recipe.model, repr(recipe.lora), dtype)
        if key not in _numbers:
            _numbers[key] = model_numbers(recipe, dtype)
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
        before, command, after = readme.partition(f"$ rolltap train recipes/swe/{name} --out runs/swe --dry-run\n")
        assert command, f"the README has no plan of {name}"
        readme = f"{before}{command}{printed(name)}\n{after[after.index('```') :]}"
    return readme


@pytest.mark.deep  # short, each recipe is planned in the next test
def test_the_plans_of_the_readme_are_those_that_are_printed():
    assert with_plans(README.read_text()) == README.read_text()


@pytest.mark.parametrize("name", RECIPES)
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


if __name__ == "__main__":
    README.write_text(with_plans(README.read_text()))
