"""Linear attention on packed rows, and the chunks in which layers compute long ones."""

import copy
import sys
import weakref
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.qwen3_5 import modeling_qwen3_5

from rolltap.trainer.training.step import linear
from rolltap.trainer.training.step.model import prepare
from rolltap.trainer.training.step.pack import Pack
from tests.deep import cases
from tests.trainer.training.step.small_models import (
    COMMON,
    LATENT,
    LINEAR,
    branching_rows,
    make_row,
    plain_pass,
    small_model,
    take_gradient,
)

ROWS = branching_rows()[::3]
"""Some of the rows: a group's prompt, twins, several roots and branches at any place."""
TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
RULE = "torch_chunk_gated_delta_rule"
MAMBA = {"n_groups": 2, "state_size": 8, "num_heads": 8, "head_dim": 16, "chunk_size": 32}
MAMBA_LAYER = {"mamba_n_groups": 1, "mamba_d_state": 8}
HYBRIDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"]}),
    "mamba2": ("Mamba2ForCausalLM", "Mamba2Config", MAMBA | {"num_hidden_layers": 2}),
    "olmo-hybrid": (
        "OlmoHybridForCausalLM",
        "OlmoHybridConfig",
        LINEAR | {"linear_num_key_heads": 4},
    ),
    "kimi-linear": (
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        LATENT
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"linear_num_heads": 4, "linear_head_dim": 16},
    ),
    "falcon-h1": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        MAMBA_LAYER | {"mamba_d_ssm": 64, "mamba_n_heads": 4},
    ),
    "bamba": (
        "BambaForCausalLM",
        "BambaConfig",
        MAMBA_LAYER | {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
    ),
}
"""Families with mixers of other kinds, as `small_models.FAMILIES` has them."""


def hybrid(family: str) -> Any:
    model, config, own = HYBRIDS[family]
    torch.manual_seed(0)
    return (
        getattr(transformers, model)(getattr(transformers, config)(**COMMON | own)).float().eval()
    )


def weights_of(pack: Pack) -> torch.Tensor:
    return torch.randn(pack.mask.shape, generator=torch.Generator().manual_seed(1)) * pack.mask


