import tomllib
from pathlib import Path

import pytest
from transformers import integrations

from rolltap.addons.errors import InputError
from rolltap.trainer.training import arguments
from rolltap.trainer.training.arguments import check_report_to

ROOT = Path(__file__).parents[3]


@pytest.fixture
def installed(monkeypatch):
    """A function that says which of the extras are installed."""

    def install(*names):
        monkeypatch.setattr(arguments, "_EXTRAS", {name: lambda name=name: name in names for name in arguments._EXTRAS})

    return install


@pytest.mark.parametrize("names", ["none", "all", [], ["none"], "tensorboard", ["tensorboard", "wandb"]])
def test_what_is_installed_is_accepted(installed, names):
    installed("tensorboard", "wandb")
    check_report_to(names)


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_an_extra_that_is_missing_is_named_with_the_command_that_installs_it(installed, name):
    installed()
    with pytest.raises(InputError, match=rf"grpo\.report_to = '{name}': .*pip install 'rolltap\[{name}\]'"):
        check_report_to([name])


@pytest.mark.parametrize("value", ["tensorbord", ["tensorboard", "tensorbord"], ["none", "tensorboard"], ""])
def test_a_reporter_that_does_not_exist_is_refused_with_the_choices(installed, value):
    installed("tensorboard")
    with pytest.raises(InputError, match=r"there is no reporter .*; choose from tensorboard, trackio, wandb"):
        check_report_to(value)


@pytest.mark.parametrize("value", [5, True, [5], {"tensorboard": True}, [["tensorboard"]]])
def test_what_is_no_name_is_refused(value):
    with pytest.raises(InputError, match=r"grpo\.report_to = .*: give a name or a list of names"):
        check_report_to(value)


def test_other_reporters_of_transformers_are_accepted_where_they_work(monkeypatch):
    monkeypatch.setattr(integrations, "get_available_reporting_integrations", lambda: ["mlflow"])
    check_report_to("mlflow")
    with pytest.raises(InputError, match="'neptune': it is not installed or not configured"):
        check_report_to("neptune")


def test_every_extra_is_one_of_transformers_reporters_and_of_the_distribution():
    assert arguments._EXTRAS.keys() <= integrations.INTEGRATION_TO_CALLBACK.keys()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert arguments._EXTRAS.keys() <= extras.keys()
