"""The probe: which models may run as segments, and why others may not."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from rolltap.trainer.grpo import caches
from rolltap.trainer.grpo.probe import probe
from tests.trainer.grpo.tiny_models import COMMON, FAMILIES, VOCABULARY, tiny

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def bf16() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("autocast", [nullcontext, bf16], ids=["float32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_that_are_trained_may_run_as_segments(family, autocast):
    assert probe(tiny(family), autocast) is None


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_new_weights_may_run_as_segments(family):
    kind, config = FAMILIES[family]
    torch.manual_seed(0)
    assert probe(kind(config), nullcontext) is None
    assert probe(kind(config).bfloat16(), nullcontext) is None


def test_a_model_with_an_adapter_is_as_before_afterwards():
    model = get_peft_model(tiny("qwen3"), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.base_model.model.model.layers[1].eval()
    before = [(name, p.requires_grad, p.clone()) for name, p in model.named_parameters()]
    training = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    assert probe(model, nullcontext) is None
    for (name, requires_grad, value), (_, p) in zip(before, model.named_parameters(), strict=True):
        assert (p.requires_grad, p.grad) == (requires_grad, None), name
        assert torch.equal(p, value)
    assert [module.training for module in model.modules()] == training
    assert torch.equal(torch.get_rng_state(), random)
    assert not model.get_input_embeddings()._forward_hooks


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3.5"])
def test_a_cache_that_cuts_the_gradient_is_noticed(family, monkeypatch):
    layers = caches.Layers.cache

    def cut(self, ancestors, length, device):
        detached = [[[tuple(x.detach() for x in layer) for layer in state] for state in row] for row in ancestors]
        return layers(self, detached, length, device)

    monkeypatch.setattr(caches.Layers, "cache", cut)
    assert "the gradient through earlier tokens differs by 100%" in (probe(tiny(family), nullcontext) or "")


def test_a_model_that_changes_its_cache_in_place_is_noticed(monkeypatch):
    monkeypatch.setattr(caches.LinearAttention, "update_conv_state", caches.LinearAttentionLayer.update_conv_state)
    monkeypatch.setattr(
        caches.LinearAttention, "update_recurrent_state", caches.LinearAttentionLayer.update_recurrent_state
    )
    assert probe(tiny("qwen3.5"), nullcontext)


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_positions_that_begin_again_in_each_segment_are_noticed(family, monkeypatch):
    model = tiny(family)
    forward = model.model.rotary_emb.forward
    monkeypatch.setattr(model.model.rotary_emb, "forward", lambda x, ids: forward(x, ids - ids.min()))
    assert "differ" in (probe(model, nullcontext) or "")


def test_a_model_whose_layers_have_two_kinds_of_state_is_refused():
    model = FalconH1ForCausalLM(
        FalconH1Config(
            **COMMON, num_hidden_layers=1, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_state=8, mamba_n_groups=1
        )
    )
    assert "LinearAttentionAndFullAttentionLayer" in (probe(model, nullcontext) or "")


def test_a_model_without_attention_is_refused_with_its_own_error():
    model = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, state_size=4))
    assert "Error" in (probe(model, nullcontext) or "")


def test_virtual_tokens_of_an_adapter_are_noticed():
    model = get_peft_model(tiny("llama"), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    assert probe(model, nullcontext)


def test_a_model_that_also_sees_images_may_run_as_segments():
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(text_config=FAMILIES["qwen3.5"][1].to_dict(), vision_config=vision)
    assert probe(Qwen3_5ForConditionalGeneration(config).float(), nullcontext) is None
