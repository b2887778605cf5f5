"""Memory of a training step, traced: a forward and a backward pass of the very model, on tensors without values.

torch's `FakeTensorMode` has the shapes and types of all tensors, and no data, so a model of any size is traced on any
machine in seconds. Kernels of a GPU that have no CPU form are replaced by functions that allocate and save the tensors
that these kernels allocate and save.
"""

import sys
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
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
from rolltap.trainer.training.step.pack import Pack, Row
from rolltap.trainer.training.step.padded import PaddedRows

LENGTHS = (8192, 32768, 98304)
"""Tokens of the rows that are traced."""
FEW = 1024
"""Tokens with which torch's formula of linear attention is traced, a loop over 64 tokens."""
ATTENTION = "rolltap_plan"
"""Name of the attention that stands for FlexAttention."""
MOST_TOKENS = 2**30
"""Rows are not planned longer than this."""
FLA_CHUNK = 64
"""Tokens of a chunk of fla's kernel."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes that a step takes for rows of several lengths, besides weights, their gradients and the optimizer."""

    lengths: tuple[int, ...]
    """Tokens of the rows, ascending."""
    kept: tuple[int, ...]
    """Bytes between the forward and the backward pass: above all, the checkpoints of the layers."""
    peak: tuple[int, ...]
    """Most bytes at once."""
    on_host: tuple[int, ...]
    """Bytes of checkpoints in the host's memory."""

    def of(self, values: Sequence[int], tokens: int) -> int:
        """Return the value for a row of `tokens`: on the lines from 0 through the traced ones, and beyond the last."""
        lengths = (0, *self.lengths)
        bytes_ = (0, *values)
        right = min(max(1, bisect_left(lengths, tokens)), len(values))
        left = right - 1
        slope = (bytes_[right] - bytes_[left]) / (lengths[right] - lengths[left])
        return int(bytes_[left] + slope * (tokens - lengths[left]))

    def longest(self, memory: int) -> int:
        """Return the tokens of the longest row that takes at most `memory` bytes."""
        return max(
            0,
            bisect_right(range(MOST_TOKENS), memory, key=lambda tokens: self.of(self.peak, tokens)) - 1,
        )


@dataclass(frozen=True, slots=True)
class _Bytes:
    """What a step took."""

    kept: int
    forward: int
    """At the peak of the forward pass."""
    backward: int
    """At the peak of the backward pass."""
    on_host: int

    @property
    def peak(self) -> int:
        return max(self.forward, self.backward)

    def plus(self, times: int, more: "_Bytes", base: "_Bytes") -> "_Bytes":
        """Return this with `times` the difference of two others."""
        names = self.__dataclass_fields__
        return _Bytes(*(getattr(self, x) + times * (getattr(more, x) - getattr(base, x)) for x in names))


class FakeStep:
    """Steps of a model without values. The model, which was on the meta device, is of no other use afterwards.

    Layers with parameters of the same shapes take the same. So steps are traced with the last layer of each kind, and
    with one more of a kind before these: all that are missing take what this one adds.
    """

    def __init__(self, model: Any, *, packed: bool, checkpointing: bool, low_precision: bool, fla: bool) -> None:
        """`model` is prepared. `low_precision` is autocast to bfloat16. `fla`: its kernels compute linear attention."""
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._packed = packed
        self._autocast = low_precision
        self._fla = fla
        self._rules = delta_rules(model)
        model.set_attn_implementation(ATTENTION)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with self._mode:
            self._model = model.to_empty(device="cpu").train()
            self._model.tie_weights()
        self._weights = [*model.parameters(), *model.buffers()]
        for parameter in model.parameters():
            if parameter.requires_grad:
                # gradients are counted once, by arithmetic
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
        self._decoder = model.get_decoder()
        self._layers = [*self._decoder.layers]
        self._types = getattr(self._decoder.config, "layer_types", None)
        kinds: dict[Any, list[int]] = {}
        for i, layer in enumerate(self._layers):
            shapes = tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters())
            kinds.setdefault(shapes, []).append(i)
        self._kinds = [*kinds.values()]

    def memory(self, *, offload: bool = False) -> StepMemory:
        """Return the memory of steps, with checkpoints in the host's memory if `offload`."""
        traced = [self._all_layers(length, offload, self._rules) for length in LENGTHS]
        peaks = [step.peak for step in traced]
        if self._rules and not self._fla:
            # the formula takes more than the kernels for each token that a layer computes at once
            kernels = self._all_layers(FEW, offload, self._rules).peak
            more = max(0, self._all_layers(FEW, offload, []).peak - kernels) / FEW
            for i, length in enumerate(LENGTHS):
                at_once = min(length, CHUNK) if self._packed else length
                peaks[i] += int(more * at_once)
        return StepMemory(
            lengths=LENGTHS,
            kept=tuple(step.kept for step in traced),
            peak=tuple(peaks),
            on_host=tuple(step.on_host for step in traced),
        )

    def _all_layers(self, tokens: int, offload: bool, rules: Sequence[Any]) -> _Bytes:
        chosen = {kind[-1] for kind in self._kinds}
        others = {*range(len(self._layers))} - chosen
        if others:
            chosen.add(max(others))  # with one layer alone, what is between layers would not count
        base = self._trace(sorted(chosen), tokens, offload, rules)
        every = base
        for kind in self._kinds:
            missing = [i for i in kind if i not in chosen]
            if missing:
                more = self._trace([missing[0], *sorted(chosen)], tokens, offload, rules)
                every = every.plus(len(missing), more, base)
        return every

    def _trace(self, layers: Sequence[int], tokens: int, offload: bool, rules: Sequence[Any]) -> _Bytes:
        """Trace a step of some layers. `rules` of linear attention are computed by fla's kernels."""
        self._decoder.layers = torch.nn.ModuleList([self._layers[i] for i in layers])
        if self._types is not None:
            self._decoder.config.layer_types = [self._types[i] for i in layers]
        row = Row(np.zeros(tokens, np.int32), np.arange(1, tokens))
        forest: Any = Pack([[row]]) if self._packed else PaddedRows([[row]], torch.device("cpu"))
        host = _Host()
        hooks = host.hooks() if offload else nullcontext()
        with ExitStack() as stack:
            stack.enter_context(without_values(rules))
            stack.enter_context(self._mode)
            live = stack.enter_context(_Live(self._weights))
            with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast), hooks:
                output = self._model(**forest.inputs())
            kept = live.bytes
            forward = live.peak
            live.peak = kept
            output.log_probs.sum().backward()
        return _Bytes(kept, forward, live.peak, host.bytes)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


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
        size = storage.nbytes()
        self._known.add(_identity(tensor))
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._remove, _identity(tensor), size)

    def _remove(self, identity: int, size: int) -> None:
        self._known.discard(identity)
        self.bytes -= size


