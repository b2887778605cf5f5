"""Optimizer steps of `TraceGRPOTrainer` on the same traces and model, as one packed row or as
padded rows.

The head is equal: on a CUDA device TRL's fused head computes the scored tokens alone; here it does
so on the CPU too, where it would compute all tokens of padded rows.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback

from rolltap.trainer.traces.build import TraceBatch
from rolltap.trainer.training.step.config import TraceGRPOConfig
from rolltap.trainer.training.step.pack import Pack
from rolltap.trainer.training.step.trainer import TraceGRPOTrainer
from tests.trainer.training.step.tiny import tokenizer


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to make the steps of one batch."""

    forward: Literal["packed", "padded"] = "packed"
    micro_batches: int = 1
    checkpointing: bool = True
    offload: bool = False


def now(device: str) -> float:
    """Return a time in seconds: CPU time on the CPU."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


class Watch(TrainerCallback):
    """A callback that takes the time of each step, and the gradients of the first, if wanted.

    Attributes:
        forwarded: Tokens of a step that went through the model, padding included.
    """

    def __init__(self, device: str, *, gradients: bool = False) -> None:
        self.seconds: list[float] = []
        self.gradients: dict[str, Tensor] = {}
        self.forwarded = 0
        self._device = device
        self._wanted = gradients

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = now(self._device)

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        """Keep the gradients on the CPU."""
        if self._wanted:
            self._wanted = False
            for name, weight in model.named_parameters():
                if weight.grad is not None:
                    self.gradients[name] = weight.grad.float().cpu()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(now(self._device) - self._began)


def run_steps(
    model: Any, batch: TraceBatch, variant: Variant, steps: int, *, gradients: bool = False
) -> Watch:
    """Train `steps` steps on the same batch with a learning rate of 0, and return what was seen.

    The model keeps its weights. Raises torch's out-of-memory error when a step does not fit.
    """
    device = next(model.parameters()).device.type
    watch = Watch(device, gradients=gradients)
    with tempfile.TemporaryDirectory() as folder, _as_before(model):
        config = TraceGRPOConfig(
            output_dir=folder,
            use_cpu=device == "cpu",
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            max_steps=steps,
            learning_rate=1e-12,
            max_grad_norm=0.0,
            gradient_accumulation_steps=variant.micro_batches,
            activation_checkpointing=variant.checkpointing,
            offload_checkpoints=variant.offload,
            forward=variant.forward,
        )
        trainer = TraceGRPOTrainer(
            model,
            config,
            Dataset.from_dict({"task_id": ["bench"]}),
            trace_source=lambda _: batch,
            groups_per_step=1,
            processing_class=tokenizer(),
            callbacks=[watch],
        )
        trainer.remove_callback(PrinterCallback)
        # here the model is probed, which a training does once
        trainer._choose_forest()
        if (trainer._forest is Pack) != (variant.forward == "packed"):
            raise RuntimeError("the model does not run packed rows: see the warning above")
        with patch("trl.trainer.utils._use_triton", return_value=True):
            trainer.train()
        watch.forwarded = sum(inputs["forest"].tokens for inputs in trainer._inputs)
        model.zero_grad(set_to_none=True)
    return watch


@contextmanager
def _as_before(model: Any) -> Iterator[None]:
    """Take away what a trainer puts on a model: wrapped forward functions, and checkpointing."""
    try:
        yield
    finally:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        for module in {model, base}:
            module.__dict__.pop("forward", None)
            module.activation_checkpointing_disable()
