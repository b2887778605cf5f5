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
"""

import json
import platform
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
from tests.bench.groups import SHAPES, SHORT, SHORT_SCALE, generate, sessions_of, single
from tests.bench.networks import NETWORKS, network, vocabulary
from tests.bench.steps import Variant, now, run_steps

SINGLE = {"cpu": 4096, "cuda": 32768}
"""Tokens of the trace that shares nothing."""
SESSIONS_AT_ONCE = (1, 2, 4)
"""Sessions of a micro-batch of padded rows, of which the fastest counts."""
BRANCHES = (4, 14, 30)
"""Branches of a tree's trunk, each of which has as many."""
TREE_TOKENS = 12_096
"""Tokens of such a tree."""
PARTS = ("groups", "trees")


class Training:
    """Measurements of one model on one device. Each part is a method that returns its rows."""

    def __init__(self, name: str, device: str, *, scale: float, rounds: int) -> None:
        self.name = name
        self.device = device
        self.scale = scale
        self.rounds = rounds
        cuda = device == "cuda"
        self.options = {"dtype": torch.bfloat16 if cuda else torch.float32, "lora": cuda}

    def network(self, name: str) -> Any:
        return network(name, device=self.device, **self.options)

    def groups(self) -> Rows:
        """Return one row for each batch."""
        model = self.network(self.name)
        words = vocabulary(model)
        batches = {}
        for title, shape in SHAPES.items():
            batches[title] = generate(shape, scale=self.scale, vocabulary=words, seed=0)
        batches["one trace"] = single(SINGLE[self.device], vocabulary=words)
        rows = [{"batch": title, **self._compare(model, each)} for title, each in batches.items()]
        model = self.network("quickstart")
        short = generate(SHORT, scale=SHORT_SCALE, vocabulary=vocabulary(model), seed=0)
        row = self._compare(model, short, checkpointing=False)
        return [*rows, {"batch": "short, no checkpointing", **row}]

    def trees(self) -> Rows:
        """Return one row for each tree. All have three levels."""
        model = prepare(self.network(self.name), 1.0)
        model.activation_checkpointing_enable()
        found = []
        for branches in BRANCHES:
            rows = tree(branches, vocabulary(model))

            def step(rows: list[TraceRow] = rows) -> None:
                pack = Pack([rows], self.device)
                logprobs = pack.unpack(model(**pack.inputs()).log_probs)
                logprobs.sum().backward()

            pack = Pack([rows])
            row = {"segments": len(pack.parents), "tokens": pack.tokens}
            row["seconds"] = self._least(step)
            row["us_per_token"] = 1e6 * row["seconds"] / pack.tokens
            found.append(row)
        return found

    def _compare(
        self, model: Any, batch: TraceBatch, *, checkpointing: bool = True
    ) -> dict[str, Any]:
        """Return the figures of a batch in both ways."""
        sessions = sessions_of(batch)
        rows = [row for session in sessions for row in session]
        numbers = sorted({-(-len(sessions) // size) for size in SESSIONS_AT_ONCE})
        variants = {0: Variant("packed", 1, checkpointing)}
        for number in numbers:
            variants[number] = Variant("padded", number, checkpointing)
        seconds, forwarded = self._by_turns(model, batch, variants)
        packed = seconds.pop(0)
        # a way that does not fit has no time
        best = min(numbers, key=lambda number: seconds[number] or float("inf"))
        padded = seconds[best]

        work = of_pack(Pack(sessions))
        model_costs = costs(model)
        padded_flops = step_flops(model_costs, of_padded(rows, row_parts(sessions, best)))
        tokens = sum(len(row.ids) for row in rows)
        return {
            "rows": len(rows),
            "tokens": tokens,
            "tokens_packed": work.tokens,
            "forwarded": forwarded[0],
            "scored": work.scored,
            "padded": padded,
            "micro_batches": best,
            "packed": packed,
            "ratio": packed / padded if packed and padded else None,
            "flops_ratio": step_flops(model_costs, work) / padded_flops,
            "tokens_per_second": tokens / packed if packed else None,
        }

    def _least(self, step: Callable[[], Any]) -> float:
        """Return the least seconds of a step, as a `Watch` has them."""
        times = []
        for _ in range(max(3, self.rounds)):
            began = now(self.device)
            step()
            times.append(now(self.device) - began)
        return min(times)

    def _by_turns(
        self, model: Any, batch: TraceBatch, variants: dict[int, Variant]
    ) -> tuple[dict[int, float | None], dict[int, int]]:
        """Return for each variant the least seconds of a step, None if it does not fit into memory,
        and its tokens."""
        seconds: dict[int, float | None] = dict.fromkeys(variants, float("inf"))
        forwarded = dict.fromkeys(variants, 0)
        run_steps(model, single(64, vocabulary=vocabulary(model)), Variant(), 1)
        for _ in range(self.rounds):
            for name, variant in variants.items():
                least = seconds[name]
                if least is None:
                    continue
                try:
                    watch = run_steps(model, batch, variant, 1)
                except torch.OutOfMemoryError:
                    seconds[name] = None
                    torch.cuda.empty_cache()
                else:
                    seconds[name] = min(least, *watch.seconds)
                    forwarded[name] = watch.forwarded
        return seconds, forwarded


def row_parts(sessions: list[list[TraceRow]], number: int) -> list[list[int]]:
    """Return for each of `number` micro-batches the indices of its rows, counted over all
    sessions."""
    starts = np.cumsum([0, *map(len, sessions)]).tolist()
    parts = []
    for part in spread(sessions, number):
        indices: list[int] = []
        for session in part:
            indices += range(starts[session], starts[session + 1])
        parts.append(indices)
    return parts


def tree(branches: int, words: int) -> list[TraceRow]:
    """Return the rows of a tree: a trunk with so many branches, each with as many leaves, which are
    scored."""
    segments = 1 + branches + branches**2
    length = TREE_TOKENS // segments
    random = np.random.default_rng(0)
    trunk, *parts = random.integers(3, words, (segments, length)).astype(np.int32)
    scored = np.arange(2 * length, 3 * length)
    rows = []
    for number, leaf in enumerate(parts[branches:]):
        ids = np.concatenate([trunk, parts[number // branches], leaf])
        rows.append(TraceRow(ids, scored))
    return rows


@click.command(context_settings={"show_default": True})
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu")
@click.option("--model", type=click.Choice(NETWORKS), help="small on the CPU, 4b on a CUDA device.")
@click.option("--scale", type=float, help="Divides numbers of tokens: by 16, on CUDA by 4.")
@click.option("--rounds", default=3)
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
    """Measure training steps on traces that share prefixes: packed rows against padded rows."""
    where = f"{platform.machine()}, 1 thread"
    if device == "cpu":
        torch.set_num_threads(1)
        bench = Training(model or "small", device, scale=scale or 16, rounds=rounds)
    elif torch.cuda.is_available():
        where = torch.cuda.get_device_name()
        bench = Training(model or "4b", device, scale=scale or 4, rounds=rounds)
    else:
        remedy = "run it on a machine with one, or with --device cpu"
        raise click.ClickException(f"torch finds no CUDA device: {remedy}")
    modules = (torch, transformers, trl, peft)
    found: dict[str, Any] = {
        "environment": {
            "device": where,
            "versions": {module.__name__: module.__version__ for module in modules},
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
