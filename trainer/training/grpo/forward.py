"""Chooses how rows run through a model, and in what sizes."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from rolltap.addons.errors import InputError
from rolltap.trainer.models.merging import merge_again
from rolltap.trainer.traces.build import Trace
from rolltap.trainer.training.forward.forest import Row, leaves_before, own_tokens, trace_row
from rolltap.trainer.training.forward.linear import in_float32
from rolltap.trainer.training.forward.passes import PaddedScorer, SegmentScorer
from rolltap.trainer.training.forward.probe import probe
from rolltap.trainer.training.forward.sizes import SIZES, Costs, measure
from rolltap.trainer.training.grpo.config import TraceGRPOConfig
from rolltap.trainer.training.grpo.optimizer import local
from rolltap.trainer.training.grpo.ranks import as_one, gathered, on_main, together

logger = logging.getLogger(__name__)

TOKENS_PER_SEGMENT = 1024
"""Size of segments that are not planned: on a CPU without `memory_gib`, and in one pass."""

HEADROOM = 0.9
"""Share of a device's free memory that is planned with."""


class Forward:
    """The scorer of a model, fitted to each batch."""

    def __init__(self, model: Any, autocast: Callable[[], AbstractContextManager[Any]], args: TraceGRPOConfig) -> None:
        """Collective: the main process probes the model, and all do as it finds. `autocast` makes the context of mixed
        precision.

        A model that segments do not fit runs padded, and a warning says why.
        """
        self._model, self._args = model, args
        in_float32(model)
        self._merged = merge_again(model)
        self._costs: Costs | None = None
        self.scorer: PaddedScorer | SegmentScorer = PaddedScorer(autocast, args.device)
        if args.forward == "segments":
            one_pass = not args.activation_checkpointing
            options = {"keep_graph": one_pass, "offload_states": args.offload_states}
            run = as_one if args.sharding == "full" else on_main
            # of sharded weights each process sees the gradients of its part
            reason = next(filter(None, gathered(run(lambda: probe(model, autocast, **options)))), None)
            if reason is not None:
                logger.warning("traces run as padded rows, not as segments: %s", reason)
                return
            self.scorer = SegmentScorer(
                autocast, args.temperature, tokens_per_segment=args.tokens_per_segment or TOKENS_PER_SEGMENT, **options
            )
            if args.activation_checkpointing and (args.memory_gib or args.device.type == "cuda"):
                self._costs = (as_one if args.sharding == "full" else together)(lambda: measure(model, autocast))

    def rows(self, traces: Sequence[Trace]) -> list[Row]:
        """Return the rows of traces, with their experts if they are replayed. Raises `InputError` for one without."""
        rows = [trace_row(trace) for trace in traces]
        if self._args.routing == "own":
            return [replace(row, experts=None) for row in rows]
        if any(row.experts is None for row in rows):
            raise InputError('routing="recorded", but a trace has no routing: read traces(routing=True)')
        return rows

    def fit(self, micro_batches: Sequence[Sequence[Row]], optimizer: Any) -> None:
        """Choose the sizes of segments for the memory that there is. The first micro-batch has the most tokens."""
        rows = [*micro_batches[0]]
        if self._costs is None or not rows:
            return
        rows.append(max((row for part in micro_batches for row in part), key=lambda row: len(row.ids)))
        assert isinstance(self.scorer, SegmentScorer)
        memory = self._args.memory_gib * 2**30 if self._args.memory_gib else self._free_memory(optimizer)
        given = self._args.tokens_per_segment
        among = (given,) if given else SIZES
        own, longest = sum(own_tokens(rows)), len(rows[-1].ids)
        branches = max(sum(leaves_before(part)) for part in micro_batches)
        offload = self._args.offload_states
        sizes = self._costs.sizes(memory, own, longest, branches, offload_states=offload, among=among)
        if (expected := sum(sizes.parts)) > memory:
            logger.warning(
                "the traces need about %.1f GiB besides weights and optimizer, but have %.1f: set offload_states, "
                "max_tokens or a larger memory_gib if they do not fit",
                expected / 2**30,
                memory / 2**30,
            )
        self.scorer.tokens_per_branch = self._costs.tokens_per_branch
        self.scorer.tokens_per_row = self._costs.tokens_per_row
        self.scorer.tokens_per_segment = sizes.tokens_per_segment
        self.scorer.tokens_in_memory = sizes.tokens_in_memory
        self.scorer.logits_tokens = sizes.logits_tokens

    def _free_memory(self, optimizer: Any) -> float:
        """Return the bytes that are free on the CUDA device, less what the rest of the step will still take."""
        free, _ = torch.cuda.mem_get_info(self._args.device)
        unused = torch.cuda.memory_reserved(self._args.device) - torch.cuda.memory_allocated(self._args.device)
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        pending = self._merged
        pending += sum(local(p).numel() * (p.grad_dtype or p.dtype).itemsize for p in trained if p.grad is None)
        if not optimizer.state:
            pending += sum(2 * parameter.nbytes for group in optimizer.param_groups for parameter in group["params"])
        return float(HEADROOM * (free + unused) - pending)
