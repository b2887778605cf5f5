"""Linear attention on packed rows, and the chunks in which layers compute long ones."""

import copy
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
    pack_of,
    packed_pass,
    plain_pass,
    small_model,
)

ROWS = branching_rows()[::3]
"""Some of the rows: a group's prompt, twins, several roots and branches at any place."""
RULE = "torch_chunk_gated_delta_rule"
MAMBA = {"n_groups": 2, "state_size": 8, "num_heads": 8, "head_dim": 16, "chunk_size": 32}
MAMBA_LAYER = {"mamba_n_groups": 1, "mamba_d_state": 8}
HYBRIDS: dict[str, dict[str, Any]] = {
    "Lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "Mamba2": MAMBA | {"num_hidden_layers": 2},
    "OlmoHybrid": LINEAR | {"linear_num_key_heads": 4},
    "KimiLinear": {
        **LATENT,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 16,
    },
    "FalconH1": MAMBA_LAYER | {"mamba_d_ssm": 64, "mamba_n_heads": 4},
    "Bamba": MAMBA_LAYER | {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
}
"""Families with mixers of other kinds, and their fields beside the common ones."""


def hybrid(family: str) -> Any:
    config = getattr(transformers, f"{family}Config")(**COMMON | HYBRIDS[family])
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).float().eval()


def two_layers(*kinds: str) -> Any:
    fields = {"num_hidden_layers": 2, "layer_types": [*kinds]}
    return prepare(small_model("qwen3.5", **fields), 1.0).train()


@pytest.fixture
def qwen() -> Any:
    return two_layers("linear_attention", "full_attention")


def assert_close(found: Any, wanted: Any, logprobs: float, gradient: float) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=logprobs)
    assert (found[2] - wanted[2]).norm() < gradient * wanted[2].norm()


@pytest.mark.parametrize("family", cases(HYBRIDS, 0, 1))
def test_mixers_of_other_kinds_give_what_each_row_alone_gives(family, chunks_of):
    model = hybrid(family)
    pack, weights = pack_of(ROWS)
    wanted = plain_pass(model, ROWS, weights)
    prepare(model, 1.0)
    model.activation_checkpointing_enable()
    for chunk in (linear.CHUNK, 100):
        chunks_of(chunk)
        found = packed_pass(model.train(), pack, weights)
        assert_close(found, wanted, 1e-4, 2e-5)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_chunks_of_a_row_give_what_the_whole_row_gives(qwen, checkpointed, chunks_of):
    if checkpointed:
        qwen.activation_checkpointing_enable()
    trunk = list(range(9))
    branches = [[], [50, 51, 52], [60, 61]]
    ids = [trunk + branch for branch in branches]
    ids += [[*trunk[:3], 70, 71, 72, 73], [80, 81]]
    pack, weights = pack_of([make_row(each) for each in ids])
    whole = packed_pass(qwen, pack, weights)
    # the convolution of a chunk of two tokens reads inputs of two earlier ones
    for chunk in (7, 2):
        chunks_of(chunk)
        assert_close(packed_pass(qwen, pack, weights), whole, 1e-3, 1e-3)


def test_chunks_of_experts_with_scores_give_what_the_whole_row_gives(chunks_of):
    one_layer = small_model("gpt-oss", num_hidden_layers=1, layer_types=["full_attention"])
    model = prepare(one_layer, 1.0)
    pack, weights = pack_of(ROWS)
    whole = packed_pass(model, pack, weights)
    chunks_of(100)
    assert_close(packed_pass(model, pack, weights), whole, 1e-4, 1e-5)


