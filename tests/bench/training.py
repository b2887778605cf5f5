"""Measure a training step on traces that share prefixes: a packed row against padded rows.

    python -m tests.bench.training
    python -m tests.bench.training --device cuda --model 4b --json 4b.json

One process makes optimizer steps of `TraceGRPOTrainer` on generated groups of sessions and a model
with random weights, by turns in both ways. It needs no engine, no recorder and no network. On a
machine that has only the trainer's packages, install rolltap with `pip install --no-deps .`.

On the CPU one thread computes, and seconds are its CPU time, so that other processes do not count.
On a CUDA device seconds are wall-clock time. Each figure is the least of its rounds.

- groups: 8 sessions with a shared prompt, of which two are compacted and one has a sub-agent, as
  `prefix_merging` traces; one trace that shares nothing; the steps of the quickstart, without
  checkpointing. Padded rows have the best of several numbers of micro-batches. "flops ratio" is
  that of the operations.
- trees: the time of a token in trees of 12k tokens with 21 to 931 segments.
- layout: the time of spreading sessions over micro-batches and of packing them, for each token of
  rows of full length.
- memory: the peak of a step by the length of a trace, and its slope, next to the bytes of the
  layers' inputs.
"""

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import peft
import torch
import transformers
import trl

from rolltap.trainer.traces.build import TraceBatch
from rolltap.trainer.training.step.batch import spread
from rolltap.trainer.training.step.model import prepare
from rolltap.trainer.training.step.pack import Pack, TraceRow
from tests.bench.flops import costs, of_pack, of_padded, step_flops
from tests.bench.frame import Rows, show
from tests.bench.groups import LONG, SHAPES, SHORT, SHORT_SCALE, generate, rows_of, single
from tests.bench.networks import NETWORKS, checkpoint_bytes, network, vocabulary
from tests.bench.steps import Variant, peaks, run_steps

LENGTHS = [2048, 4096, 8192, 16384]
"""Tokens of the traces whose peak memory is measured."""
SINGLE = {"cpu": 4096, "cuda": 32768}
"""Tokens of the trace that shares nothing."""
MEMORY_NETWORK = "narrow"
"""The model of the memory's measurement on the CPU."""
SESSIONS_AT_ONCE = (1, 2, 4)
"""Sessions of a micro-batch of padded rows, of which the fastest counts."""
LAYOUT_GROUPS = 4
"""Groups whose layout is measured together."""
LAYOUT_SCALE = 1.0
"""Their scale: sessions of full length."""
BRANCHES = (4, 14, 30)
"""Branches of a tree's trunk, each of which has as many."""
TREE_TOKENS = 12_096
"""Tokens of such a tree."""
PARTS = ("layout", "groups", "trees", "memory")


