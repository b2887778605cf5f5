"""The imports of `rolltap.train` and its like. tests/trainer/training has the training."""

import sys
from types import ModuleType

import pytest

import rolltap
from rolltap.errors import MissingPackageError


class Module(ModuleType):
    """A module whose names cannot be imported."""

    def __init__(self, error):
        super().__init__("broken")
        self._error = error

    def __getattr__(self, name):
        raise self._error


def failing(error, cause=None):
    error.__cause__ = cause
    return Module(error)


@pytest.fixture
def plan(monkeypatch, tmp_path):
    """Return a function that plans a training while an import fails."""
    (tmp_path / "m").mkdir()
    (tmp_path / "recipe.toml").write_text('model = "m"\nsteps = 1\n')
    plan_training = rolltap.plan_training  # while it is imported, pydantic looks into every module

    def plan(module):
        monkeypatch.setitem(sys.modules, "rolltap.trainer.training.plan.plan", module)
        plan_training(tmp_path / "recipe.toml")

    return plan


@pytest.mark.parametrize(
    "module",
    [
        failing(ImportError("No module named 'trl'")),
        failing(
            RuntimeError("Failed to import trl.trainer"), ImportError("No module named 'peft'")
        ),
    ],
)
def test_a_package_that_is_missing_is_one_to_install(plan, module):
    with pytest.raises(MissingPackageError, match=r"pip install -e '\S+\[train\]'"):
        plan(module)


def test_another_error_of_an_import_is_not_taken_for_a_missing_package(plan):
    with pytest.raises(RuntimeError, match="the driver is too old"):
        plan(failing(RuntimeError("the driver is too old")))
