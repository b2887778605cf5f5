"""fla's kernels of linear attention, interpreted on the CPU, against transformers' formula.

Where fla is installed, transformers takes its kernels everywhere. So it is in an environment of its
own: tests/run.sh runs this file there.
"""

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip(
    "fla", reason="fla is in an environment of its own, where tests/run.sh runs this"
)

from fla.ops.common import chunk_delta_h
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner

from rolltap.trainer.training.plan.stand_ins import fla_delta_rule
from rolltap.trainer.training.step import linear
from rolltap.trainer.training.step.model import prepare
from tests.deep import cases
from tests.trainer.training.step.small_models import (
    COMMON,
    VOCABULARY,
    Passed,
    make_row,
    pack_of,
    packed_pass,
    plain_pass,
)

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


def call(rule: Any, given: dict[str, Tensor], **options: Any) -> Any:
    names = ("query", "key", "value")  # which fla takes by their places
    named = {name: x for name, x in given.items() if name not in names}
    options |= {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return rule(*map(given.get, names), **named, **options)


def attended(rule: Any, given: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """The output, the last state, and the gradients of a loss that weighs each value."""
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    out, state = call(rule, leaves, **options)
    assert (out.grad_fn.name() == "ChunkGatedDeltaRuleFunctionBackward") == (rule is KERNEL)
    ((out * given["value"]).sum() + (state * given["initial_state"]).sum()).backward()
    found = {name: leaf.grad for name, leaf in leaves.items()}
    return {"out": out.detach(), "state": state.detach(), **found}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert (found[name] - one).norm() <= 1e-5 * one.norm(), name


def test_outputs_states_and_gradients_are_those_of_the_formula():
    given = inputs(1, 70)
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


@pytest.mark.parametrize(("dtype", "begins"), [(torch.float32, False), (torch.bfloat16, True)])
def test_the_stand_in_of_a_plan_saves_all_tensors_that_the_kernel_saves(dtype, begins):
    given = inputs(2, 70)
    for name in ("query", "key", "value", "beta"):
        given[name] = given[name].to(dtype)
    if not begins:
        del given["initial_state"]
    for name in ("query", "key", "value"):
        given[name].requires_grad_()

    def saved(rule: Any) -> Counter[Any]:
        found: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(found.append, lambda _: None):
            call(rule, given)
        # fla names beta twice
        once = {x.data_ptr(): (str(x.dtype), *x.shape) for x in found}
        return Counter(once.values())

    missing = saved(KERNEL) - saved(fla_delta_rule)
    assert not missing


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


def by_name(model: Any, passed: Passed) -> dict[str, Tensor]:
    """Return the log-probabilities, and the gradient of each parameter."""
    logprobs, _, gradient = passed
    names, parameters = zip(*model.named_parameters(), strict=True)
    parts = gradient.split([parameter.numel() for parameter in parameters])
    return {"logprobs": logprobs, **dict(zip(names, parts, strict=True))}


@pytest.mark.parametrize("chunk", cases([16, linear.CHUNK]))
def test_a_packed_row_gives_what_each_row_alone_gives_by_the_formula(chunk, chunks_of, monkeypatch):
    random = np.random.default_rng(0)
    prompt = random.integers(0, VOCABULARY, 20)
    rows = []
    for length in (4, 6):
        ids = np.concatenate([prompt, random.integers(0, VOCABULARY, length)])
        rows.append(make_row(ids, range(21, len(ids))))
    pack, _ = pack_of(rows)
    weights = pack.mask.float()
    model = prepare(small(), 1.0)
    rule = modeling_qwen3_5.torch_chunk_gated_delta_rule
    assert rule.of_the_library is KERNEL
    chunks_of(chunk)
    found = packed_pass(model, pack, weights)
    assert rule.knows_lengths

    monkeypatch.setattr(modeling_qwen3_5, KERNEL.__name__, FORMULA)
    wanted = plain_pass(model, rows, weights)
    assert_close(by_name(model, found), by_name(model, wanted))
