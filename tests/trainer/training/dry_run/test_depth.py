"""Costs of deep models from a few layers."""

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict

import pytest
from peft import LoraConfig, inject_adapter_in_model

from rolltap.trainer.training.dry_run.model import of_all_layers
from rolltap.trainer.training.forward.sizes import measure
from tests.trainer.training.grpo.tiny_models import FAMILIES


def deep(family, layers):
    """A tiny model of a family with more layers."""
    kind, config = FAMILIES[family]
    config = deepcopy(config)
    types = getattr(config, "layer_types", None)
    config.num_hidden_layers = layers
    if types:
        config.layer_types = (types * layers)[:layers]
    return kind(config).float().train()


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning:peft")  # experts are parameters, which all-linear leaves out
@pytest.mark.parametrize("lora", [{}, {"r": 2}], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_costs_of_few_layers_are_those_of_all(family, lora):
    model = deep(family, 16)
    if lora:
        inject_adapter_in_model(LoraConfig(**lora, target_modules="all-linear"), model)
    measured = []

    def measured_here():
        measured.append(len(model.get_decoder().layers))
        return measure(model, nullcontext)

    found = of_all_layers(model, measured_here)
    assert sum(measured) < 16
    assert len(model.get_decoder().layers) == model.config.num_hidden_layers == 16
    whole = asdict(measure(model, nullcontext))
    assert asdict(found) == pytest.approx(whole, rel=1e-6)


def test_a_model_of_few_layers_is_measured_as_it_is():
    model = deep("qwen3", 2)
    assert of_all_layers(model, lambda: len(model.get_decoder().layers)) == 2
