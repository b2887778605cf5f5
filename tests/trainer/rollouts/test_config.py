"""The settings of a rollout: keywords, keys and options are those of the model."""

import inspect

import pytest

import rolltap
from rolltap.addons.errors import InputError
from rolltap.trainer.cli.main import load
from rolltap.trainer.rollouts.config import Budget, RolloutArguments, RolloutConfig
from rolltap.trainer.training.recipe import Recipe

OF_THE_CALL = {
    "tasks",
    "harness",
    "engine",
    "model",
    "out",
    "new_groups",
    "as_json",
    "engine_key_file",
}
"""Options of `rolltap rollout` that are no settings."""


def test_the_keywords_the_recipes_keys_and_the_options_are_the_fields():
    fields = RolloutConfig.model_fields.keys()
    assert (
        RolloutArguments.__annotations__.keys() | {"runtime"}
        == fields
        <= Recipe.model_fields.keys()
    )
    assert fields & inspect.signature(rolltap.rollout).parameters.keys() == {"runtime"}
    options = {option.name for option in load("rollout").params} - OF_THE_CALL
    budgets = {f"max_{name}" for name in Budget.model_fields}
    assert options - {"preset", "settings"} == (fields - {"budget", "recorder"}) | budgets


def test_budgets_and_further_options_are_those_of_the_recorder():
    config = RolloutConfig(
        budget={"calls": 3, "prompt_tokens": 100}, recorder={"rolltap_allow": ["a", "b"]}
    )
    assert config.options() == {
        "rolltap_max_calls": "3",
        "rolltap_max_prompt_tokens": "100",
        "rolltap_allow": ["a", "b"],
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs recorder_address .*listen_port"),
        ({"recorder_address": "host:1"}, "needs recorder_address .*listen_port"),
        ({"recorder_address": "host"}, "'recorder_address' is 'host': give HOST:PORT"),
        ({"recorder_address": "https://user@host:1"}, "recorder_address.*give HOST:PORT"),
        ({"recorder_address": "host:0"}, "recorder_address.*give HOST:PORT"),
        ({"recorder_address": "host:65536"}, "recorder_address.*give HOST:PORT"),
        ({"recorder_address": "http://host:1"}, "recorder_address.*give HOST:PORT"),
        ({"recorder_address": "::1:1"}, "recorder_address.*give HOST:PORT"),
        (
            {"recorder_address": "host:1", "recorder": {"listen_port": "1"}, "recorders": 2},
            "recorders has no meaning",
        ),
        (
            {"recorder_address": "host:1", "recorder": {"listen_port": "1"}, "ray": "head:1"},
            "ray has no meaning",
        ),
    ],
)
def test_boxes_of_harbor_need_an_address_that_leads_to_one_recorder(settings, message):
    with pytest.raises(InputError, match=message):
        RolloutConfig.of({"runtime": "harbor", **settings}).options()


@pytest.mark.parametrize("port", ["abc", "65536", "-1", ""])
def test_a_port_of_the_recorder_that_is_none_is_refused_before_it_starts(port):
    with pytest.raises(InputError, match=f"listen_port is '{port}': give a number up to 65535"):
        RolloutConfig.of({"recorder": {"listen_port": port}})
    assert RolloutConfig.of({"recorder": {"listen_port": ["8899"]}})
