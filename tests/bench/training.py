"""Measure a training step on traces that share prefixes: segments against padded rows.

    python -m tests.bench.training
    python -m tests.bench.training --device cuda --model 4b --json 4b.json

One process makes optimizer steps of `TraceGRPOTrainer` on generated groups of sessions and a model with random weights,
by turns with segments and with TRL's padded rows. It needs no engine, no recorder and no network. On a machine that has
only the trainer's packages, install rolltap with `pip install --no-deps .`.

On the CPU one thread computes, and seconds are its CPU time, so that other processes do not count. On a CUDA device
seconds are wall-clock time. Each figure is the least of its rounds.

- groups: 8 sessions with a shared prompt, of which two are compacted and one has a sub-agent, as `prefix_merging`
  traces. TRL's rows have the best of several sizes of micro-batches. "share" is the saved time over the time that the
  saved operations take at the padded rows' speed.
- single: one trace that shares nothing, by its length. short: the steps of the quickstart, without checkpointing.
- segments: the time of a segment, one in a batch, in trees of 21 to 2,071 segments.
- layout: the time of the forest and of spreading rows by prefixes, for each token of rows of full length.
- memory: the peak of a step by the length of a trace, and its slope, next to the bytes of keys and values.
"""

import json
import platform
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import numpy as np
import peft
import torch
import transformers
import trl

from rolltap.trainer.traces.build import TraceBatch
from rolltap.trainer.training.forward.forest import Row, batches, build_forest
from rolltap.trainer.training.forward.passes import SegmentScorer
from rolltap.trainer.training.grpo.batch import spread_by_length, spread_by_prefix
from tests.bench.flops import costs, of_padded, of_pieces, step_flops
from tests.bench.frame import Rows, show
from tests.bench.groups import LONG, SHAPES, SHORT, SHORT_SCALE, generate, rows_of, single
from tests.bench.networks import NETWORKS, network, state_bytes, vocabulary
from tests.bench.steps import Variant, peaks, run_steps

LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768]
"""Tokens of the traces whose peak memory is measured."""
SINGLE = {"cpu": [1024, 4096], "cuda": [8192, 32768]}
"""Tokens of the traces that share nothing."""
MEMORY_NETWORK = "narrow"
"""The model of that measurement on the CPU. A trace of 32k tokens takes it less than a minute."""
MICRO_BATCH_ROWS = (1, 2, 4)
"""Sizes of TRL's micro-batches of which the fastest counts, in rows."""
LAYOUT_GROUPS, LAYOUT_SCALE = 4, 1
"""Groups whose layout is measured together, of sessions of full length."""
BRANCHES, TREE_TOKENS = (4, 14, 45), 64
"""Branches of a tree's trunk, each of which has as many, and the tokens of each of its segments."""
PARTS = ("layout", "groups", "single", "short", "segments", "memory")


