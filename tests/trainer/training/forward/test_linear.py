"""Linear attention as transformers has it: in float32 under autocast, for a training and for its plan."""

from contextlib import nullcontext

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from rolltap.trainer.training.dry_run.model import model_numbers
from rolltap.trainer.training.forward.linear import FLA_CHUNK, GATED_DELTA_RULE, as_fla_saves
from rolltap.trainer.training.grpo.config import TraceGRPOConfig
from rolltap.trainer.training.grpo.forward import Forward
from rolltap.trainer.training.recipe import Recipe
from tests.trainer.training.grpo.tiny_models import FAMILIES, bf16, tiny

HEADS = 2
VALUE_HEADS = 4
SIZE = 8
TOKENS = 70


@pytest.fixture(autouse=True)
def _of_the_library(monkeypatch):
    """Undo for a test what others have done to the module of the library."""
    rule = getattr(modeling_qwen3_5, GATED_DELTA_RULE)
    monkeypatch.setattr(modeling_qwen3_5, GATED_DELTA_RULE, getattr(rule, "of_the_library", rule))


OPTIONS = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}


def inputs(dtype):
    """Random tokens of `dtype`. Keys have a gradient."""
    random = torch.Generator().manual_seed(0)
    heads = {"query": HEADS, "key": HEADS, "value": VALUE_HEADS}
    given = {name: torch.randn(2, TOKENS, n, SIZE, generator=random).to(dtype) for name, n in heads.items()}
    given["g"] = -torch.rand(2, TOKENS, VALUE_HEADS, generator=random)
    given["beta"] = torch.rand(2, TOKENS, VALUE_HEADS, generator=random).to(dtype)
    given["key"].requires_grad_()
    return given


def attended(dtype, autocast=nullcontext):
    """The output and the state of the rule, and the gradient of the keys."""
    given = inputs(dtype)
    with autocast():
        out, state = getattr(modeling_qwen3_5, GATED_DELTA_RULE)(**given, **OPTIONS)
    (out.float().sum() + state.sum()).backward()
    return out.detach(), state.detach(), given["key"].grad


def train(folder):
    args = TraceGRPOConfig(output_dir=str(folder), use_cpu=True, forward="padded")
    Forward(tiny("qwen3.5"), bf16, args)


def plan(folder):
    FAMILIES["qwen3.5"][1].save_pretrained(folder)
    model_numbers(Recipe(model=folder, steps=1), "bfloat16")


@pytest.mark.parametrize("prepare", [train, plan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_linear_attention_is_that_of_float32(prepare, dtype, tmp_path):
    wanted = attended(dtype)
    assert not torch.equal(attended(dtype, bf16)[1], wanted[1])
    prepare(tmp_path)
    for one, other in zip(attended(dtype, bf16), wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flas_kernel_has_a_stand_in_that_saves_what_fla_saves(dtype):
    wanted = [(x.shape, x.dtype) for x in attended(dtype)[:2]]
    saved = []
    with as_fla_saves(tiny("qwen3.5")), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
        found = getattr(modeling_qwen3_5, GATED_DELTA_RULE)(**inputs(dtype), **OPTIONS)
    assert [(x.shape, x.dtype) for x in found] == wanted
    keys, values = HEADS * SIZE, VALUE_HEADS * SIZE
    each = 2 * keys + values + VALUE_HEADS + VALUE_HEADS * FLA_CHUNK  # queries, keys, values, beta, matrices
    floats = 2 * HEADS + VALUE_HEADS  # norms of queries and keys, sums of g
    assert sum(x.nbytes for x in saved) == 2 * TOKENS * (each * dtype.itemsize + 4 * floats)
