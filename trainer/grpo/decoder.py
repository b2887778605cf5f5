"""A causal language model without its wrappers: decoder, head, kinds of cache layers."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel

from rolltap.trainer.grpo.caches import Layers
from rolltap.trainer.grpo.head import Head


class Decoder:
    """A causal language model's decoder and head, without wrappers."""

    def __init__(self, model: Any, temperature: float, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        """Raises `InputError` for a model with layers whose states are not known."""
        model = extract_model_from_parallel(model, keep_torch_compile=False)
        if hasattr(model, "get_base_model"):
            # an adapter is in the modules of the model that it wraps
            model = model.get_base_model()
        self.head = Head(model, temperature)
        self.body = model.get_decoder()
        self.layers = Layers(self.body.config)
        self.device = model.get_input_embeddings().weight.device
        self._autocast = autocast

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Run in mixed precision. Weights that were cast before without a gradient are cast again."""
        torch.clear_autocast_cache()
        with self._autocast():
            yield
        torch.clear_autocast_cache()

    @contextmanager
    def without_checkpointing(self) -> Iterator[None]:
        """Turn the layers' gradient checkpointing off, under which they drop their cache."""
        on = [module for module in self.body.modules() if getattr(module, "gradient_checkpointing", False)]
        for module in on:
            module.gradient_checkpointing = False
        try:
            yield
        finally:
            for module in on:
                module.gradient_checkpointing = True
