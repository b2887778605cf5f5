"""The trainer with recorded experts: those of the model itself, and others."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from rolltap.addons.errors import InputError
from tests.trainer.training.step.small_models import small_model
from tests.trainer.training.step.tiny import SIZES, VOCABULARY, largest_difference, record


@pytest.fixture(scope="module")
def model():
    return small_model("qwen3-moe", vocab_size=VOCABULARY, **SIZES)


@torch.no_grad()
def own_experts(model, ids):
    """Return the experts that the model chooses, as vLLM returns them."""
    layers = []

    def note(router, arguments, output):
        layers.append(output[-1].numpy())

    routers = [layer.mlp.gate for layer in model.model.layers]
    hooks = [router.register_forward_hook(note) for router in routers]
    model(input_ids=torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return np.stack(layers, 1).astype(np.int16)[:-1]


@pytest.fixture(scope="module")
def recorded(model):
    traces = record(model, random.Random(0))
    for trace in traces:
        trace.routing = own_experts(model, trace.prompt_ids + trace.completion_ids)
    return traces


@pytest.mark.parametrize("forward", ["packed", "padded"])
def test_the_models_own_experts_change_nothing_and_others_count_as_different(
    train, recorded, forward
):
    options = {"forward": forward, "activation_checkpointing": True}
    moved = [replace(trace, routing=(trace.routing + 1) % 4) for trace in recorded]
    plain = train(recorded, **options)
    same = train(recorded, routing="recorded", **options)
    other = train(moved, routing="recorded", beta=0.1, **options)
    assert largest_difference(plain.spy.gradients[0], same.spy.gradients[0]) < 1e-5
    logged = same.state.log_history[0]
    assert logged["routing/differs"] == 0
    assert logged["routing/difference_before"] < 1e-4
    logged = other.state.log_history[0]
    assert logged["routing/differs"] > 0.5
    assert logged["routing/difference_before"] < 1e-4 < logged["difference_max"]
    assert largest_difference(plain.spy.gradients[0], other.spy.gradients[0]) > 1e-3


def test_traces_without_experts_are_refused(train, traces):
    with pytest.raises(InputError, match="routing=True"):
        train(traces, routing="recorded")