class Training:
    """Measurements of one model on one device. Each part is a method that returns its rows."""

    def __init__(self, name: str, device: str, *, scale: float, rounds: int) -> None:
        self.name = name
        self.device = device
        self.scale = scale
        self.rounds = rounds
        self.options: dict[str, Any] = {"dtype": torch.float32, "lora": False}
        if device == "cuda":
            self.options = {"dtype": torch.bfloat16, "lora": True}

    def groups(self) -> Rows:
        """Return one row for each batch."""
        found = []
        model = self._network(self.name)
        words = vocabulary(self.name)
        for title, shape in SHAPES.items():
            batch = generate(shape, scale=self.scale, vocabulary=words, seed=0)
            found.append({"batch": title, **self._compare(model, batch)})
        alone = single(SINGLE[self.device], vocabulary=words)
        found.append({"batch": "one trace", **self._compare(model, alone)})
        model = self._network("quickstart")
        short = generate(SHORT, scale=SHORT_SCALE, vocabulary=vocabulary("quickstart"), seed=0)
        found.append(
            {"batch": "short, no checkpointing", **self._compare(model, short, checkpointing=False)}
        )
        return found

    def trees(self) -> Rows:
        """Return one row for each tree. All have three levels."""
        model = prepare(self._network(self.name), 1.0)
        model.activation_checkpointing_enable()
        found = []
        for branches in BRANCHES:
            rows = tree(branches, vocabulary(self.name))

            def step(rows: list[TraceRow] = rows) -> None:
                pack = Pack([rows], self.device)
                logprobs = pack.unpack(model(**pack.inputs()).log_probs)
                logprobs.sum().backward()

            seconds = self._least(step)
            pack = Pack([rows])
            row = {
                "segments": len(pack.parents),
                "tokens": pack.tokens,
                "seconds": seconds,
                "us_per_token": 1e6 * seconds / pack.tokens,
            }
            found.append(row)
        return found

    def layout(self) -> Rows:
        """Return one row for each part of the layout."""
        sessions = []
        for number in range(LAYOUT_GROUPS):
            batch = generate(
                LONG, scale=LAYOUT_SCALE, vocabulary=150_000, seed=0, group=str(number)
            )
            sessions += sessions_of(batch)
        tokens = sum(len(row.ids) for rows in sessions for row in rows)
        steps: dict[str, Callable[[], Any]] = {
            "spread": lambda: spread(sessions, 4),
            "pack": lambda: Pack(sessions),
        }
        found = []
        for name, step in steps.items():
            found.append(
                {"part": name, "tokens": tokens, "ns_per_token": 1e9 * self._least(step) / tokens}
            )
        return found

    def memory(self) -> Rows:
        """Return a row for each way: the peaks by length, and their slope without the shortest
        lengths."""
        name = self.name if self.device == "cuda" else MEMORY_NETWORK
        ways = {
            "packed": Variant(),
            "packed, offloaded": Variant(offload=True),
            "packed, no checkpointing": Variant(checkpointing=False),
            "padded": Variant("padded"),
        }
        if self.device == "cpu":
            # the host's memory is the device's
            del ways["packed, offloaded"]
        found = []
        for title, variant in ways.items():
            values = peaks(name, self.device, LENGTHS, variant, **self.options)
            half = (len(LENGTHS) - 1) // 2
            row = {
                "way": title,
                "model": name,
                "tokens": LENGTHS,
                "mib": [value / 2**20 for value in values],
                "bytes_per_token": float(np.polyfit(LENGTHS[half:], values[half:], 1)[0]),
                "checkpoints_per_token": checkpoint_bytes(self._network(name)),
            }
            found.append(row)
        return found

    def _compare(
        self, model: Any, batch: TraceBatch, *, checkpointing: bool = True
    ) -> dict[str, Any]:
        """Return the figures of a batch in both ways."""
        sessions = sessions_of(batch)
        numbers = sorted({-(-len(sessions) // size) for size in SESSIONS_AT_ONCE})
        variants: dict[Any, Variant] = {"packed": Variant("packed", 1, checkpointing)}
        for number in numbers:
            variants[number] = Variant("padded", number, checkpointing)
        seconds, forwarded = self._by_turns(model, batch, variants)
        best = min(numbers, key=lambda number: seconds[number] or float("inf"))

        work = of_pack(Pack(sessions))
        rows = [row for session in sessions for row in session]
        model_costs = costs(model)
        flops = step_flops(model_costs, work)
        padded_flops = step_flops(model_costs, of_padded(rows, row_parts(sessions, best)))
        tokens = sum(len(row.ids) for row in rows)
        return {
            "rows": len(rows),
            "tokens": tokens,
            "tokens_packed": work.tokens,
            "forwarded": forwarded["packed"],
            "scored": work.scored,
            "padded": seconds[best],
            "micro_batches": best,
            "packed": seconds["packed"],
            "ratio": _ratio(seconds["packed"], seconds[best]),
            "flops_ratio": flops / padded_flops,
            "tokens_per_second": _ratio(tokens, seconds["packed"]),
        }

    def _network(self, name: str) -> Any:
        return network(name, device=self.device, **self.options)

    def _least(self, step: Callable[[], Any]) -> float:
        """Return the least seconds of a step, as a `Watch` has them."""
        times = []
        for _ in range(max(3, self.rounds)):
            began = self._now()
            step()
            times.append(self._now() - began)
        return min(times)

    def _now(self) -> float:
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def _by_turns(
        self, model: Any, batch: TraceBatch, variants: dict[Any, Variant]
    ) -> tuple[dict[Any, float | None], dict[Any, int]]:
        """Return for each variant the least seconds of a step, None if it does not fit into memory,
        and its tokens."""
        seconds: dict[Any, float | None] = dict.fromkeys(variants, float("inf"))
        forwarded: dict[Any, int] = dict.fromkeys(variants, 0)
        words = model.config.get_text_config().vocab_size
        run_steps(model, single(64, vocabulary=words), Variant(), 1)
        for _ in range(self.rounds):
            for name, variant in variants.items():
                best = seconds[name]
                if best is None:
                    continue
                try:
                    watch = run_steps(model, batch, variant, 1)
                except torch.OutOfMemoryError:
                    seconds[name] = None
                    torch.cuda.empty_cache()
                    continue
                seconds[name] = min(best, *watch.seconds)
                forwarded[name] = watch.forwarded
        return seconds, forwarded


def sessions_of(batch: TraceBatch) -> list[list[TraceRow]]:
    """Return the rows of each session that has traces."""
    found: dict[str, list[TraceRow]] = {}
    for trace, row in zip(batch.traces, rows_of(batch), strict=True):
        found.setdefault(trace.session_id, []).append(row)
    return [*found.values()]


def row_parts(sessions: list[list[TraceRow]], number: int) -> list[list[int]]:
    """Return for each of `number` micro-batches the indices of its rows, counted over all
    sessions."""
    indices: list[list[int]] = []
    rows = 0
    for session in sessions:
        indices.append([*range(rows, rows + len(session))])
        rows += len(session)
    return [
        [row for session in part for row in indices[session]] for part in spread(sessions, number)
    ]


def tree(branches: int, words: int) -> list[TraceRow]:
    """Return the rows of a tree: a trunk with so many branches, each with as many leaves, which are
    scored."""
    segments = 1 + branches + branches**2
    length = TREE_TOKENS // segments
    random = np.random.default_rng(0)
    trunk, *parts = random.integers(3, words, (segments, length)).astype(np.int32)
    scored = np.arange(2 * length, 3 * length)
    rows = []
    for i in range(branches):
        for leaf in parts[branches + i * branches :][:branches]:
            ids = np.concatenate([trunk, parts[i], leaf])
            rows.append(TraceRow(ids, scored))
    return rows


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or under is None else over / under


@click.command(
    help="Measure training steps on traces that share prefixes: packed rows against padded rows."
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--model", type=click.Choice(NETWORKS), help="small on the CPU, 4b on a CUDA device.")
@click.option(
    "--scale", type=float, help="Divides numbers of tokens. 16 on the CPU, 4 on a CUDA device."
)
@click.option("--rounds", default=3, show_default=True)
@click.option(
    "--part", "parts", multiple=True, type=click.Choice(PARTS), default=PARTS, help="Only these."
)
@click.option("--json", "as_json", type=click.Path(path_type=Path), help="File for all figures.")
def main(
    device: str,
    model: str | None,
    scale: float | None,
    rounds: int,
    parts: tuple[str, ...],
    as_json: Path | None,
) -> None:
    cuda = device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise click.ClickException(
            "torch finds no CUDA device: run it on a machine with one, or with --device cpu"
        )
    if not cuda:
        torch.set_num_threads(1)
    name = model or ("4b" if cuda else "small")
    bench = Training(name, device, scale=scale or (4 if cuda else 16), rounds=rounds)
    found: dict[str, Any] = {
        "environment": {
            "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()}, 1 thread",
            "versions": {
                module.__name__: module.__version__ for module in (torch, transformers, trl, peft)
            },
            "model": bench.name,
            "scale": bench.scale,
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
