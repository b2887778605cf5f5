"""Measure the recorder's cost against a bare mitmdump redirect and a direct call to the same engine.

    python -m tests.bench.recorder

Every part runs in its own process. A connection is a session whose conversation grows by a short message a turn. So the
recorder knows the prefix of every measured request. CPU is that of the proxy process, summed over its threads: per
request, and for streamed replies per token that the engine sent. Headers and first delta are medians. The first delta
is measured from the engine's write of the first token.

A last table has the loads that can stall a proxy, see `tests/bench/stalls.py`.
"""

import asyncio
import json
import re
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import click
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from tests.bench.client import CHAT, Target, Timings, play
from tests.bench.processes import RECORDER, ROOT, Engine, Mitmdump
from tests.bench.stalls import Loads, measure

REQUEST_BYTES = 50_000
SHORT_REPLY = 32
"""Token count of an immediate reply."""
TURNS = 20
"""Number of measured turns of a session."""


def _replies(words: dict[str, int], stop_id: int, *, chunks: int, pace: float) -> dict:
    """Return the settings of the engine. Its replies consist of `words`, a map of words to token ids."""
    spoken = list(words) * (max(chunks, SHORT_REPLY) // len(words) + 1)
    settings = {"words": spoken[:chunks], "token_ids": [words[word] for word in spoken[:chunks]]}
    return {**settings, "stop_id": stop_id, "short": SHORT_REPLY, "pace": pace}


def _opening(words: dict[str, int]) -> dict:
    """Return the body of a session's first request: a conversation of `REQUEST_BYTES`, most of it tool results."""
    parameters = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    function = {"name": "bash", "description": _text(words, 2_000), "parameters": parameters}
    body: dict = {"model": "bench", "max_tokens": 4_096, "tools": [{"type": "function", "function": function}]}
    messages = [{"role": "system", "content": _text(words, 8_000)}, {"role": "user", "content": "Fix the bug."}]
    body["messages"] = messages
    while len(json.dumps(body)) < REQUEST_BYTES:
        arguments = json.dumps({"command": _text(words, 150)})
        call = {"id": f"call_{len(messages)}", "type": "function", "function": {"name": "bash", "arguments": arguments}}
        messages.append({"role": "assistant", "content": _text(words, 150), "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": _text(words, 2_000)})
    messages.append({"role": "user", "content": "Go on."})
    return body


def _text(words: dict[str, int], length: int) -> str:
    some = "".join(words)
    return (some * (length // len(some) + 1))[:length]


async def _first_token_times(engine: str) -> dict[int, float]:
    async with aiohttp.ClientSession() as session, session.get(engine + "/times") as response:
        return {int(number): seconds for number, seconds in (await response.json(content_type=None)).items()}


def _plain(target: Target, opening: dict, connections: int, requests: int) -> dict:
    """Return a row of the table for replies in one body."""
    rounds = max(1, round(requests / (connections * TURNS)))
    turns = min(TURNS, max(1, requests // connections))
    played = [asyncio.run(play(target, opening, connections=connections, turns=turns)) for _ in range(rounds)]
    times = [seconds for timings in played for seconds in timings.requests]
    return {
        "reply": "at once",
        "connections": connections,
        "target": target.name,
        "requests_per_s": len(times) / sum(timings.wall for timings in played),
        "p50_ms": 1e3 * statistics.median(times),
        "cpu_ms": 1e3 * sum(timings.cpu for timings in played) / len(times) if target.pid else None,
    }


def _streamed(target: Target, engine: str, opening: dict, connections: int, chunks: int, pace: float) -> dict:
    """Return a row of the table for streamed replies."""
    turns = 3 if connections == 1 else 1
    timings: Timings = asyncio.run(
        play(target, opening, connections=connections, turns=turns, paced_seconds=chunks * pace)
    )
    written = asyncio.run(_first_token_times(engine))
    delays = [seen - written[number] for number, seen in timings.first_deltas.items()]
    requests = len(timings.requests)
    return {
        "reply": "streamed",
        "connections": connections,
        "target": target.name,
        "requests_per_s": requests / timings.wall,
        "p50_ms": 1e3 * statistics.median(timings.requests),
        "cpu_ms": 1e3 * timings.cpu / requests if target.pid else None,
        "cpu_us_per_chunk": 1e6 * timings.cpu / (requests * chunks) if target.pid else None,
        "headers_p50_ms": 1e3 * statistics.median(timings.headers),
        "headers_p99_ms": 1e3 * sorted(timings.headers)[int(0.99 * len(timings.headers))],
        "first_delta_p50_ms": 1e3 * statistics.median(delays),
    }


_COLUMNS = {
    "connections": "open",
    "target": "target",
    "requests_per_s": "requests/s",
    "p50_ms": "p50 ms",
    "cpu_ms": "CPU ms",
    "cpu_us_per_chunk": "µs/chunk",
    "ratio": "of bare",
    "headers_p50_ms": "headers ms",
    "headers_p99_ms": "p99",
    "first_delta_p50_ms": "first delta ms",
}
_HIDDEN = {"at once": set(), "streamed": {"requests_per_s", "p50_ms", "cpu_ms"}}
"""Columns to hide. Those of streamed replies are determined by the engine's pace."""


def _add_ratios(rows: list[dict]) -> None:
    bare = {(row["reply"], row["connections"]): row["cpu_ms"] for row in rows if row["target"] == "bare redirect"}
    for row in rows:
        row["ratio"] = row["cpu_ms"] / bare[row["reply"], row["connections"]] if row["cpu_ms"] else None


def _table(reply: str, rows: list[dict]) -> Table:
    table = Table(title=f"{REQUEST_BYTES // 1000} KB requests, prefix known, replies {reply}")
    columns = [key for key in _COLUMNS if key in rows[0] and key not in _HIDDEN[reply]]
    for key in columns:
        table.add_column(_COLUMNS[key], justify="right", no_wrap=key == "target")
    for i, row in enumerate(rows):
        cells = (row[key] for key in columns)
        end = i + 1 == len(rows) or rows[i + 1]["connections"] != row["connections"]
        table.add_row(*(f"{c:.2f}" if isinstance(c, float) else str(c or "") for c in cells), end_section=end)
    return table


_STALL_COLUMNS = {
    "target": "target",
    "status": "status",
    "seconds": "s",
    "cpu_percent": "CPU %",
    "lag_p50_ms": "lag ms",
    "lag_p99_ms": "p99",
    "lag_max_ms": "worst",
    "others": "others",
    "others_p50_ms": "wait ms",
    "others_max_ms": "worst",
}


def _stall_table(load: str, rows: list[dict]) -> Table:
    table = Table(title=f"under load: {load}")
    for key, title in _STALL_COLUMNS.items():
        table.add_column(title, justify="right", no_wrap=key == "target")
    for row in rows:
        cells = (row[key] for key in _STALL_COLUMNS)
        table.add_row(*(f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells))
    return table


@click.command(help="Measure the recorder beside a bare mitmdump redirect and a direct call to the same engine.")
@click.option("--connections", type=int, multiple=True, default=(1, 16, 64), show_default=True, help="0 for no costs.")
@click.option("--requests", default=640, show_default=True, help="Measured requests a row, replies at once.")
@click.option("--chunks", default=200, show_default=True, help="Tokens of a streamed reply.")
@click.option("--pace", default=0.01, show_default=True, help="Seconds between two streamed tokens.")
@click.option("--streams", default=64, show_default=True, help="Long streams that are open at once; 0 for no loads.")
@click.option("--stream-tokens", default=16_000, show_default=True, help="Their tokens when first measured.")
@click.option("--stream-seconds", default=60, show_default=True, help="Time in which they grow.")
@click.option("--prompt-mb", default=8.0, show_default=True, help="Size of the large prompt.")
@click.option("--model", default=ROOT / "runs/quickstart/model", type=click.Path(path_type=Path), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def main(
    connections: tuple[int, ...],
    requests: int,
    chunks: int,
    pace: float,
    streams: int,
    stream_tokens: int,
    stream_seconds: int,
    prompt_mb: float,
    model: Path,
    as_json: bool,
) -> None:
    if not model.is_dir():
        raise click.ClickException(f"{model} is missing: make it with recipes/quickstart/make_model.py {model}")
    with tempfile.TemporaryDirectory() as folder:
        costs = _costs(Path(folder), model, connections, requests, chunks, pace) if connections != (0,) else []
        loads = Loads(streams, stream_tokens, stream_seconds, prompt_mb)
        stalls = measure(Path(folder), model, loads) if streams else []
    if as_json:
        return click.echo(json.dumps({"costs": costs, "stalls": stalls}, indent=2))
    for reply in ("at once", "streamed") if costs else ():
        Console().print(_table(reply, [row for row in costs if row["reply"] == reply]))
    for load in dict.fromkeys(row["load"] for row in stalls):
        Console().print(_stall_table(load, [row for row in stalls if row["load"] == load]))


def _costs(
    folder: Path, model: Path, connections: tuple[int, ...], requests: int, chunks: int, pace: float
) -> list[dict]:
    """Return the rows of the tables of cost."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    # words of one token each give as many bytes per token as a large vocabulary
    words = {" " + t[1:]: i for t, i in tokenizer.get_vocab().items() if re.fullmatch("Ġ[a-z]{3,}", t)}
    opening = _opening(words)
    rows = []
    with ExitStack() as stack:
        settings = _replies(words, tokenizer.eos_token_id, chunks=chunks, pace=pace) | {"tokenizer": str(model)}
        engine = stack.enter_context(Engine("engine", folder, settings)).url
        redirect = Path(__file__).with_name("redirect.py")
        bare = stack.enter_context(Mitmdump("bare redirect", folder, [redirect], {"bench_engine": engine}))
        options = {"rolltap_out": folder / "run", "rolltap_engine": engine, "rolltap_model": model}
        recorder = stack.enter_context(Mitmdump("recorder", folder, [RECORDER], options))
        targets = [Target("direct", engine + CHAT), Target.of(bare), Target.of(recorder)]
        for number in connections:
            rows += [_plain(target, opening, number, requests) for target in targets]
        for number in connections:
            rows += [_streamed(target, engine, opening, number, chunks, pace) for target in targets]
    _add_ratios(rows)
    return rows


if __name__ == "__main__":
    main()
