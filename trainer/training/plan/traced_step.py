"""Memory of a training step, traced: a forward and a backward pass of the very model, on tensors
without values.

torch's `FakeTensorMode` has the shapes and types of all tensors, and no data, so a model of any
size is traced on any machine in seconds. Functions of `stand_ins` take the place of kernels that
run on a GPU alone.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rolltap.trainer.training.plan.stand_ins import ATTENTION, delta_rules, without_values
from rolltap.trainer.training.step.linear import CHUNK
from rolltap.trainer.training.step.pack import Pack, PaddedRows, TraceRow

LENGTHS = (8192, 32768, 98304)
"""Tokens of the rows that are traced."""
FEW = 4096
"""Tokens with which torch's formula of linear attention is traced: a loop over 64 tokens."""
FAR = 10_000
"""The lines end so many times farther than between the last two of the rows."""

Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes that a step takes for rows of `LENGTHS`, besides weights, their gradients and the
    optimizer's state."""

    kept: Array
    """Between the forward and the backward pass: above all, the checkpoints of the layers."""
    peak: Array
    """At most."""
    checkpoints: Array
    """Part of `kept`: the checkpoints that can rest in the host's memory."""

    def offloaded(self) -> "StepMemory":
        """Return the memory of steps whose checkpoints rest in the host's memory."""
        kept = self.kept - self.checkpoints
        peak = self.peak - self.checkpoints
        return StepMemory(kept, peak, self.checkpoints)

    def longest(self, memory: int) -> int:
        """Return the tokens of the longest row that takes at most `memory` bytes."""
        return int(np.interp(memory, _with_ends(self.peak), _with_ends(LENGTHS)))


def at(traced: ArrayLike, tokens: int) -> int:
    """Return the value for a row of `tokens`: on the lines from 0 through the traced values, and
    beyond the last."""
    return round(np.interp(tokens, _with_ends(LENGTHS), _with_ends(traced)))


def _with_ends(traced: ArrayLike) -> Array:
    """Return 0, the values of the traced rows, and the value of a row that is far longer."""
    values = np.array(traced)
    return np.array([0, *values, values[-1] + FAR * (values[-1] - values[-2])])


class FakeStep:
    """Steps of a model without values.

    Layers with parameters of the same shapes take the same. So steps are traced with the last two
    layers of each kind, and with one more of a kind before these. All that are missing take what
    this one adds: with checkpointing, the input of a layer, which may rest elsewhere.
    """

    def __init__(
        self,
        model: Any,
        *,
        packed: bool,
        checkpointing: bool,
        low_precision: bool,
        fla: bool,
    ) -> None:
        """Take a prepared model on the meta device, which is of no other use afterwards.

        `low_precision` is autocast to bfloat16. `fla`: its kernels compute linear attention.
        """
        self._packed = packed
        self._autocast = low_precision
        self._rules = delta_rules(model)
        model.set_attn_implementation(ATTENTION)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
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
        self._kinds = _kinds(self._layers)
        self._formula = 0
        """Bytes that torch's formula takes more than fla's kernels for each token that a layer
        computes at once."""
        if self._rules and not fla:
            _, more = self._trace([], FEW, []) - self._trace([], FEW, self._rules)
            self._formula = max(0, more) // FEW

    def memory(self) -> StepMemory:
        """Trace a step of a row of each of `LENGTHS`."""
        steps = [self._all_layers(tokens) for tokens in LENGTHS]
        kept, peak, checkpoints = np.array(steps).T
        return StepMemory(kept, peak, checkpoints)

    def _all_layers(self, tokens: int) -> list[int]:
        """Return the bytes between both passes, the peak, and the checkpoints of the layers that
        are not traced."""
        base = self._trace([], tokens, self._rules)
        kept, peak = base
        checkpoints = 0
        for kind in self._kinds:
            missing = kind[:-2]
            if missing:
                more = len(missing) * (self._trace(missing[:1], tokens, self._rules) - base)
                checkpoints += more[0]
                peak += more[1]
        at_once = tokens
        if self._packed:
            at_once = min(tokens, CHUNK)
        return [kept + checkpoints, peak + self._formula * at_once, checkpoints]

    def _trace(self, more: list[int], tokens: int, rules: Sequence[Any]) -> Array:
        """Return the bytes of a step, (2,): between both passes, and at the peak.

        The step has the last two layers of each kind, and `more` before them. fla's kernels stand
        for `rules`.
        """
        last = [layer for kind in self._kinds for layer in kind[-2:]]
        layers = [*more, *sorted(last)]
        self._decoder.layers = torch.nn.ModuleList([self._layers[i] for i in layers])
        if self._types is not None:
            self._decoder.config.layer_types = [self._types[i] for i in layers]
        sessions = [[TraceRow(np.zeros(tokens, np.int32), np.arange(1, tokens))]]
        forest: Pack | PaddedRows = PaddedRows(sessions, torch.device("cpu"))
        if self._packed:
            forest = Pack(sessions)
        with without_values(rules), self._mode, _Live(self._weights) as live:
            with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
                output = self._model(**forest.inputs())
            kept = live.bytes
            output.log_probs.sum().backward()
        return np.array([kept, live.peak])


def _kinds(layers: Sequence[Any]) -> list[list[int]]:
    """Return the numbers of the layers, those with parameters of the same shapes together."""
    kinds: dict[Any, list[int]] = {}
    for i, layer in enumerate(layers):
        shapes = tuple((name, weight.shape) for name, weight in layer.named_parameters())
        kinds.setdefault(shapes, []).append(i)
    return [*kinds.values()]


def _drop_gradient(weight: Tensor) -> None:
    weight.grad = None


class _Live(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive, and were made under it.

    Tensors without data have no address. So a tensor is known by its storage, while it lives.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak = 0
        self._known = {weight.untyped_storage()._cdata for weight in weights}

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        identity = storage._cdata
        if identity in self._known:
            return
        self._known.add(identity)
        self.bytes += storage.nbytes()
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._remove, identity, storage.nbytes())

    def _remove(self, identity: int, size: int) -> None:
        self._known.discard(identity)
        self.bytes -= size
