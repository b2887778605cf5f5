"""Adapters on the experts of a layer: what they keep until the backward pass."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from rolltap.trainer.models.merging import merge_again
from tests.trainer.training.step.small_models import VOCABULARY, small_model

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def adapted(family, **config):
    torch.manual_seed(1)
    return get_peft_model(small_model(family), LoraConfig(r=2, init_lora_weights=False, **config))


def trained(model):
    """Return the gradients of a pass, and the bytes of large tensors that were kept for it."""
    kept = []

    def keep(tensor):
        if tensor.ndim == 3 and len(tensor) == 4:
            kept.append(tensor.nbytes)
        return tensor

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(input_ids=torch.arange(60)[None] % VOCABULARY).logits
        loss = logits.log_softmax(-1)[..., 7].sum()
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.clone()
    return gradients, sum(kept)


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_merged_experts_are_not_kept_and_gradients_are_the_same(family):
    model = adapted(family, target_modules=["q_proj"], **EXPERTS)
    before, kept = trained(model)
    experts = model.get_base_model().model.layers[0].mlp.experts.get_base_layer()
    one_layer = experts.gate_up_proj.nbytes + experts.down_proj.nbytes
    assert kept >= 2 * one_layer
    for _ in range(2):  # once more changes nothing
        assert merge_again(model) == one_layer + experts.gate_up_proj.nbytes
        after, kept = trained(model)
        assert kept < one_layer
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_other_adapters_are_left_alone():
    model = adapted("qwen3-moe", target_modules=["q_proj", "v_proj"])
    assert merge_again(model) == 0
