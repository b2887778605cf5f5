"""Measure what the growing replies of many streams cost the event loop.

    python -m tests.bench.streams

One process without an engine feeds replies that grow at 30 tokens a second, every tenth of a second as a stream does.
Replies begin at the given length. The lag is how late a timer of the event loop is.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from rolltap.addons.dialects.model_call import ModelCall
from rolltap.addons.endpoint.exchange import COALESCE_SECONDS
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.prompts.reply import GrowingReply
from tests.bench.recorder import ROOT

PACE = 30
"""Tokens a second."""
_TICK = 0.005
_CODE = (ROOT / "trainer/doctor/scripted_engine.py").read_text()
REPLIES = {
    "reasoning": f"<think>\n{_CODE}",
    "text": _CODE,
    "HTML": "<div>some text</div>\n" * 500,
    "a tool call": f'<tool_call>\n{{"name": "write", "arguments": {{"text": "{_CODE}',
    "markup": "some text </think> \n" * 500,
}
"""Kinds of replies. Their lines after the first are repeated without an end."""


def _tokens(encode: Callable[[str], list[int]], text: str) -> Iterator[int]:
    opening, _, rest = text.partition("\n")
    ids, more = (encode(part) for part in (opening + "\n", rest))
    return chain(ids, chain.from_iterable(repeat(more)))


async def _stream(rendering: Rendering, tokens: Iterator[int], length: int, spent: list[float]) -> None:
    reply, completion_ids = GrowingReply(rendering, [], ModelCall("bench", [], [])), list(islice(tokens, length))
    await asyncio.sleep(random.random())
    began = time.monotonic()
    while True:
        completion_ids += islice(tokens, length + int(PACE * (time.monotonic() - began)) - len(completion_ids))
        started = time.thread_time()
        reply.feed(completion_ids)
        spent.append(time.thread_time() - started)
        await asyncio.sleep(COALESCE_SECONDS)


async def measure(model: Path, kind: str, streams: int, length: int, seconds: float) -> dict[str, Any]:
    """Return the row of one kind of reply. The first parses of the replies are not measured."""
    rendering, encode = Rendering(str(model), "qwen3"), AutoTokenizer.from_pretrained(model).encode
    spent: list[float] = []
    replies = [_tokens(encode, REPLIES[kind]) for _ in range(streams)]
    tasks = [asyncio.create_task(_stream(rendering, reply, length, spent)) for reply in replies]
    await asyncio.sleep(1 + seconds / 2)
    spent.clear()
    lags, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        started = time.monotonic()
        await asyncio.sleep(_TICK)
        lags.append(1e3 * (time.monotonic() - started - _TICK))
    for task in tasks:
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, asyncio.CancelledError) for error in done), done
    lags.sort()
    row = {"reply": kind, "streams": streams, "tokens": length, "lag_ms": lags[len(lags) // 2]}
    row |= {"lag_p99_ms": lags[int(0.99 * len(lags))], "us_per_token": 1e6 * sum(spent) / (PACE * streams * seconds)}
    return row


@click.command(help="Measure the lag of the event loop while many replies grow.")
@click.option("--streams", type=int, default=64, show_default=True)
@click.option("--tokens", type=int, default=16_000, show_default=True)
@click.option("--seconds", type=float, default=6.0, show_default=True)
@click.option("--model", default=ROOT / "runs/quickstart/model", type=click.Path(path_type=Path), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def main(streams: int, tokens: int, seconds: float, model: Path, as_json: bool) -> None:
    if not model.is_dir():
        raise click.ClickException(f"{model} is missing: make it with recipes/quickstart/make_model.py {model}")
    rows = [asyncio.run(measure(model, kind, streams, tokens, seconds)) for kind in REPLIES]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table("reply", "median lag ms", "p99", "CPU µs per token", title=f"{streams} streams of {tokens:,} tokens")
    for row in rows:
        table.add_row(row["reply"], *(f"{row[key]:.1f}" for key in ("lag_ms", "lag_p99_ms", "us_per_token")))
    Console().print(table)


if __name__ == "__main__":
    main()
