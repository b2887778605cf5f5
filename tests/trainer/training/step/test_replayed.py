"""The trainer with recorded experts: those of the model itself, and others."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rolltap.addons.errors import InputError
from tests.trainer.training.step.tiny import (
    HEADS,
    SIZES,
    VOCABULARY,
    largest_difference,
    make_trainer,
    record,
    trained,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    words = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "initializer_range": 0.2,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | HEADS | words | experts)).eval()


@torch.no_grad()
def own_experts(model, ids):
    """The experts that the model chooses, as vLLM returns them."""
    layers = []
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [
        router.register_forward_hook(lambda *call: layers.append(call[-1][-1].numpy()))
        for router in routers
    ]
    model(input_ids=torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return np.stack(layers, 1).astype(np.int16)[:-1]


@pytest.fixture(scope="module")
def traces(model):
    found = record(model, random.Random(0))
    return [
        replace(each, routing=own_experts(model, each.prompt_ids + each.completion_ids))
        for each in found
    ]


@pytest.mark.parametrize("forward", ["packed", "padded"])
def test_the_models_own_experts_change_nothing_and_others_count_as_different(
    model, traces, tmp_path, forward
):
    options = {"forward": forward, "activation_checkpointing": True}
    plain = trained(model, tmp_path, traces, **options)
    same = trained(model, tmp_path, traces, routing="recorded", **options)
    assert largest_difference(plain.spy.gradients[0], same.spy.gradients[0]) < 1e-5
    [logged] = [line for line in same.state.log_history if "routing/differs" in line]
    assert (logged["routing/differs"], logged["routing/difference_before"] < 1e-4) == (0, True)
    moved = [replace(trace, routing=(trace.routing + 1) % 4) for trace in traces]
    other = trained(model, tmp_path, moved, routing="recorded", beta=0.1, **options)
    [logged] = [line for line in other.state.log_history if "routing/differs" in line]
    assert logged["routing/differs"] > 0.5
    assert logged["routing/difference_before"] < 1e-4 < logged["difference_max"]
    assert largest_difference(plain.spy.gradients[0], other.spy.gradients[0]) > 1e-3


def test_traces_without_experts_are_refused(model, traces, tmp_path):
    trainer = make_trainer(
        model, tmp_path, [replace(trace, routing=None) for trace in traces], routing="recorded"
    )
    with pytest.raises(InputError, match="routing=True"):
        trainer.train()