def run(model: Any, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities, and the gradient of their weighted sum."""
    logprobs = pack.unpack(model(**pack.inputs()).log_probs)
    (logprobs * weights_of(pack)).sum().backward()
    return logprobs.detach(), take_gradient(model)


def assert_close(found, wanted, logprobs: float, gradient: float) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=logprobs)
    assert (found[1] - wanted[1]).norm() < gradient * wanted[1].norm()


@pytest.mark.parametrize("family", cases(HYBRIDS, 0, 1))
def test_mixers_of_other_kinds_give_what_each_row_alone_gives(family, monkeypatch):
    model = hybrid(family)
    pack = Pack([[row] for row in ROWS])
    logprobs, _, gradient = plain_pass(model, ROWS, weights_of(pack))
    prepare(model, 1.0)
    model.activation_checkpointing_enable()
    for chunk in (linear.CHUNK, 100):
        monkeypatch.setattr(linear, "CHUNK", chunk)
        assert_close(run(model.train(), pack), (logprobs, gradient), 1e-4, 2e-5)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_chunks_of_a_row_give_what_the_whole_row_gives(checkpointed, monkeypatch):
    model = prepare(small_model("qwen3.5", **TWO_LAYERS), 1.0).train()
    if checkpointed:
        model.activation_checkpointing_enable()
    trunk = list(range(9))
    branches = [
        trunk,
        [*trunk, 50, 51, 52],
        [*trunk, 60, 61],
        [*trunk[:3], 70, 71, 72, 73],
        [80, 81],
    ]
    pack = Pack([[make_row(ids)] for ids in branches])
    whole = run(model, pack)
    # the convolution of a chunk of two tokens reads inputs of two earlier ones
    for chunk in (7, 2):
        monkeypatch.setattr(linear, "CHUNK", chunk)
        assert_close(run(model, pack), whole, 1e-3, 1e-3)


def test_chunks_of_experts_with_scores_give_what_the_whole_row_gives(monkeypatch):
    model = prepare(
        small_model("gpt-oss", num_hidden_layers=1, layer_types=["full_attention"]), 1.0
    )
    pack = Pack([[row] for row in ROWS])
    whole = run(model, pack)
    monkeypatch.setattr(linear, "CHUNK", 100)
    assert_close(run(model, pack), whole, 1e-4, 1e-5)


def test_a_copy_of_a_model_computes_with_its_own_weights():
    model = prepare(small_model("qwen3.5", **TWO_LAYERS), 1.0)
    other = copy.deepcopy(model)
    pack = Pack([ROWS[:1]])
    before = run(model, pack)
    with torch.no_grad():
        for layer in other.model.layers:
            layer.mlp.down_proj.weight.zero_()
    vars(other).pop("forward")  # TRL's head, which knows the model that it was made for
    ids = pack.ids
    assert not torch.equal(other(input_ids=ids).logits, model(input_ids=ids).logits)
    assert torch.equal(run(model, pack)[0], before[0])


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that are made and still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.untyped_storage()._cdata not in self._known
            ):
                storage = tensor.untyped_storage()
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return made

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def bytes_of_a_token(model: Any) -> float:
    """Bytes that a step holds for each further token of a row."""
    peaks = []
    random = np.random.default_rng(0)
    for length in (512, 1024):
        pack = Pack([[make_row(random.integers(0, 200, length), range(1, 9))]])
        pack.inputs()
        with Live() as live:
            run(model, pack)
        peaks.append(live.peak)
        del pack
    return (peaks[1] - peaks[0]) / 512


def test_the_memory_of_a_long_row_is_that_of_its_checkpoints_and_one_chunk(monkeypatch):
    fields = {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}
    model = prepare(small_model("qwen3.5", **fields), 1.0).train()
    model.activation_checkpointing_enable()
    whole = bytes_of_a_token(model)
    monkeypatch.setattr(linear, "CHUNK", 64)
    states = (
        4 * len(model.model.layers) * COMMON["hidden_size"]
    )  # bytes of the checkpoints in float32
    assert bytes_of_a_token(model) < states + whole / 3


def test_segments_of_a_level_are_computed_together(monkeypatch):
    model = prepare(small_model("qwen3.5", **TWO_LAYERS), 1.0)
    shapes = []
    rule = getattr(modeling_qwen3_5, RULE)
    stock = rule.of_the_library

    def counted(query, *args, **options):
        shapes.append(tuple(query.shape[:2]))
        return stock(query, *args, **options)

    monkeypatch.setattr(rule, "of_the_library", counted)
    monkeypatch.setattr(rule, "knows_lengths", False)
    trunk = list(range(70))
    branches = [trunk + [100 + number] * (1 + number % 3) + [5] for number in range(30)]
    with torch.no_grad():
        model(**Pack([[make_row(ids, range(70, len(ids)))] for ids in branches]).inputs())
    assert shapes == [(1, 70), (10, 1), (10, 2), (10, 4)]


@pytest.mark.parametrize("length", [1, 2, 3, 17, 63, 64, 65, 200, 513, 1025, 5000, 16384])
def test_a_piece_is_padded_by_little(length):
    padded = linear.padded_length(length)
    assert padded >= length
    if length <= linear.FORMULA_CHUNK:
        assert padded < 2 * length
    else:
        assert padded - length < length / 4 + linear.FORMULA_CHUNK


def attended(dtype, autocast=nullcontext):
    """The output and the state of the rule, and the gradient of the keys."""
    random = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, 70, heads, 8, generator=random).to(dtype) for heads in (2, 2, 4)
    )
    key.requires_grad_()
    g = -torch.rand(2, 70, 4, generator=random)
    beta = torch.rand(2, 70, 4, generator=random).to(dtype)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    with autocast():
        out, state = getattr(modeling_qwen3_5, RULE)(query, key, value, g=g, beta=beta, **options)
    (out.float().sum() + state.sum()).backward()
    return out.detach(), state.detach(), key.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_linear_attention_is_that_of_float32(dtype, monkeypatch):
    prepare(small_model("qwen3.5"), 1.0)
    wanted = attended(dtype)
    found = attended(dtype, lambda: torch.autocast("cpu", torch.bfloat16))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    # not by itself
    monkeypatch.setattr(modeling_qwen3_5, RULE, getattr(modeling_qwen3_5, RULE).of_the_library)
    assert not torch.equal(
        attended(dtype, lambda: torch.autocast("cpu", torch.bfloat16))[1], wanted[1]
    )


def test_functions_of_the_library_are_wrapped_once():
    for _ in range(2):
        prepare(small_model("qwen3.5"), 1.0)
    functions = vars(sys.modules[modeling_qwen3_5.__name__])
    for name in (linear.CONVOLUTION, RULE):
        assert not isinstance(functions[name].of_the_library, linear._Wrapped)