def test_a_copy_of_a_model_computes_with_its_own_weights(qwen):
    other = copy.deepcopy(qwen)
    pack, weights = pack_of(ROWS[:1])
    before, *_ = packed_pass(qwen, pack, weights)
    with torch.no_grad():
        for layer in other.model.layers:
            layer.mlp.down_proj.weight.zero_()
    vars(other).pop("forward")  # TRL's head, which knows the model that it was made for
    assert not torch.equal(other(input_ids=pack.ids).logits, qwen(input_ids=pack.ids).logits)
    after, *_ = packed_pass(qwen, pack, weights)
    assert torch.equal(after, before)


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that are made and still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return made

    def add(self, storage: Any) -> None:
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.remove, storage._cdata, storage.nbytes())

    def remove(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def bytes_of_a_token(model: Any) -> float:
    """Bytes that a step holds for each further token of a row."""
    peaks = []
    random = np.random.default_rng(0)
    for length in (512, 1024):
        pack, weights = pack_of([make_row(random.integers(0, 200, length), range(1, 9))])
        pack.inputs()
        with Live() as live:
            packed_pass(model, pack, weights)
        peaks.append(live.peak)
        del pack
    return (peaks[1] - peaks[0]) / 512


def test_the_memory_of_a_long_row_is_that_of_its_checkpoints_and_one_chunk(chunks_of):
    model = two_layers("linear_attention", "linear_attention")
    model.activation_checkpointing_enable()
    whole = bytes_of_a_token(model)
    chunks_of(64)
    checkpoints = 4 * len(model.model.layers) * COMMON["hidden_size"]  # bytes in float32
    assert bytes_of_a_token(model) < checkpoints + whole / 3


def test_segments_of_a_level_are_computed_together(qwen, monkeypatch):
    shapes = []
    rule = getattr(modeling_qwen3_5, RULE)
    stock = rule.of_the_library

    def counted(query, *args, **options):
        shapes.append(tuple(query.shape[:2]))
        return stock(query, *args, **options)

    monkeypatch.setattr(rule, "of_the_library", counted)
    monkeypatch.setattr(rule, "knows_lengths", False)
    rows = []
    for number in range(30):
        ids = [*range(70), *[100 + number] * (1 + number % 3), 5]
        rows.append(make_row(ids, range(70, len(ids))))
    with torch.no_grad():
        qwen(**Pack([rows]).inputs())
    assert shapes == [(1, 70), (10, 1), (10, 2), (10, 4)]


@pytest.mark.parametrize("length", [1, 2, 3, 17, 63, 64, 65, 200, 513, 1025, 5000, 16384])
def test_a_piece_is_padded_by_little(length):
    padded = linear.padded_length(length)
    assert padded >= length
    if length <= linear.FORMULA_CHUNK:
        assert padded < 2 * length
    else:
        assert padded - length < length / 4 + linear.FORMULA_CHUNK


def attended(dtype, autocast):
    """Return the output and the state of the rule, and the gradient of the keys."""
    random = torch.Generator().manual_seed(0)
    query = torch.randn(2, 70, 2, 8, generator=random).to(dtype)
    key = torch.randn(2, 70, 2, 8, generator=random).to(dtype).requires_grad_()
    value = torch.randn(2, 70, 4, 8, generator=random).to(dtype)
    g = -torch.rand(2, 70, 4, generator=random)
    beta = torch.rand(2, 70, 4, generator=random).to(dtype)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    with autocast:
        out, state = getattr(modeling_qwen3_5, RULE)(query, key, value, g=g, beta=beta, **options)
    (out.float().sum() + state.sum()).backward()
    return out.detach(), state.detach(), key.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_linear_attention_is_that_of_float32(dtype, monkeypatch):
    prepare(small_model("qwen3.5"), 1.0)
    low = torch.autocast("cpu", torch.bfloat16)
    wanted = attended(dtype, nullcontext())
    for one, other in zip(attended(dtype, low), wanted, strict=True):
        assert torch.equal(one, other)
    # not by itself
    monkeypatch.setattr(modeling_qwen3_5, RULE, getattr(modeling_qwen3_5, RULE).of_the_library)
    assert not torch.equal(attended(dtype, low)[1], wanted[1])


def test_functions_of_the_library_are_wrapped_once():
    for _ in range(2):
        prepare(small_model("qwen3.5"), 1.0)
    for name in (linear.CONVOLUTION, RULE):
        wrapped = getattr(modeling_qwen3_5, name)
        assert not hasattr(wrapped.of_the_library, "of_the_library")
