"""The probe: which models may run as segments, and why others may not."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MambaConfig,
    MambaForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from rolltap.addons.errors import InputError
from rolltap.trainer.training.forward import caches
from rolltap.trainer.training.forward.decoder import Decoder
from rolltap.trainer.training.forward.passes import Grove, SegmentScorer
from rolltap.trainer.training.forward.paths import Batch, Paths
from rolltap.trainer.training.forward.probe import BRANCHES, TRUNK, probe
from tests.deep import cases
from tests.trainer.training.grpo.tiny_models import COMMON, FAMILIES, VOCABULARY, bf16, tiny

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


in_each_precision = pytest.mark.parametrize("autocast", [nullcontext, bf16], ids=["float32", "bf16"])


@pytest.mark.parametrize(
    ("family", "autocast", "keep_graph"),
    # short: each family, and of the first and the hybrid one both precisions and modes
    cases(product(FAMILIES, [nullcontext, bf16], [False, True]), 0, 3, 5, 10, 12, 19, 21, 22),
)
def test_the_families_that_are_trained_may_run_as_segments(family, autocast, keep_graph):
    assert probe(tiny(family), autocast, keep_graph=keep_graph) is None


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_new_weights_may_run_as_segments(family):
    kind, config = FAMILIES[family]
    torch.manual_seed(0)
    assert probe(kind(config), nullcontext) is None
    assert probe(kind(config).bfloat16(), nullcontext) is None


def test_a_model_with_an_adapter_is_as_before_afterwards():
    model = get_peft_model(tiny("qwen3"), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.base_model.model.model.layers[1].eval()
    trained = [p for p in model.parameters() if p.requires_grad]
    trained[0].grad = gradient = torch.ones_like(trained[0])
    before = [(name, p.requires_grad, p.clone(), p.grad) for name, p in model.named_parameters()]
    training = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    assert probe(model, nullcontext) is None
    assert trained[0].grad is gradient
    assert torch.equal(gradient, torch.ones_like(gradient))
    for (name, requires_grad, value, grad), (_, p) in zip(before, model.named_parameters(), strict=True):
        assert p.requires_grad == requires_grad, name
        assert p.grad is grad, name
        assert torch.equal(p, value)
    assert [module.training for module in model.modules()] == training
    assert torch.equal(torch.get_rng_state(), random)
    assert not model.get_input_embeddings()._forward_hooks


@in_each_precision
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3.5"])
def test_a_cache_that_cuts_the_gradient_is_noticed(family, autocast, monkeypatch):
    monkeypatch.setattr(Paths, "add", lambda *args: None)
    monkeypatch.setattr(Grove, "_add", lambda *args: None)
    assert "the gradient through earlier tokens differs by 1 " in (probe(tiny(family), autocast) or "")


@pytest.mark.parametrize("keep_graph", [False, True], ids=["two passes", "one pass"])
@in_each_precision
@pytest.mark.parametrize("adapter", [False, True], ids=["all weights", "adapter"])
def test_weights_without_their_gradient_are_noticed(adapter, autocast, keep_graph, monkeypatch):
    run = Decoder.run
    model = tiny("qwen3")
    if adapter:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

    def cut(self, *args, **options):
        """As with casts of weights that were made without a gradient."""
        last = [p for p in self.body.layers[-1].self_attn.parameters() if p.requires_grad]
        mlp = [p for p in self.body.layers[-1].mlp.parameters() if p.requires_grad]
        for parameter in last + mlp:
            parameter.requires_grad_(False)
        found = run(self, *args, **options)
        for parameter in last + mlp:
            parameter.requires_grad_(True)
        return found

    assert probe(model, autocast, keep_graph=keep_graph) is None
    monkeypatch.setattr(Decoder, "run", cut)
    found = probe(model, autocast, keep_graph=keep_graph) or ""
    assert "the gradient of the parameters differs by 1 " in found


@in_each_precision
def test_a_window_that_is_not_seen_is_noticed(autocast, monkeypatch):
    monkeypatch.setattr(Batch, "tails", lambda *args: None)
    assert "log-probabilities differ" in (probe(tiny("gemma3"), autocast) or "")


def test_a_mask_that_is_neither_causal_nor_a_window_is_refused():
    shape = {"intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 16}
    model = Llama4ForCausalLM(Llama4TextConfig(**COMMON, **shape, num_hidden_layers=1))
    assert "mask of another kind" in (probe(model, nullcontext) or "")


def test_a_model_that_changes_its_cache_in_place_is_noticed(monkeypatch):
    monkeypatch.setattr(caches.LinearAttention, "update_conv_state", caches.LinearAttentionLayer.update_conv_state)
    monkeypatch.setattr(
        caches.LinearAttention, "update_recurrent_state", caches.LinearAttentionLayer.update_recurrent_state
    )
    assert probe(tiny("qwen3.5"), nullcontext)


# of the tiny Qwen3.5 they change little, less than bf16 does
@pytest.mark.parametrize(("family", "autocast"), [("qwen3", nullcontext), ("qwen3", bf16), ("qwen3.5", nullcontext)])
def test_positions_that_begin_again_in_each_segment_are_noticed(family, autocast, monkeypatch):
    model = tiny(family)
    forward = model.model.rotary_emb.forward
    monkeypatch.setattr(model.model.rotary_emb, "forward", lambda x, ids: forward(x, ids - ids.min()))
    assert "differ" in (probe(model, autocast) or "")


def test_too_little_memory_is_an_error_and_no_reason(monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = tiny("qwen3")
    monkeypatch.setattr(SegmentScorer, "__call__", full)
    with pytest.raises(InputError, match="not enough memory to check"):
        probe(model, nullcontext)
    assert model.training


def test_logits_are_computed_for_scored_tokens_and_rows_run_one_at_a_time():
    model = tiny("llama")
    heads, rows = [], []
    model.lm_head.register_forward_pre_hook(lambda module, inputs: heads.append(inputs[0].shape[:-1].numel()))
    model.model.register_forward_pre_hook(
        lambda module, args, options: rows.append(tuple(options["input_ids"].shape)), with_kwargs=True
    )
    assert probe(model, nullcontext) is None
    assert max(heads) <= sum(BRANCHES) + 10
    plain = [shape for shape in rows if shape[1] > TRUNK]
    assert len(plain) == 4
    assert all(height == 1 for height, _ in plain)


def test_a_model_whose_layers_have_two_kinds_of_state_is_refused():
    mamba = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 1}
    model = FalconH1ForCausalLM(FalconH1Config(**COMMON, num_hidden_layers=1, **mamba))
    assert "LinearAttentionAndFullAttentionLayer" in (probe(model, nullcontext) or "")


def test_a_model_whose_states_are_in_a_cache_of_its_own_is_noticed():
    model = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, state_size=4))
    assert "log-probabilities differ" in (probe(model, nullcontext) or "")


def test_virtual_tokens_of_an_adapter_are_noticed():
    model = get_peft_model(tiny("llama"), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    assert probe(model, nullcontext)


def test_a_model_that_also_sees_images_may_run_as_segments():
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(text_config=FAMILIES["qwen3.5"][1].to_dict(), vision_config=vision)
    assert probe(Qwen3_5ForConditionalGeneration(config).float(), nullcontext) is None