def _identity(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage while it lives. Tensors without data have no address to tell it by."""
    return int(tensor.untyped_storage()._cdata)


class _Host:
    """The memory of the host, to which saved tensors go."""

    def __init__(self) -> None:
        self.bytes = 0

    def hooks(self) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(self._save, self._load)

    def _save(self, tensor: Tensor) -> Any:
        if isinstance(tensor, torch.nn.Parameter) or not tensor.is_floating_point():
            return tensor
        self.bytes += tensor.nbytes
        return tensor.shape, tensor.dtype

    def _load(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        shape, dtype = saved
        return torch.empty(shape, dtype=dtype)


# ------------------------------------------------------------------------- kernels


@contextmanager
def without_values(rules: Sequence[Any]) -> Iterator[None]:
    """Replace functions that need values, and those that stand for kernels of a GPU: `rules` are of linear attention."""

    def exporting() -> bool:
        return True

    def in_place(*_: Any, **__: Any) -> None:
        """TRL's kernels fold a tile of logits into statistics, and make it its own gradient."""

    with ExitStack() as stack:
        # transformers' functions for an export know shapes alone; its experts in a form that has them in every type
        for name in ("is_torchdynamo_exporting", "is_torchdynamo_compiling"):
            stack.enter_context(patch.object(hub_kernels, name, exporting))
        stack.enter_context(patch.object(moe, "_can_use_grouped_mm", lambda *_: False))
        stack.enter_context(patch.multiple(chunked_logprob, _forward_tile=in_place, _backward_tile=in_place))
        for rule in rules:
            stack.enter_context(patch.object(rule, "of_the_library", _fla_delta_rule))
            stack.enter_context(patch.object(rule, "knows_lengths", True))
        yield


def delta_rules(model: Any) -> list[Any]:
    """Return the gated delta rules that the layers of a prepared model call."""
    found = {}
    for module in model.modules():
        namespace = sys.modules[type(module).__module__]
        for name in DELTA_RULES:
            rule = getattr(namespace, name, None)
            if hasattr(rule, "of_the_library"):
                found[id(rule)] = rule
    return [*found.values()]


def _flex_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    *,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return (1, N, heads, D). Source: transformers 5.23, integrations/flex_attention.py."""
    dtype = query.dtype
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    heads = query.shape[1]
    if heads & (heads - 1):  # the kernel knows groups of heads for powers of 2 alone
        key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    padded = [x.to(dtype).clone() for x in (query, key, value)]
    out, lse = _Flex.apply(*padded)  # type: ignore[no-untyped-call]
    if s_aux is not None:
        out = out * (lse[..., None] - s_aux.view(-1, 1, 1)).exp().to(out.dtype)
    return out.transpose(1, 2).contiguous(), None


def _no_mask(*_: Any, **__: Any) -> None:
    return None


AttentionInterface.register(ATTENTION, _flex_attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)


class _Flex(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, ...]:
        query, key, value, _out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        deltas = torch.empty_like(lse)
        gradients = tuple(torch.empty_like(x) for x in (query, key, value))
        del grad, deltas
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
