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
- layout: the time of the forest and of spreading rows by prefixes, for each token of rows of full length.
- memory: the peak of a step by the length of a trace, and its slope, next to the bytes of keys and values.
- gradients: the relative difference from padded rows in float32. longest: the longest trace that fits.
"""

import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import peft
import torch
import transformers
import trl
from rich.console import Console
from rich.table import Table

from tests.bench.measurements import Measurements
from tests.bench.networks import NETWORKS

LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768]
"""Tokens of the traces whose peak memory is measured."""
SINGLE = {"cpu": [1024, 4096], "cuda": [8192, 32768]}
"""Tokens of the traces that share nothing."""
MEMORY_NETWORK = "narrow"
"""The model of that measurement on the CPU. A trace of 32k tokens takes it less than a minute."""
COLUMNS = {
    "groups": ["group", "rows", "tokens", "tokens_segments", "flops_ratio", "padded", "segments", "ratio", "share"],
    "memory": ["forward", "mib", "bytes_per_token", "explained"],
}
"""Figures of a part's table. All are in the other tables, and in the JSON file."""
PARTS = ("layout", "groups", "single", "short", "memory", "gradients", "longest")


def measure(
    device: str, model: str, scale: float, rounds: int, tokens_per_segment: int | None, parts: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """Yield what is measured so far after each part: its rows, and what they were measured on."""
    bench = Measurements(model, device, scale=scale, rounds=rounds, tokens_per_segment=tokens_per_segment)
    cuda = device == "cuda"
    found: dict[str, Any] = {"environment": _environment(device) | {"model": model, "scale": scale}}
    found["environment"] |= {"tokens_per_segment": tokens_per_segment, "rounds": rounds}
    calls = {
        "layout": bench.layout,
        "groups": bench.groups,
        "single": lambda: bench.single(SINGLE[device]),
        "short": bench.short,
        "memory": lambda: bench.memory(model if cuda else MEMORY_NETWORK, LENGTHS),
        "gradients": lambda: bench.gradients(4),
        "longest": bench.longest,
    }
    for part in parts:
        found[part] = calls[part]()
        _print(part, found[part])
        yield found


def _environment(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, 1 thread"
    versions = {module.__name__: module.__version__ for module in (torch, transformers, trl, peft)}
    return {"device": name, "versions": versions}


def _print(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=title)
    names = COLUMNS.get(title, list(rows[0]))
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_text(row[name]) for name in names))
    Console().print(table)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_text(entry)}" for key, entry in value.items())
    if value is None:
        return "out of memory"
    if isinstance(value, list):
        return " ".join(map(_text, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


@click.command(help="Measure training steps on traces that share prefixes: segments against padded rows.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--model", type=click.Choice(list(NETWORKS)), help="small on the CPU, 4b on a CUDA device.")
@click.option("--scale", type=float, help="Divides numbers of tokens. 16 on the CPU, 4 on a CUDA device.")
@click.option("--tokens-per-segment", type=int, help="512 on the CPU, planned on a CUDA device.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="All; longest only on a CUDA device.")
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
    for found in measure(
        device,
        model or ("4b" if cuda else "small"),
        scale or (4 if cuda else 16),
        rounds,
        tokens_per_segment or (None if cuda else 512),
        parts or (PARTS if cuda else PARTS[:-1]),
    ):
        if as_json:
            as_json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
