"""The measurements of a training step: time, operations, memory and gradients of segments and of padded rows."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rolltap.trainer.traces.build import TraceBatch
from rolltap.trainer.training.forward.forest import batches, build_forest
from rolltap.trainer.training.grpo.batch import spread_by_length, spread_by_prefix
from tests.bench.flops import costs, of_padded, of_pieces, step_flops
from tests.bench.gradients import differences
from tests.bench.groups import LONG, SHAPES, SHORT, SHORT_SCALE, generate, rows_of, single
from tests.bench.networks import NETWORKS, network, state_bytes
from tests.bench.peaks import longest, peaks, slope
from tests.bench.steps import Variant, run_steps

MICRO_BATCH_ROWS = (1, 2, 4)
"""Sizes of TRL's micro-batches of which the fastest counts, in rows."""
LAYOUT_GROUPS = 4
"""Groups whose layout is measured together, of sessions of full length."""
FULL_SCALE = 1
SHORTEST = 4096
"""Tokens of the first trace that must fit."""
LONGEST_SECONDS = 90.0
"""A step that takes longer ends the search for the longest trace."""


class Measurements:
    """Measurements of one model on one device."""

    def __init__(self, name: str, device: str, *, scale: float, rounds: int, tokens_per_segment: int | None) -> None:
        self.name, self.device, self.scale, self.rounds = name, device, scale, rounds
        self.tokens_per_segment = tokens_per_segment
        self.options: dict[str, Any] = {"dtype": torch.float32, "lora": False}
        if device == "cuda":
            self.options = {"dtype": torch.bfloat16, "lora": True}
        self._forwarded = 0
        self.vocabulary = NETWORKS[name][1]["vocab_size"]

    def groups(self) -> list[dict[str, Any]]:
        """Return a row for each shape of a group."""
        model = self._network(self.name)
        found = []
        for title, shape in SHAPES.items():
            batch = generate(shape, scale=self.scale, vocabulary=self.vocabulary, seed=0)
            rows = rows_of(batch)
            padded = {size: Variant("trl", -(-len(rows) // size)) for size in MICRO_BATCH_ROWS}
            sizes = self._by_turns(model, batch, padded, rounds=1)
            size = min(padded, key=lambda size: sizes[size] or float("inf"))
            seconds = self._by_turns(model, batch, {"padded": padded[size], "segments": self._segments()})
            forwarded = self._forwarded
            parts = spread_by_length(rows, padded[size].micro_batches)
            scored = sum(len(row.scored) for row in rows)
            pieces = [(s.start, len(s.ids)) for s in build_forest(rows, self.tokens_per_segment or 2**30)]
            model_costs = costs(model)
            before = step_flops(model_costs, of_padded(rows, parts), "layers")
            after = step_flops(model_costs, of_pieces(pieces, scored), "segments")
            tokens = sum(len(row.ids) for row in rows)
            row: dict[str, Any] = {"group": title, "scale": self.scale, "rows": len(rows), "tokens": tokens}
            row |= {"tokens_segments": sum(n for _, n in pieces), "forwarded": forwarded}
            row |= {"scored": scored, "trl_rows": size}
            row |= {"trl_seconds": {str(key): sizes[key] for key in padded}}
            row |= _against(seconds["padded"], seconds["segments"], before, after)
            found.append(row | {"tokens_per_second": _ratio(tokens, seconds["segments"])})
        return found

    def single(self, lengths: Sequence[int]) -> list[dict[str, Any]]:
        """Return a row for each length of one trace."""
        model = self._network(self.name)
        found = []
        for length in lengths:
            batch = single(length, vocabulary=self.vocabulary)
            seconds = self._by_turns(model, batch, {"padded": Variant("trl"), "segments": self._segments()})
            found.append({"tokens": length, **seconds, "ratio": _ratio(seconds["segments"], seconds["padded"])})
        return found

    def short(self) -> list[dict[str, Any]]:
        """Return one row: the quickstart's steps, with its model."""
        model = self._network("quickstart")
        vocabulary = NETWORKS["quickstart"][1]["vocab_size"]
        batch = generate(SHORT, scale=SHORT_SCALE, vocabulary=vocabulary, seed=0)
        variants = {
            "padded": Variant("trl", checkpointing=False),
            "segments": self._segments(checkpointing=False),
        }
        seconds = self._by_turns(model, batch, variants, rounds=5 * self.rounds)
        tokens = sum(len(row.ids) for row in rows_of(batch))
        row: dict[str, Any] = {"rows": len(batch.traces), "tokens": tokens, **seconds}
        return [row | {"ratio": _ratio(seconds["segments"], seconds["padded"])}]

    def layout(self) -> list[dict[str, Any]]:
        """Return a row for each part of the layout of groups of full length."""
        rows = [row for k in range(LAYOUT_GROUPS) for row in self._full_group(str(k))]
        tokens = sum(len(row.ids) for row in rows)
        size = 8192
        segments = build_forest(rows, size)
        steps: dict[str, Callable[[], Any]] = {
            "spread_by_prefix": lambda: spread_by_prefix(rows, 4),
            "build_forest": lambda: build_forest(rows, size),
            "batches": lambda: batches(segments, size, 8 * size, same_length=False),
        }
        found = [{"part": name, "tokens": tokens, "ns": 1e9 * self._cpu(step) / tokens} for name, step in steps.items()]
        return [*found, {"part": "together", "tokens": tokens, "ns": sum(row["ns"] for row in found)}]

    def memory(self, name: str, lengths: list[int]) -> list[dict[str, Any]]:
        """Return a row for each way: the peaks by length, and their slope without the shortest lengths.

        With TRL's rows the two longest lengths are left out: there is no more to see.
        """
        state = state_bytes(self._network(name))
        found = []
        ways = {"segments": (self._segments(), lengths), "trl": (Variant("trl"), lengths[:-2])}
        for title, (variant, tokens) in ways.items():
            values = peaks(name, self.device, tokens, variant, **self.options)
            half = (len(tokens) - 1) // 2
            row: dict[str, Any] = {"forward": title, "model": name, "tokens": tokens}
            row |= {"mib": [value / 2**20 for value in values], "state_bytes_per_token": state}
            row |= {"bytes_per_token": slope(tokens[half:], values[half:])}
            found.append(row | {"explained": self._explained(state) if title == "segments" else {}})
        return found

    def _explained(self, state: int) -> dict[str, int]:
        """Return the parts of the bytes that a token of a trace takes with segments."""
        size = self.options["dtype"].itemsize
        parts = {"state": state, "its gradient in float32": 4 * state // size, "copy for one segment": state}
        if self.device == "cpu":
            # a boolean and a number for each of the segment's tokens; CUDA's kernel needs no mask
            parts["mask"] = (1 + size) * (self.tokens_per_segment or 0)
        return parts

    def gradients(self, layers: int) -> list[dict[str, Any]]:
        """Return a row for each way and type of numbers."""
        batch = generate(SHAPES["8k, 20 to 40"], scale=max(16, self.scale), vocabulary=self.vocabulary, seed=0)
        return differences(
            self.name,
            self.device,
            batch,
            lora=self.options["lora"],
            layers=layers,
            tokens_per_segment=self.tokens_per_segment or 256,
        )

    def longest(self) -> list[dict[str, Any]]:
        """Return a row for each way."""
        model = self._network(self.name)
        found = []
        for title, variant in {"segments": self._segments(), "trl": Variant("trl")}.items():
            seconds: dict[int, float] = {}
            length, bounded = longest(lambda n, v=variant, s=seconds: self._fits(model, n, v, s), SHORTEST)
            row = {"forward": title, "tokens": length, "seconds": seconds.get(length)}
            found.append(row | {"ended_by": "memory" if bounded else "time"})
        return found

    def _fits(self, model: Any, length: int, variant: Variant, seconds: dict[int, float]) -> bool | None:
        if max(seconds.values(), default=0.0) > LONGEST_SECONDS:
            return None
        torch.cuda.empty_cache()
        try:
            seconds[length] = run_steps(model, single(length, vocabulary=self.vocabulary), variant, 1).seconds[0]
        except torch.OutOfMemoryError:
            model.zero_grad(set_to_none=True)
            return False
        return True

    def _segments(self, *, checkpointing: bool = True) -> Variant:
        return Variant("segments", checkpointing=checkpointing, tokens_per_segment=self.tokens_per_segment)

    def _network(self, name: str) -> Any:
        return network(name, device=self.device, **self.options)

    def _full_group(self, group: str) -> list[Any]:
        return rows_of(generate(LONG, scale=FULL_SCALE, vocabulary=150_000, seed=0, group=group))

    def _cpu(self, step: Callable[[], Any]) -> float:
        times = []
        for _ in range(max(3, self.rounds)):
            began = time.process_time()
            step()
            times.append(time.process_time() - began)
        return min(times)

    def _by_turns(self, model: Any, batch: TraceBatch, variants: dict[Any, Variant], rounds: int = 0) -> dict[Any, Any]:
        """Return the least seconds of a step of each variant. None for one that does not fit into memory."""
        seconds: dict[Any, float | None] = dict.fromkeys(variants, float("inf"))
        run_steps(model, single(64, vocabulary=model.config.get_text_config().vocab_size), Variant("trl"), 1)
        for _ in range(rounds or self.rounds):
            for name, variant in variants.items():
                if (best := seconds[name]) is None:
                    continue
                try:
                    watch = run_steps(model, batch, variant, 1)
                    seconds[name], self._forwarded = min(best, *watch.seconds), watch.forwarded
                except torch.OutOfMemoryError:
                    seconds[name] = None
                    torch.cuda.empty_cache()
        return seconds


def _against(
    before: float | None, after: float | None, flops_before: float, flops_after: float
) -> dict[str, float | None]:
    """Return seconds and operations of padded rows and of segments, their ratios, and the share of the saving.

    Seconds are None where a step did not fit into memory.
    """
    ratio, flops_ratio = _ratio(after, before), flops_after / flops_before
    return {
        "padded": before,
        "segments": after,
        "ratio": ratio,
        "flops_padded": flops_before,
        "flops_segments": flops_after,
        "flops_ratio": flops_ratio,
        "share": None if ratio is None else (1 - ratio) / (1 - flops_ratio),
    }


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or under is None else over / under
