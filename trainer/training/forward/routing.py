"""Replay of routing: the experts of a forward pass are those that the engine chose, whatever the router prefers.

The router's choice, a call of `torch.topk`, gets the recorded indices, and its own values at them: gradients flow to
the router as before. This holds when the forward pass runs again in the backward pass.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rolltap.addons.errors import InputError

Experts = NDArray[np.integer[Any]]
"""Numbers of experts, shape (tokens, layers, top_k)."""

OWN = -1
"""In place of an expert: the token routes by itself."""


class Replay:
    """Recorded experts in the layers of a model, and how often its own choice differs."""

    def __init__(self) -> None:
        self._chosen: Tensor | None = None
        self._attached: WeakSet[Any] = WeakSet()
        self.counts = torch.zeros(2, dtype=torch.float64)
        """Choices of one token in one layer that were replayed, and those of them that differ from its own."""

    def attach(self, model: Any) -> None:
        """Let passes of a model, wrapped by PEFT or not, be replayed. Raises `InputError` if it has no experts."""
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        if model in self._attached:
            return
        layers = getattr(model.get_decoder(), "layers", ())
        config = model.config.get_text_config(decoder=True)
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
        blocks = [
            (layer, block)
            for layer, modules in enumerate(layers)
            for block in modules.modules()
            if "experts" in dict(block.named_children())
        ]
        if not blocks or experts is None:
            raise InputError(f'routing = "recorded": {type(model).__name__} has no experts: set routing = "own"')
        self._attached.add(model)
        for layer, block in blocks:
            block.forward = self._replayed(block.forward, layer, len(layers), experts)

    def begin(self, model: Any, chosen: Sequence[Experts | None], lengths: Sequence[int]) -> None:
        """Set the experts of a model's next pass: of each piece of it those of its first tokens, (n, layers, top_k).

        `lengths` are the tokens of the pieces. Tokens without experts route by themselves. Raises as `attach` does.
        """
        shapes = {piece.shape[1:] for piece in chosen if piece is not None}
        if len(shapes) > 1:
            raise InputError(f"traces have experts of several models: {sorted(shapes)} layers and experts of a token")
        self._chosen = None
        if shapes:
            self.attach(model)
            whole = np.full((sum(lengths), *shapes.pop()), OWN, np.int16)
            for piece, own in zip(chosen, np.split(whole, np.cumsum(lengths)[:-1]), strict=True):
                if piece is not None:
                    own[: len(piece)] = piece[: len(own)]
            self._chosen = torch.from_numpy(whole).to(model.get_input_embeddings().weight.device)

    def end(self) -> None:
        """Let the next passes route by themselves."""
        self._chosen = None

    def taken(self) -> Tensor:
        """Return the counts, and begin to count again."""
        counts, self.counts = self.counts, torch.zeros_like(self.counts)
        return counts

    def _replayed(self, forward: Callable[..., Any], layer: int, layers: int, experts: int) -> Callable[..., Any]:
        """Return the `forward` of a layer's block with experts, of which one call of topk chooses."""

        def replayed(*args: Any, **kwargs: Any) -> Any:
            if self._chosen is None:
                return forward(*args, **kwargs)
            if self._chosen.shape[1] != layers:
                what = f"the traces have experts of {self._chosen.shape[1]} layers, but the model has {layers}"
                raise InputError(f"{what}: train the model that they were recorded with")
            with _Choice(self._chosen[:, layer].long(), experts) as choice:
                output = forward(*args, **kwargs)
            if len(choice.differs) != 1:
                raise InputError(
                    f"layer {layer} chose {self._chosen.shape[2]} of {experts} experts {len(choice.differs)} times, "
                    'not once: the experts of this model cannot be replayed; set routing = "own"'
                )
            self.counts = self.counts.to(choice.differs[0].device) + choice.differs[0]
            return output

        return replayed


class _Choice(TorchFunctionMode):
    """Replaces the result of topk of all experts' values by the recorded `chosen` (tokens, k). A context manager."""

    def __init__(self, chosen: Tensor, experts: int) -> None:
        super().__init__()
        self._chosen, self._experts = chosen, experts
        self.differs: list[Tensor] = []
        """For each choice: replayed tokens, and those of them whose own choice differs (2,)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        values = args[0] if args else (kwargs or {})["input"]
        tokens, k = self._chosen.shape
        # other calls choose groups of experts, or other things
        if values.shape != (tokens, self._experts) or result.indices.shape != (tokens, k):
            return result
        replayed = self._chosen[:, 0] != OWN
        chosen = torch.where(replayed[:, None], self._chosen, result.indices)
        differs = (chosen.sort(-1).values != result.indices.sort(-1).values).any(-1)
        self.differs.append(torch.stack([replayed.sum(), differs.sum()]).double())
        return torch.return_types.topk((values.gather(-1, chosen), chosen))
