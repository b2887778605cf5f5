"""The probe: which models may run packed rows, and why others may not."""

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import pad
from transformers import (
    Llama4ForCausalLM,
    Llama4TextConfig,
    MambaConfig,
    MambaForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from rolltap.addons.errors import InputError
from rolltap.trainer.training.step.model import prepare, run_as_served
from rolltap.trainer.training.step.pack import Pack
from rolltap.trainer.training.step.probe import BRANCHES, TRUNK, probe
from tests.deep import cases
from tests.trainer.training.step.gloo import run_ranks
from tests.trainer.training.step.small_models import (
    COMMON,
    FAMILIES,
    VOCABULARY,
    configuration,
    small_model,
)


def bf16():
    return torch.autocast("cpu", torch.bfloat16)


def prepared(family, **fields):
    return prepare(small_model(family, **fields), 1.0).train()


@pytest.fixture
def qwen():
    return prepared("qwen3")


in_each_precision = pytest.mark.parametrize(
    "autocast", [nullcontext, bf16], ids=["float32", "bf16"]
)


@in_each_precision
@pytest.mark.parametrize("family", cases(FAMILIES, 0, 1, 2))
def test_the_families_that_are_trained_may_run_packed(family, autocast):
    assert probe(prepared(family), autocast) is None


def test_weights_of_16_bits_and_checkpointed_layers_may_run_packed():
    model = prepared("qwen3.5").bfloat16()
    model.activation_checkpointing_enable()
    assert probe(model, nullcontext) is None


def test_a_model_that_also_sees_images_may_run_packed():
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
    }
    config = Qwen3_5Config(text_config=configuration("qwen3.5").to_dict(), vision_config=vision)
    model = Qwen3_5ForConditionalGeneration(config).float()
    assert probe(prepare(model, 1.0), nullcontext) is None


def test_a_model_with_an_adapter_is_as_before_afterwards(qwen):
    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.5)
    model = get_peft_model(qwen, adapter)
    run_as_served(model)
    trained = {}
    weights = {}
    for name, weight in model.named_parameters():
        trained[name] = weight.requires_grad
        weights[name] = weight.clone()
    training = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    assert probe(model, nullcontext) is None
    for name, weight in model.named_parameters():
        assert weight.requires_grad == trained[name], name
        assert weight.grad is None, name
        assert torch.equal(weight, weights[name])
    assert [module.training for module in model.modules()] == training
    assert torch.equal(torch.get_rng_state(), random)
    assert not model.get_input_embeddings()._forward_hooks


def leaking(family):
    """Return a model whose first layer mixes each token with the one before it, without an
    error."""

    def mix(module, arguments):
        return arguments[0] + pad(arguments[0], (0, 0, 1, -1))

    model = prepared(family)
    model.model.layers[0].mlp.register_forward_pre_hook(mix)
    return model


LEAKING = [("qwen3", nullcontext), ("gemma3", bf16), ("qwen3", bf16), ("gemma3", nullcontext)]


@pytest.mark.parametrize(("family", "autocast"), cases(LEAKING, 0, 1))
def test_a_layer_that_mixes_each_token_with_the_one_before_it_is_noticed(family, autocast):
    assert "differ" in probe(leaking(family), autocast)


def test_linear_attention_that_is_not_known_is_noticed():
    config = MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        state_size=4,
        initializer_range=0.2,
    )
    assert probe(prepare(MambaForCausalLM(config), 1.0), nullcontext)
    model = prepared("qwen3.5")
    for layer in model.model.layers[:3]:
        del layer.linear_attn.forward
    assert probe(model, nullcontext)


@in_each_precision
def test_keys_without_their_gradient_are_noticed(qwen, autocast):
    def cut(module, arguments, keys):
        if keys.shape[1] > TRUNK + max(BRANCHES):
            return keys.detach()
        return keys

    for layer in qwen.model.layers:
        layer.self_attn.k_proj.register_forward_hook(cut)
    assert "the gradient through earlier tokens differs" in probe(qwen, autocast)


WITHOUT_GRADIENT = [(False, bf16), (True, nullcontext), (False, nullcontext), (True, bf16)]


@pytest.mark.parametrize(("adapter", "autocast"), cases(WITHOUT_GRADIENT, 0, 1))
def test_weights_without_their_gradient_are_noticed(qwen, adapter, autocast, monkeypatch):
    model = qwen
    body = qwen.model
    if adapter:
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    assert probe(model, autocast) is None
    last = [weight for weight in body.layers[-1].parameters() if weight.requires_grad]
    inputs = Pack.inputs

    def cut(pack):
        """As with casts of weights that were made without a gradient."""
        for weight in last:
            weight.requires_grad_(False)
        return inputs(pack)

    def uncut(*_):
        for weight in last:
            weight.requires_grad_(True)

    monkeypatch.setattr(Pack, "inputs", cut)
    body.register_forward_hook(uncut)
    assert "the gradient of the parameters differs by 1 " in probe(model, autocast)


@in_each_precision
def test_a_window_that_is_not_seen_is_noticed(autocast):
    model = prepared("gemma3")
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
        layer.self_attn.is_sliding = False
    assert "log-probabilities differ" in probe(model, autocast)


def test_a_mask_that_is_neither_causal_nor_a_window_is_refused():
    fields = {
        "num_hidden_layers": 1,
        "intermediate_size_mlp": 64,
        "num_local_experts": 2,
        "attention_chunk_size": 16,
    }
    model = Llama4ForCausalLM(Llama4TextConfig(**COMMON | fields))
    assert probe(prepare(model, 1.0), nullcontext)


@pytest.mark.parametrize(
    ("family", "autocast"), [("qwen3", nullcontext), ("qwen3", bf16), ("qwen3.5", nullcontext)]
)
def test_positions_that_do_not_begin_again_at_a_branch_are_noticed(family, autocast):
    def count(module, arguments):
        hidden, positions = arguments
        return hidden, torch.arange(hidden.shape[1]).expand_as(positions)

    model = prepared(family)
    model.model.rotary_emb.register_forward_pre_hook(count)
    assert "differ" in probe(model, autocast)


def test_virtual_tokens_of_an_adapter_are_noticed():
    prefix = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    assert probe(get_peft_model(prepared("llama"), prefix), nullcontext)


def test_too_little_memory_is_an_error_and_no_reason(qwen):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    qwen.model.register_forward_hook(full)
    with pytest.raises(InputError, match="not enough memory to check"):
        probe(qwen, nullcontext)
    assert qwen.training


def test_plain_rows_run_one_at_a_time(qwen):
    rows = []

    def note(module, arguments, options):
        rows.append(len(options["input_ids"]))

    qwen.model.register_forward_pre_hook(note, with_kwargs=True)
    assert probe(qwen, nullcontext) is None
    assert rows == [1] * (1 + 2 * 4)


def shard(model):
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_each_process_probes_its_part_of_a_sharded_model():
    def probe_both(rank):
        fine = prepared("qwen3.5", num_hidden_layers=2)
        fine.activation_checkpointing_enable()
        return probe(shard(fine), nullcontext), probe(shard(leaking("qwen3")), nullcontext)

    for fine, leaks in run_ranks(probe_both):
        assert fine is None
        assert "differ" in leaks
