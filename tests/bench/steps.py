"""Optimizer steps of `TraceGRPOTrainer` with several ways to run the same traces through the same model.

- `segments`: each shared token once (`SegmentScorer`).
- `padded`: each trace whole, as a row of a batch padded on the right (`PaddedScorer`).
- `trl`: TRL's own inputs: prompts padded on the left, completions on the right, and an attention mask. Rows of similar
  length are in one micro-batch, which TRL does not do.

The head is equal: TRL's fused head on CUDA devices computes logits where a label is; here it does so on the CPU too,
where it would compute all. Labels are only where a token is trained.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback

from rolltap.trainer.traces.build import TraceBatch
from rolltap.trainer.training.forward.forest import Row
from rolltap.trainer.training.forward.passes import PaddedScorer, Scores, SegmentScorer
from rolltap.trainer.training.grpo.config import TraceGRPOConfig
from rolltap.trainer.training.grpo.trainer import TraceGRPOTrainer
from tests.bench.groups import single
from tests.bench.networks import network, vocabulary
from tests.trainer.training.grpo.tiny import tokenizer

WARM_UP = 256
"""Tokens of a step before the measured ones, which allocates what is allocated once."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to make the steps of one batch."""

    forward: Literal["segments", "padded", "trl"]
    micro_batches: int = 1
    checkpointing: bool = True
    tokens_per_segment: int | None = None
    """None: planned by the trainer."""


class TRLScorer(PaddedScorer):
    """Runs rows as TRL's `_get_per_token_logps_and_entropies` does. A prompt ends at the row's first scored token."""

    def __call__(self, model: Any, rows: Sequence[Row]) -> Scores:
        device = self._device
        prompt = max(int(row.scored[0]) for row in rows)
        width = prompt + max(len(row.ids) - int(row.scored[0]) for row in rows)
        ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
        labels = torch.full((len(rows), width), -100)
        for i, row in enumerate(rows):
            start = prompt - int(row.scored[0])
            ids[i, start : start + len(row.ids)] = torch.from_numpy(row.ids)
            mask[i, start : start + len(row.ids)] = 1
            labels[i, start + row.scored] = torch.from_numpy(row.ids[row.scored]).long()
        self.forwarded = ids.numel()
        with self._autocast():
            output = model(
                input_ids=ids.to(device), attention_mask=mask.to(device), labels=labels.to(device), fused_lm_head=True
            )
        scored = (labels[:, 1:] != -100).to(device)
        return Scores(output.log_probs[scored].float(), output.entropy[scored].float().detach())


class Watch(TrainerCallback):
    """A callback that takes the time of each step (CPU time on the CPU), and the gradients of the first.

    Attributes:
        forwarded: Tokens of the last micro-batch that went through the model, padding included.
    """

    def __init__(self, device: str, *, gradients: bool = False) -> None:
        self.seconds: list[float] = []
        self.gradients: dict[str, Tensor] = {}
        self.forwarded = 0
        self._device, self._wanted, self._began = device, gradients, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = self._now()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Keep the gradients of the first step, on the CPU."""
        if self._wanted and not self.gradients:
            named = model.named_parameters()
            self.gradients = {name: p.grad.float().cpu() for name, p in named if p.grad is not None}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(self._now() - self._began)

    def _now(self) -> float:
        if self._device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


def run_steps(model: Any, batch: TraceBatch, variant: Variant, steps: int, *, gradients: bool = False) -> Watch:
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
            forward="segments" if variant.forward == "segments" else "padded",
            tokens_per_segment=variant.tokens_per_segment if variant.forward == "segments" else None,
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
        forward = trainer._forward
        if isinstance(forward.scorer, SegmentScorer) != (variant.forward == "segments"):
            raise RuntimeError("the model does not run as segments: see the warning above")
        if variant.forward == "trl":
            forward.scorer = TRLScorer(trainer.accelerator.autocast, trainer.args.device)
        with patch("trl.trainer.utils._use_triton", return_value=True):
            trainer.train()
        watch.forwarded = forward.scorer.forwarded
        model.zero_grad(set_to_none=True)
    return watch


@contextmanager
def _as_before(model: Any) -> Iterator[None]:
    """Take away what a trainer puts on a model: wrapped forward functions, and checkpointing."""
    try:
        yield
    finally:
        for module in {model, model.get_base_model() if hasattr(model, "get_base_model") else model}:
            module.__dict__.pop("forward", None)
            module.activation_checkpointing_disable()


def peaks(name: str, device: str, lengths: list[int], variant: Variant, **options: Any) -> list[int]:
    """Return the bytes that a step on one trace of each length takes at its peak, more than before the step.

    On a CUDA device they are those of its allocator. On the CPU they are those of the resident memory of another
    process, in which memory that is freed goes back to the system.
    """
    if device == "cuda":
        return _peaks(name, device, lengths, variant, options)
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    with patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536"), pool:
        return pool.submit(_peaks, name, device, lengths, variant, options).result()


def _peaks(name: str, device: str, lengths: list[int], variant: Variant, options: dict[str, Any]) -> list[int]:
    model = network(name, device=device, **options)
    run_steps(model, single(WARM_UP, vocabulary=vocabulary(name)), variant, 1)
    found = []
    for length in lengths:
        batch = single(length, vocabulary=vocabulary(name))
        before = _mark(device)
        run_steps(model, batch, variant, 1)
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else _resident("VmHWM")
        found.append(int(peak - before))
    return found


def _mark(device: str) -> int:
    """Return the bytes in use. The peak is from now on."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))
