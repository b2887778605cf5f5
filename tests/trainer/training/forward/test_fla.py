"""fla's kernels of linear attention, interpreted on the CPU, against transformers' formula.

Where fla is installed, transformers takes its kernels everywhere. So it is in an environment of its
own: tests/run.sh runs this file there.
"""

import os
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

if find_spec("fla"):
    os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
# Before transformers, which takes no package whose import fails: fla warns that there is no GPU.
pytest.importorskip("fla", reason="fla is in an environment of its own, where tests/run.sh runs this")

from fla.ops.common import chunk_delta_h
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner

from rolltap.trainer.training.forward.linear import as_fla_saves
from tests.trainer.training.forward.test_passes import gradients, plain, row, scorer, tokens
from tests.trainer.training.grpo.tiny import relative_difference
from tests.trainer.training.grpo.tiny_models import COMMON

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

KERNEL = modeling_qwen3_5.torch_chunk_gated_delta_rule
FORMULA = KERNEL.__wrapped__
HEADS = {"keys": 1, "values": 2}
SIZE = 16


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    """Let triton take the first of several configurations: there is no GPU to time them on.

    The interpreter counts in Python's integers. fla calls methods of its counter, which a GPU has.
    """
    monkeypatch.setattr(Autotuner, "do_bench", lambda *args, **options: [1.0, 1.0, 1.0])

    def counted(*ends):
        return map(interpreter._implicit_cvt, range(*map(int, ends)))

    monkeypatch.setattr(chunk_delta_h, "range", counted, raising=False)


def inputs(rows: int, length: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    shape = (rows, length)
    keys = (*shape, HEADS["keys"], SIZE)
    return {
        "query": torch.randn(keys, generator=random),
        "key": torch.randn(keys, generator=random),
        "value": torch.randn(*shape, HEADS["values"], SIZE, generator=random),
        "g": -torch.rand(*shape, HEADS["values"], generator=random),
        "beta": torch.rand(*shape, HEADS["values"], generator=random),
        "initial_state": torch.randn(rows, HEADS["values"], SIZE, SIZE, generator=random),
    }


def attended(rule: Any, given: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """The output, the last state, and the gradients of a loss that weighs each value."""
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    positional = [leaves[name] for name in ("query", "key", "value")]
    named = {name: x for name, x in leaves.items() if name not in ("query", "key", "value")}
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, **options}
    out, state = rule(*positional, **named, **options)
    assert (out.grad_fn.name() == "ChunkGatedDeltaRuleFunctionBackward") == (rule is KERNEL)
    ((out * given["value"]).sum() + (state * given["initial_state"]).sum()).backward()
    found = {name: leaf.grad for name, leaf in leaves.items()}
    return {"out": out.detach(), "state": state.detach(), **found}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert relative_difference({name: one}, {name: found[name]}) < 1e-5, name


def test_outputs_states_and_gradients_are_those_of_the_formula():
    given = inputs(2, 70)
    assert_close(attended(KERNEL, given), attended(FORMULA, given))


def test_sequences_in_one_row_begin_with_states_of_their_own():
    ends = [0, 66, 78]
    given = inputs(1, ends[-1])
    given["initial_state"] = inputs(2, 1)["initial_state"]
    packed = attended(KERNEL, given, cu_seqlens=torch.tensor(ends))
    alone = []
    for i, (start, end) in enumerate(pairwise(ends)):
        one = {name: x[:, start:end] for name, x in given.items()}
        one["initial_state"] = given["initial_state"][i : i + 1]
        alone.append(attended(FORMULA, one))
    for name, found in packed.items():
        by_sequence = 0 if name in ("state", "initial_state") else 1
        wanted = torch.cat([one[name] for one in alone], by_sequence)
        assert_close({name: found}, {name: wanted})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("begins", [False, True], ids=["from zeros", "from a state"])
def test_the_stand_in_of_a_plan_saves_the_tensors_that_the_kernel_saves(dtype, begins):
    given = inputs(2, 70)
    for name in ("query", "key", "value", "beta"):
        given[name] = given[name].to(dtype)
    if not begins:
        del given["initial_state"]
    positional = [given.pop(name).requires_grad_() for name in ("query", "key", "value")]

    def saved() -> list[tuple[Any, ...]]:
        found = []
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        with torch.autograd.graph.saved_tensors_hooks(found.append, lambda _: None):
            modeling_qwen3_5.torch_chunk_gated_delta_rule(*positional, **given, **options)
        # fla names beta twice
        once = {x.data_ptr(): (str(x.dtype), *x.shape) for x in found}
        return sorted(once.values())

    by_kernel = saved()
    with as_fla_saves(small()):
        assert saved() == by_kernel


def small() -> Any:
    """A layer of linear attention, and one of attention."""
    sizes = {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": HEADS["keys"],
        "linear_num_value_heads": HEADS["values"],
        "linear_key_head_dim": SIZE,
        "linear_value_head_dim": SIZE,
    }
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**COMMON | sizes)).eval()
    # a state that lasts
    model.model.layers[0].linear_attn.A_log.data.fill_(-3.0)
    return model


def test_segments_hand_their_states_on(monkeypatch):
    prompt = tokens(20, 0)
    rows = [row(prompt + tokens(n, n), range(21, 20 + n)) for n in (4, 6)]
    model = small()
    scores = scorer(16)(model, rows)
    found = {"scores": scores.logprobs.detach(), **gradients(model, scores)}
    monkeypatch.setattr(modeling_qwen3_5, KERNEL.__name__, FORMULA)
    scores = plain(model, rows)
    wanted = {"scores": scores.logprobs.detach(), **gradients(model, scores)}
    assert_close(found, wanted)