class Training:
    """Measurements of one model on one device. Each part is a method that returns its rows."""

    def __init__(self, name: str, device: str, *, scale: float, rounds: int, tokens_per_segment: int | None) -> None:
        self.name, self.device, self.scale, self.rounds = name, device, scale, rounds
        self.tokens_per_segment = tokens_per_segment
        self.options: dict[str, Any] = {"dtype": torch.float32, "lora": False}
        if device == "cuda":
            self.options = {"dtype": torch.bfloat16, "lora": True}
        self._forwarded = 0

    def groups(self) -> Rows:
        model = self._network(self.name)
        model_costs = costs(model)
        found = []
        for title, shape in SHAPES.items():
            batch = generate(shape, scale=self.scale, vocabulary=vocabulary(self.name), seed=0)
            rows = rows_of(batch)
            padded = {size: Variant("trl", -(-len(rows) // size)) for size in MICRO_BATCH_ROWS}
            sizes = self._by_turns(model, batch, padded, rounds=1)
            size = min(padded, key=lambda size: sizes[size] or float("inf"))
            seconds = self._by_turns(model, batch, {"padded": padded[size], "segments": self._segments()})
            scored = sum(len(row.scored) for row in rows)
            pieces = [(s.start, len(s.ids)) for s in build_forest(rows, self.tokens_per_segment or 2**30)]
            parts = spread_by_length(rows, padded[size].micro_batches)
            before = step_flops(model_costs, of_padded(rows, parts), "layers")
            after = step_flops(model_costs, of_pieces(pieces, scored), "segments")
            ratio = _ratio(seconds["segments"], seconds["padded"])
            row = {
                "group": title,
                "scale": self.scale,
                "rows": len(rows),
                "tokens": (tokens := sum(len(row.ids) for row in rows)),
                "tokens_segments": sum(n for _, n in pieces),
                "forwarded": self._forwarded,
                "scored": scored,
                "trl_rows": size,
                "trl_seconds": {str(size): seconds for size, seconds in sizes.items()},
                **seconds,
                "ratio": ratio,
                "flops_padded": before,
                "flops_segments": after,
                "flops_ratio": after / before,
                "share": None if ratio is None else (1 - ratio) / (1 - after / before),
                "tokens_per_second": _ratio(tokens, seconds["segments"]),
            }
            found.append(row)
        return found

    def single(self) -> Rows:
        model = self._network(self.name)
        found = []
        for length in SINGLE[self.device]:
            batch = single(length, vocabulary=vocabulary(self.name))
            seconds = self._by_turns(model, batch, {"padded": Variant("trl"), "segments": self._segments()})
            found.append({"tokens": length, **seconds, "ratio": _ratio(seconds["segments"], seconds["padded"])})
        return found

    def short(self) -> Rows:
        """Return one row: the quickstart's steps, with its model."""
        model = self._network("quickstart")
        batch = generate(SHORT, scale=SHORT_SCALE, vocabulary=vocabulary("quickstart"), seed=0)
        variants = {"padded": Variant("trl", checkpointing=False), "segments": self._segments(checkpointing=False)}
        seconds = self._by_turns(model, batch, variants, rounds=5 * self.rounds)
        tokens = sum(len(row.ids) for row in rows_of(batch))
        row = {"rows": len(batch.traces), "tokens": tokens, **seconds}
        return [row | {"ratio": _ratio(seconds["segments"], seconds["padded"])}]

    def segments(self) -> Rows:
        """Return one row for each tree: the time of a segment. All have three levels, and so the same attention."""
        model, found = self._network(self.name), []
        random = np.random.default_rng(0)
        for branches in BRANCHES:
            trunk, *parts = random.integers(3, 500, (1 + branches + branches**2, TREE_TOKENS)).astype(np.int32)
            rows = [
                Row(np.concatenate([trunk, parts[i], leaf]), np.arange(2 * TREE_TOKENS, 3 * TREE_TOKENS))
                for i in range(branches)
                for leaf in parts[branches + i * branches :][:branches]
            ]
            scorer = SegmentScorer(nullcontext, 1.0, tokens_per_segment=TREE_TOKENS)
            seconds = self._cpu(lambda scorer=scorer, rows=rows: scorer(model, rows).logprobs.sum().backward())
            number = len(build_forest(rows, TREE_TOKENS))
            found.append({"segments": number, "seconds": seconds, "ms": 1e3 * seconds / number})
        return found

    def layout(self) -> Rows:
        batch = {"scale": LAYOUT_SCALE, "vocabulary": 150_000, "seed": 0}
        rows = [row for k in range(LAYOUT_GROUPS) for row in rows_of(generate(LONG, **batch, group=str(k)))]
        tokens = sum(len(row.ids) for row in rows)
        size = 8192
        segments = build_forest(rows, size)
        steps: dict[str, Callable[[], Any]] = {
            "spread_by_prefix": lambda: spread_by_prefix(rows, 4),
            "build_forest": lambda: build_forest(rows, size),
            "batches": lambda: batches(segments, size, apart=False),
        }
        found = [{"part": name, "tokens": tokens, "ns": 1e9 * self._cpu(step) / tokens} for name, step in steps.items()]
        return [*found, {"part": "together", "tokens": tokens, "ns": sum(row["ns"] for row in found)}]

    def memory(self) -> Rows:
        """Return a row for each way: the peaks by length, and their slope without the shortest lengths.

        With TRL's rows the two longest lengths are left out: there is no more to see.
        """
        name = self.name if self.device == "cuda" else MEMORY_NETWORK
        state = state_bytes(self._network(name))
        found = []
        ways = {"segments": (self._segments(), LENGTHS), "trl": (Variant("trl"), LENGTHS[:-2])}
        for title, (variant, tokens) in ways.items():
            values = peaks(name, self.device, tokens, variant, **self.options)
            half = (len(tokens) - 1) // 2
            row = {
                "forward": title,
                "model": name,
                "tokens": tokens,
                "mib": [value / 2**20 for value in values],
                "state_bytes_per_token": state,
                "bytes_per_token": float(np.polyfit(tokens[half:], values[half:], 1)[0]),
                "explained": self._explained(state) if title == "segments" else {},
            }
            found.append(row)
        return found

    def _explained(self, state: int) -> dict[str, int]:
        """Return the parts of the bytes that a token of a trace takes with segments."""
        size = self.options["dtype"].itemsize
        return {"state": state, "its gradient in float32": 4 * state // size}

    def _segments(self, *, checkpointing: bool = True) -> Variant:
        return Variant("segments", checkpointing=checkpointing, tokens_per_segment=self.tokens_per_segment)

    def _network(self, name: str) -> Any:
        return network(name, device=self.device, **self.options)

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


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or under is None else over / under


@click.command(help="Measure training steps on traces that share prefixes: segments against padded rows.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--model", type=click.Choice(NETWORKS), help="small on the CPU, 4b on a CUDA device.")
@click.option("--scale", type=float, help="Divides numbers of tokens. 16 on the CPU, 4 on a CUDA device.")
@click.option("--tokens-per-segment", type=int, help="512 on the CPU, planned on a CUDA device.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), default=PARTS, help="Only these.")
@click.option("--json", "as_json", type=click.Path(path_type=Path), help="File for all figures.")
def main(
    device: str,
    model: str | None,
    scale: float | None,
    tokens_per_segment: int | None,
    rounds: int,
    parts: tuple[str, ...],
    as_json: Path | None,
) -> None:
    cuda = device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise click.ClickException("torch finds no CUDA device: run it on a machine with one, or with --device cpu")
    if not cuda:
        torch.set_num_threads(1)
    bench = Training(
        model or ("4b" if cuda else "small"),
        device,
        scale=scale or (4 if cuda else 16),
        rounds=rounds,
        tokens_per_segment=tokens_per_segment or (None if cuda else 512),
    )
    found: dict[str, Any] = {
        "environment": {
            "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()}, 1 thread",
            "versions": {module.__name__: module.__version__ for module in (torch, transformers, trl, peft)},
            "model": bench.name,
            "scale": bench.scale,
            "tokens_per_segment": bench.tokens_per_segment,
            "rounds": rounds,
        }
    }
    for part in parts:
        found[part] = getattr(bench, part)()
        show(part, found[part])
        if as_json:
            # what is measured so far
            as_json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
