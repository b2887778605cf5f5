"""The frame of the benches: commands that measure, and print their rows as tables or as JSON."""

import functools
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from tests.bench.processes import ROOT

Rows = list[dict[str, Any]]
"""Rows of one table: figure -> value."""


def command(measure: Callable[..., dict[str, Rows]]) -> click.Command:
    """Return a command of a function with click's options that returns rows by the title of their
    table.

    The exit status is 1 when a row has something `wrong`. `--json` prints the rows as JSON.
    """

    @click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
    @functools.wraps(measure)
    def main(as_json: bool, **options: Any) -> None:
        found = measure(**options)
        if as_json:
            click.echo(json.dumps(found, indent=2))
        else:
            for title, rows in found.items():
                show(title, rows)
        sys.exit(any(row.get("wrong") for rows in found.values() for row in rows))

    return click.command(context_settings={"show_default": True})(main)


def show(title: str, rows: Rows) -> None:
    """Print a table: a line for each row, or for each figure if there are more figures than
    rows."""
    lines = []
    for figure in dict.fromkeys(figure for row in rows for figure in row):
        lines.append([figure.replace("_", " "), *(_text(row.get(figure, "")) for row in rows)])
    if len(lines) <= len(rows):
        lines = list(map(list, zip(*lines, strict=True)))
    table = Table(title=title)
    for number, name in enumerate(lines[0]):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for line in lines[1:]:
        table.add_row(*line)
    Console(soft_wrap=True).print(table)


def _text(value: Any) -> str:
    match value:
        case dict():
            return ", ".join(f"{key}: {_text(entry)}" for key, entry in value.items())
        case list():
            return " ".join(map(_text, value))
        case float():
            return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        case int():
            return f"{value:,}"
    return str(value)


def milliseconds(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the worst of some times."""
    median, late, worst = 1e3 * np.percentile(seconds, [50, 99, 100])
    return {f"{name} ms": float(median), f"{name} p99": float(late), f"{name} worst": float(worst)}


_WORDS = (ROOT / "trainer/doctor/scripted_engine.py").read_text().split(" ")


def prose(rng: random.Random, words: int) -> str:
    """Return consecutive words of a source file."""
    start = rng.randrange(len(_WORDS) - words)
    return " ".join(_WORDS[start : start + words])


def _existing(context: click.Context, parameter: click.Parameter, folder: Path) -> Path:
    if not folder.is_dir():
        make = f"make it with recipes/quickstart/make_model.py {folder}"
        raise click.ClickException(f"{folder} is missing: {make}")
    return folder


model_option = click.option(
    "--model",
    default=ROOT / "runs/quickstart/model",
    type=click.Path(path_type=Path),
    callback=_existing,
    show_default=True,
    help="A folder with a tokenizer.",
)
folder_option = click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="On the disk to measure.  [default: the system's]",
)
