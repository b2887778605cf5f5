"""fla's kernels of linear attention, interpreted on the CPU, against transformers' formula.

Where fla is installed, transformers takes its kernels everywhere. So it is in an environment of its
own: tests/run.sh runs this file there.
"""

import os
from collections import Counter
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

if find_spec("fla"):
    os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
# Before transformers, which takes no package whose import fails: fla warns that there is no GPU.
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
from rolltap.trainer.training.step.pack import Pack
from tests.deep import cases
from tests.trainer.training.step.small_models import COMMON, VOCABULARY, make_row

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
    positional = [given.pop(name).requires_grad_() for name in ("query", "key", "value")]

    def saved(rule: Any) -> Counter[Any]:
        found: list[Tensor] = []
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        with torch.autograd.graph.saved_tensors_hooks(found.append, lambda _: None):
            rule(*positional, **given, **options)
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


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("chunk", cases([16, linear.CHUNK]))
def test_a_packed_row_gives_what_each_row_alone_gives_by_the_formula(chunk, monkeypatch):
    random = np.random.default_rng(0)
    prompt = random.integers(0, VOCABULARY, 20)
    rows = []
    for length in (4, 6):
        ids = np.concatenate([prompt, random.integers(0, VOCABULARY, length)])
        rows.append(make_row(ids, range(21, len(ids))))
    pack = Pack([[row] for row in rows])
    model = prepare(small(), 1.0)
    rule = modeling_qwen3_5.torch_chunk_gated_delta_rule
    assert rule.of_the_library is KERNEL
    monkeypatch.setattr(linear, "CHUNK", chunk)
    logprobs = pack.unpack(model(**pack.inputs()).log_probs)
    assert rule.knows_lengths
    logprobs.sum().backward()
    found = {"logprobs": logprobs.detach(), **gradients(model)}

    monkeypatch.setattr(modeling_qwen3_5, KERNEL.__name__, FORMULA)
    own = torch.zeros_like(logprobs)
    for i, row in enumerate(rows):
        ids = torch.from_numpy(row.ids).long()
        every = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        scored = every[row.scored - 1].gather(1, ids[row.scored][:, None])[:, 0]
        scored.sum().backward()
        own[i, : len(scored)] = scored
    wanted = {"logprobs": own.detach(), **gradients(model)}
    assert_close(found, wanted)
