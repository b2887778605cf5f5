"""Steps of tiny models on a GPU, by tensors without data: see `fake_cuda`.

torch checks these as on a GPU: devices that do not match, the rules of autocast, the schemas of the
kernels. `flash.check` has the conditions of the kernels themselves.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from trl.trainer.utils import add_fused_lm_head

from rolltap.trainer.training.forward import sizes
from rolltap.trainer.training.forward.forest import Row
from rolltap.trainer.training.forward.passes import PaddedScorer, SegmentScorer
from rolltap.trainer.training.forward.probe import probe
from rolltap.trainer.training.grpo.optimizer import ShardedOptimizer
from tests.trainer.training.forward import flash
from tests.trainer.training.forward.test_passes import row, tokens
from tests.trainer.training.grpo.tiny_models import FAMILIES

LOW = "bfloat16"
LAYERS = 2
TOP_K = 2


class Kernels(TorchDispatchMode):
    """Checks and counts the calls of attention's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = 0
        self.backward = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._flash_attention_forward.default:
            self.forward += 1
            flash.check(*args[:8])
        elif function is torch.ops.aten._flash_attention_backward.default:
            self.backward += 1
            flash.check(*args[1:4], *args[6:11])
            flash.check_backward(args[0], args[1], *args[4:6])
        else:
            assert "attention" not in function.name()
        return function(*args, **(kwargs or {}))


class Values(TorchDispatchMode):
    """Answers where a tensor's values matter: Python gets 0, and a mask chooses all."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            return 0.0
        if function is torch.ops.aten.index.Tensor:
            values, (mask, *_) = args
            if mask is not None and mask.dtype == torch.bool:
                assert mask.device == values.device
                return values.flatten(0, mask.ndim - 1)
        return function(*args, **(kwargs or {}))


def low_precision(device: str) -> Any:
    return torch.autocast(device, torch.bfloat16)


def branches() -> list[Row]:
    prompt = tokens(30, 0)
    return [row(prompt + tokens(n, n), range(31, 30 + n)) for n in (5, 9)]


def small(family: str, dtype: str, *, lora: bool) -> Any:
    """Return a model of a family on the meta device, with one layer of each kind."""
    kind, config = FAMILIES[family]
    config = copy.deepcopy(config)
    kinds = len(set(config.layer_types))
    config.num_hidden_layers = kinds
    config.layer_types = config.layer_types[-kinds:]
    with torch.device("meta"):
        model = kind(config).to(getattr(torch, dtype))
        if lora:
            targets = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, targets)
    return model


def on(device: str, model: Any) -> Any:
    """Return a meta model with tensors of torch's `FakeTensorMode`, within it."""
    model = model.to_empty(device=device).train()
    model.tie_weights()
    return model


def train(family: str, dtype: str, *, lora: bool = False, recorded: bool = False, **options: Any) -> None:
    """Take a step of a family's model with weights of `dtype`. `options` are the scorer's.

    With `recorded` the rows have the experts that an engine chose.
    """
    rows = branches()
    if recorded:
        rows = [replace(one, experts=np.zeros((len(one.ids) - 1, LAYERS, TOP_K), np.uint8)) for one in rows]
    model = small(family, dtype, lora=lora)
    autocast = partial(low_precision, "cuda") if dtype == LOW else nullcontext
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = on("cuda", model)
        names = {weight: name for name, weight in model.named_parameters() if weight.requires_grad}
        groups = [{"params": [*names]}]
        optimizer = ShardedOptimizer(groups, kind=torch.optim.AdamW, names=names, fused=True)
        with Kernels() as kernels:
            scores = SegmentScorer(autocast, 1.0, tokens_per_segment=32, **options)(model, rows)
            assert scores.logprobs.device.type == "cuda"
            assert scores.logprobs.dtype == torch.float32
            scores.logprobs.sum().backward()
        assert (kernels.forward > 0) == (dtype == LOW)
        assert (kernels.backward > 0) == (dtype == LOW)
        for name, weight in model.named_parameters():
            if not weight.requires_grad:
                assert weight.grad is None, f"{name} has a gradient"
                continue
            assert weight.grad is not None, f"{name} has no gradient"
            assert weight.grad.shape == weight.shape
            assert weight.grad.device == weight.device
            assert weight.grad.dtype == torch.float32
        optimizer.step()


def measure(family: str) -> None:
    """Compare the costs of a plan, which are measured on the CPU, with those of CUDA's kernels."""
    found = []
    for device in ("cpu", "cuda"):
        model = small(family, LOW, lora=True)
        with FakeTensorMode(allow_non_fake_inputs=True):
            costs = sizes.measure(on(device, model), partial(low_precision, device))
        found.append(asdict(costs))
    assert found[0] == pytest.approx(found[1], rel=0.01)


def examine(family: str) -> None:
    """Probe a model. An error would be a reason to run its traces as padded rows."""
    model = small(family, LOW, lora=False)
    with FakeTensorMode(allow_non_fake_inputs=True), Values():
        reason = probe(on("cuda", model), partial(low_precision, "cuda"))
    assert reason is None, reason


def pad(family: str) -> None:
    """Run padded rows."""
    model = small(family, LOW, lora=False)
    with FakeTensorMode(allow_non_fake_inputs=True), Values():
        model = on("cuda", model)
        add_fused_lm_head(model, temperature=1.0)
        scorer = PaddedScorer(partial(low_precision, "cuda"), torch.device("cuda"))
        scorer(model, branches()).logprobs.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


CASES: dict[str, Callable[[], None]] = {}
for family, dtype, lora in product(("qwen3", "qwen3.5"), (LOW, "float32"), (False, True)):
    name = f"{family}, {dtype}, {'LoRA' if lora else 'full'}"
    CASES[name] = partial(train, family, dtype, lora=lora)
CASES["windows"] = partial(train, "gemma3", LOW)
CASES["sinks and recorded experts"] = partial(train, "gpt-oss", LOW, recorded=True)
CASES["one pass"] = partial(train, "qwen3", LOW, keep_graph=True)
CASES["states in the CPU's memory"] = partial(train, "qwen3.5", LOW, offload_states=True)
CASES["memory"] = partial(measure, "qwen3.5")
CASES["probe"] = partial(examine, "qwen3")
CASES["padded rows"] = partial(pad, "qwen3")
