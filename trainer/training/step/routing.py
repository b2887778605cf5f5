"""Replay of routing: the experts of a pass are those that the engine chose, whatever the router
prefers.

The router's choice, a call of `torch.topk`, gets the recorded indices, and its own values at them:
gradients flow to the router as before. This holds when a layer, or a chunk of its tokens, runs
again for the backward pass.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rolltap.addons.errors import InputError
from rolltap.trainer.models.merging import without_adapter
from rolltap.trainer.training.step.linear import feed_forward_in_chunks, takes_one_argument
from rolltap.trainer.training.step.pack import OWN

NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts in the configurations of models."""


class Replay:
    """Recorded experts in the layers of models, and how often their own choice differs."""

    def __init__(self) -> None:
        self._chosen: Tensor | None = None
        self.counts = torch.zeros(2, dtype=torch.float64)
        """Choices of one token in one layer that were replayed, and those of them that differ from
        its own. A layer that is computed again counts again."""

    def begin(self, model: Any, experts: Tensor | NDArray[np.integer[Any]] | None) -> None:
        """Set the experts of a model's next pass, and of its backward pass: (tokens, layers,
        top_k), or None.

        Tokens are in the order of the pass. Those with `OWN` route by themselves, as all do without
        experts. The model may be wrapped by PEFT or DDP. Raises `InputError` if its experts cannot
        be replayed.
        """
        self.end()
        if experts is None:
            return
        model = without_adapter(getattr(model, "module", model))
        self.attach(model)
        layers = len(model.get_decoder().layers)
        if experts.shape[1] != layers:
            raise InputError(
                f"the traces have experts of {experts.shape[1]} layers, but the model has "
                f"{layers}: train the model that they were recorded with"
            )
        self._chosen = torch.as_tensor(experts).to(model.get_input_embeddings().weight.device)

    def end(self) -> None:
        """Let the next passes route by themselves."""
        self._chosen = None

    def taken(self) -> Tensor:
        """Return the counts, and begin to count again."""
        counts = self.counts
        self.counts = torch.zeros_like(counts)
        return counts

    def attach(self, model: Any) -> None:
        """Let passes of a model be replayed. Raises `InputError` if its experts cannot be."""
        config = model.config.get_text_config(decoder=True)
        experts = 0
        for name in NUMBERS_OF_EXPERTS:
            experts = experts or getattr(config, name, 0)
        found = False
        for number, layer in enumerate(getattr(model.get_decoder(), "layers", ())):
            for block in layer.modules():
                if not experts or "experts" not in block._modules:
                    continue
                if not takes_one_argument(block):
                    raise InputError(
                        f"{type(block).__name__} chooses experts and does more: the experts of "
                        'this model cannot be replayed; set routing = "own"'
                    )
                feed_forward_in_chunks(block, layer)
                block.routing_replay = partial(self._replayed, number, experts)
                found = True
        if not found:
            name = type(model).__name__
            raise InputError(f'routing = "recorded": {name} has no experts: set routing = "own"')

    def _replayed(
        self,
        layer: int,
        experts: int,
        block: nn.Module,
        hidden: Tensor,
        tokens: slice,
    ) -> Any:
        """Return what the block of a layer with experts, of which one call of topk chooses, does
        for some tokens."""
        if self._chosen is None:
            return type(block).forward(block, hidden)
        with _Choice(self._chosen[tokens, layer].long(), experts) as choice:
            output = type(block).forward(block, hidden)
        if len(choice.differs) != 1:
            raise InputError(
                f"layer {layer} chose {self._chosen.shape[2]} of {experts} experts "
                f"{len(choice.differs)} times, not once: the experts of this model cannot be "
                'replayed; set routing = "own"'
            )
        self.counts = self.counts.to(choice.differs[0].device) + choice.differs[0]
        return output


class _Choice(TorchFunctionMode):
    """Replaces the result of topk of all experts' values by the recorded `chosen` (tokens, k). A
    context manager."""

    def __init__(self, chosen: Tensor, experts: int) -> None:
        super().__init__()
        self._chosen = chosen
        self._experts = experts
        self.differs: list[Tensor] = []
        """For each choice: replayed tokens, and those of them whose own choice differs (2,)."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in (torch.topk, Tensor.topk):
            return result
        values = args[0] if args else kwargs["input"]
        tokens, k = self._chosen.shape
        # other calls choose groups of experts, or other things
        if values.shape != (tokens, self._experts) or result.indices.shape != (tokens, k):
            return result
        replayed = self._chosen[:, 0] != OWN
        chosen = torch.where(replayed[:, None], self._chosen, result.indices)
        differs = (chosen.sort(-1).values != result.indices.sort(-1).values).any(-1)
        self.differs.append(torch.stack([replayed.sum(), differs.sum()]).double())
        return torch.return_types.topk((values.gather(-1, chosen), chosen))
