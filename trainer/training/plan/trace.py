"""Memory of a training step, traced: a forward and a backward pass of the very model, on tensors without values.

torch's `FakeTensorMode` has the shapes and types of all tensors, and no data, so a model of any size is traced on any
machine in seconds. Functions stand for kernels that run on a GPU alone, which allocate and save the same tensors.
"""

import sys
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations import hub_kernels, moe
from trl.kernels import chunked_logprob

from rolltap.trainer.training.step.linear import CHUNK, DELTA_RULES
from rolltap.trainer.training.step.pack import Pack, PaddedRows, Row

LENGTHS = (8192, 32768, 98304)
"""Tokens of the rows that are traced."""
FEW = 4096
"""Tokens with which torch's formula of linear attention is traced: a loop over 64 tokens."""
MOST_TOKENS = 2**30
"""Rows are not planned longer than this."""
ATTENTION = "rolltap_plan"
"""Name of the attention that stands for FlexAttention."""
FLA_CHUNK = 64
"""Tokens of a chunk of fla's kernel."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes that a step takes for rows of `LENGTHS`, besides weights, their gradients and the optimizer's state."""

    kept: list[int]
    """Between the forward and the backward pass: above all, the checkpoints of the layers."""
    peak: list[int]
    """At most."""
    on_host: list[int]
    """Checkpoints in the host's memory, but for a few layers."""

    def longest(self, memory: int) -> int:
        """Return the tokens of the longest row that takes at most `memory` bytes."""

        def peak(tokens: int) -> int:
            return at(self.peak, tokens)

        return max(0, bisect_right(range(MOST_TOKENS), memory, key=peak) - 1)


def at(traced: Sequence[int], tokens: int) -> int:
    """Return the value for a row of `tokens`: on the lines from 0 through the traced values, and beyond the last."""
    right = min(max(1, bisect_left((0, *LENGTHS), tokens)), len(LENGTHS))
    left = right - 1
    lengths = (0, *LENGTHS)
    values = (0, *traced)
    slope = (values[right] - values[left]) / (lengths[right] - lengths[left])
    return int(values[left] + slope * (tokens - lengths[left]))


class FakeStep:
    """Steps of a model without values. The model, which was on the meta device, is of no other use afterwards.

    Layers with parameters of the same shapes take the same. So steps are traced with the last layer of each kind, and
    with one more of a kind before these. All that are missing take what this one adds: with checkpointing, the input
    of a layer, which may rest elsewhere.
    """

    def __init__(self, model: Any, *, packed: bool, checkpointing: bool, low_precision: bool, fla: bool) -> None:
        """`model` is prepared. `low_precision` is autocast to bfloat16. `fla`: its kernels compute linear attention."""
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._packed = packed
        self._autocast = low_precision
        self._rules = delta_rules(model)
        model.set_attn_implementation(ATTENTION)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        with self._mode:
            self._model = model.to_empty(device="cpu").train()
            model.tie_weights()
        self._weights = [*model.parameters(), *model.buffers()]
        for weight in model.parameters():
            if weight.requires_grad:
                # gradients are counted by arithmetic
                weight.register_post_accumulate_grad_hook(_drop_gradient)
        self._decoder = model.get_decoder()
        self._layers = [*self._decoder.layers]
        self._types = getattr(self._decoder.config, "layer_types", None)
        kinds: dict[Any, list[int]] = {}
        for i, layer in enumerate(self._layers):
            shapes = tuple((name, weight.shape) for name, weight in layer.named_parameters())
            kinds.setdefault(shapes, []).append(i)
        self._kinds = [*kinds.values()]
        self._chosen = {kind[-1] for kind in self._kinds}
        others = {*range(len(self._layers))} - self._chosen
        if others:
            self._chosen.add(max(others))  # with one layer alone, what is between layers would not count
        self._formula = 0
        """Bytes that torch's formula takes more than fla's kernels for each token that a layer computes at once."""
        if self._rules and not fla:
            more = self._trace([], FEW, []) - self._trace([], FEW, self._rules)
            self._formula = max(0, int(more[2])) // FEW

    def memory(self, *, offload: bool = False) -> StepMemory:
        """Return the memory of steps, with checkpoints in the host's memory if `offload`."""
        found = StepMemory([], [], [])
        for kept, peak, checkpoints in self._steps:
            on_host = checkpoints if offload else 0
            found.kept.append(kept - on_host)
            found.peak.append(peak - on_host)
            found.on_host.append(on_host)
        return found

    @cached_property
    def _steps(self) -> list[tuple[int, int, int]]:
        """For each length the bytes that are kept, the peak, and the checkpoints of the layers that are not traced."""
        found = []
        for tokens in LENGTHS:
            base = self._trace([], tokens, self._rules)
            more = np.zeros_like(base)
            for kind in self._kinds:
                missing = [i for i in kind if i not in self._chosen]
                if missing:
                    more += len(missing) * (self._trace(missing[:1], tokens, self._rules) - base)
            at_once = min(tokens, CHUNK) if self._packed else tokens
            kept, forward, backward = (base + more).tolist()
            found.append((kept, max(forward, backward) + self._formula * at_once, int(more[0])))
        return found

    def _trace(self, more: Sequence[int], tokens: int, rules: Sequence[Any]) -> Any:
        """Return what a step of the chosen layers takes, and `more` before them. fla's kernels stand for `rules`.

        The bytes, (3,), are those between both passes, and at the peak of each.
        """
        layers = [*more, *sorted(self._chosen)]
        self._decoder.layers = torch.nn.ModuleList([self._layers[i] for i in layers])
        if self._types is not None:
            self._decoder.config.layer_types = [self._types[i] for i in layers]
        row = Row(np.zeros(tokens, np.int32), np.arange(1, tokens))
        forest: Any = Pack([[row]]) if self._packed else PaddedRows([[row]], torch.device("cpu"))
        with without_values(rules), self._mode, _Live(self._weights) as live:
            with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
                output = self._model(**forest.inputs())
            kept = live.bytes
            forward = live.peak
            live.peak = kept
            output.log_probs.sum().backward()
        return np.array([kept, forward, live.peak])


def _drop_gradient(weight: Tensor) -> None:
    weight.grad = None


class _Live(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive, and were made under it."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak = 0
        self._known = {_identity(tensor) for tensor in weights}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and _identity(tensor) not in self._known:
                self._add(tensor)
        return made

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        identity = _identity(tensor)
        self._known.add(identity)
        self.bytes += storage.nbytes()
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._remove, identity, storage.nbytes())

    def _remove(self, identity: int, size: int) -> None:
        self._known.discard(identity)
        self.bytes -= size


def _identity(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage while it lives. Tensors without data have no address to tell it by."""
    return int(tensor.untyped_storage()._cdata)


# ------------------------------------------------------------------------- kernels


def _yes(*_: Any) -> bool:
    return True


def _nothing(*_: Any, **__: Any) -> None:
    return None


@contextmanager
def without_values(rules: Sequence[Any]) -> Iterator[None]:
    """Replace functions that need values, and those that stand for kernels: `rules` are of linear attention."""
    replaced: list[tuple[Any, str, Any]] = [
        # transformers' functions for an export know shapes alone; its experts in a form that has them in every type
        (hub_kernels, "is_torchdynamo_exporting", _yes),
        (hub_kernels, "is_torchdynamo_compiling", _yes),
        (moe, "_can_use_grouped_mm", _nothing),
        # TRL's kernels fold a tile of logits into statistics, and make it its own gradient, in place
        (chunked_logprob, "_forward_tile", _nothing),
        (chunked_logprob, "_backward_tile", _nothing),
    ]
    for rule in rules:
        replaced.append((rule, "of_the_library", _fla_delta_rule))
        replaced.append((rule, "knows_lengths", True))
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(patch.object(owner, name, value))
        yield


def delta_rules(model: Any) -> list[Any]:
    """Return the gated delta rules that the layers of a prepared model call."""
    found = {}
    for module in model.modules():
        names = vars(sys.modules[type(module).__module__])
        for rule in DELTA_RULES:
            if hasattr(names.get(rule), "of_the_library"):
                found[rule] = names[rule]
    return [*found.values()]


def _flex_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Return (1, N, heads, D). Source: transformers 5.23, integrations/flex_attention.py."""
    dtype = query.dtype
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    heads = query.shape[1]
    if heads & (heads - 1):  # the kernel knows groups of heads for powers of 2 alone
        key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    padded = [x.to(dtype).clone() for x in (query, key, value)]
    out = _Flex.apply(*padded)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _flex_attention)
AttentionMaskInterface.register(ATTENTION, _nothing)


class _Flex(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        *inputs, _, lse = ctx.saved_tensors
        working = grad.contiguous(), torch.empty_like(lse)
        gradients = tuple(torch.empty_like(x) for x in inputs)
        del working
        return gradients


def _fla_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return an output and the last states, for the arguments of transformers' function."""
    out, state = _Fla.apply(query, key, value, g, beta, initial_state)  # type: ignore[no-untyped-call]
    return out, state


class _Fla(torch.autograd.Function):
    """Source: fla 0.6.0, ops/gated_delta_rule/chunk.py, ChunkGatedDeltaRuleFunction."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        rows, tokens, heads, size = value.shape
        sums = torch.empty_like(g, dtype=torch.float32)
        inverses = key.new_empty(rows, tokens, heads, FLA_CHUNK)  # a matrix for each chunk
        saved = [value.contiguous(), beta.contiguous(), sums, inverses]
        for normalized in (query, key):
            saved.append(torch.empty_like(normalized, memory_format=torch.contiguous_format))
            saved.append(normalized.new_empty(normalized.shape[:-1], dtype=torch.float32))
        states = rows if initial_state is None else len(initial_state)
        state = value.new_empty(states, heads, key.shape[-1], size, dtype=torch.float32)
        ctx.save_for_backward(query, key, g, initial_state, *saved)
        return torch.empty_like(value, memory_format=torch.contiguous_format), state

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        query, key, g, initial_state, value, beta, *_ = ctx.saved_tensors
        rows, tokens, heads, size = value.shape
        # the states before all chunks, and their gradients
        states = [key.new_empty(rows, -(-tokens // FLA_CHUNK), heads, key.shape[-1], size) for _ in range(2)]
        gradients: list[Tensor | None] = [torch.empty_like(x) for x in (query, key, value, g, beta)]
        gradients.append(None if initial_state is None else torch.empty_like(initial_state))
        del states
        return tuple(gradients)
