"""Measure the recorder's cost against a bare mitmdump redirect to the same engine.

    python -m tests.bench.recorder

Every part runs in its own process. A connection is a session whose conversation grows by a short
message a turn. So the recorder knows the prefix of every measured request. CPU is that of the proxy
process, summed over its threads: per request, and for streamed replies per token that the engine
sent. Headers and first delta are medians. The first delta is measured from the engine's write of
the first token.

A last table has the loads that can stall a proxy, see `tests/bench/stalls.py`.
"""

import asyncio
import json
import re
import statistics
import tempfile
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from transformers import AutoTokenizer

from tests.bench.client import play
from tests.bench.frame import Rows, command, milliseconds, model_option
from tests.bench.processes import Engine, Mitmdump
from tests.bench.stalls import Loads, measure
from tests.bench.wire import PARAMETERS

REQUEST_BYTES = 50_000
SHORT_REPLY = 32
"""Token count of an immediate reply."""
TURNS = 20
"""Number of measured turns of a session."""


def opening(words: list[str]) -> dict[str, Any]:
    """Return the body of a session's first request: a conversation of `REQUEST_BYTES`, most of it
    tool results."""
    some = "".join(words)

    def text(length: int) -> str:
        return (some * (length // len(some) + 1))[:length]

    function = {"name": "bash", "description": text(2_000), "parameters": PARAMETERS}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": text(8_000)},
        {"role": "user", "content": "Fix the bug."},
    ]
    body = {
        "model": "bench",
        "max_tokens": 4_096,
        "tools": [{"type": "function", "function": function}],
        "messages": messages,
    }
    while len(json.dumps(body)) < REQUEST_BYTES:
        name = f"call_{len(messages)}"
        called = {"name": "bash", "arguments": json.dumps({"command": text(150)})}
        call = {"id": name, "type": "function", "function": called}
        messages.append({"role": "assistant", "content": text(150), "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": name, "content": text(2_000)})
    messages.append({"role": "user", "content": "Go on."})
    return body


@dataclass
class Bench:
    """The costs of proxies to one engine."""

    engine: Engine
    opening: dict[str, Any]
    requests: int
    chunks: int
    pace: float

    def plain(self, proxy: Mitmdump, connections: int) -> dict[str, Any]:
        rounds = max(1, round(self.requests / (connections * TURNS)))
        turns = min(TURNS, max(1, self.requests // connections))
        times: list[float] = []
        wall = 0.0
        cpu = 0.0
        for _ in range(rounds):
            played = asyncio.run(play(proxy, self.opening, connections=connections, turns=turns))
            times += played.requests
            wall += played.wall
            cpu += played.cpu
        return {
            "connections": connections,
            "target": proxy.name,
            "requests/s": len(times) / wall,
            "p50 ms": 1e3 * statistics.median(times),
            "CPU ms": 1e3 * cpu / len(times),
        }

    def streamed(self, proxy: Mitmdump, connections: int) -> dict[str, Any]:
        turns = 3 if connections == 1 else 1
        seconds = self.chunks * self.pace
        playing = play(
            proxy, self.opening, connections=connections, turns=turns, paced_seconds=seconds
        )
        timings = asyncio.run(playing)
        with urllib.request.urlopen(f"{self.engine.url}/times") as answer:
            written = json.load(answer)
        delays = [seen - written[str(number)] for number, seen in timings.first_deltas.items()]
        return {
            "connections": connections,
            "target": proxy.name,
            "CPU µs/chunk": 1e6 * timings.cpu / (len(timings.requests) * self.chunks),
            **milliseconds("headers", timings.headers),
            "first delta ms": 1e3 * statistics.median(delays),
        }


def with_ratios(rows: Rows, cost: str) -> Rows:
    """Return rows with the ratio of a cost to the bare redirect's, whose row comes first."""
    for row in rows:
        if row["target"] == "bare redirect":
            bare = row[cost]
        row["of bare"] = row[cost] / bare
    return rows


def costs(
    folder: Path, model: Path, connections: tuple[int, ...], requests: int, chunks: int, pace: float
) -> dict[str, Rows]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    # words of one token each give as many bytes per token as a large vocabulary
    words = {}
    for token, number in tokenizer.get_vocab().items():
        if re.fullmatch("Ġ[a-z]{3,}", token):
            words[" " + token[1:]] = number
    spoken = (list(words) * (max(chunks, SHORT_REPLY) // len(words) + 1))[:chunks]
    settings = {
        "words": spoken,
        "token_ids": [words[word] for word in spoken],
        "stop_id": tokenizer.eos_token_id,
        "short": SHORT_REPLY,
        "pace": pace,
        "tokenizer": model,
    }
    with ExitStack() as stack:
        engine = stack.enter_context(Engine("prepared", folder, settings))
        bench = Bench(engine, opening(list(words)), requests, chunks, pace)
        bare = stack.enter_context(Mitmdump.bare(folder, engine))
        recorder = stack.enter_context(Mitmdump.recorder(folder, folder / "run", engine, model))
        cases = [(proxy, number) for number in connections for proxy in (bare, recorder)]
        plain = [bench.plain(*case) for case in cases]
        streamed = [bench.streamed(*case) for case in cases]
    return {
        "replies at once": with_ratios(plain, "CPU ms"),
        "streamed": with_ratios(streamed, "CPU µs/chunk"),
    }


@command
@click.option("--connections", type=int, multiple=True, default=(1, 16, 64), help="0 for no costs.")
@click.option("--requests", default=640, help="Measured requests a row, replies at once.")
@click.option("--chunks", default=200, help="Tokens of a streamed reply.")
@click.option("--pace", default=0.01, help="Seconds between two streamed tokens.")
@click.option("--streams", default=64, help="Long streams that are open at once; 0 for no loads.")
@click.option("--stream-tokens", default=16_000, help="Their tokens when first measured.")
@click.option("--stream-seconds", default=60, help="Time in which they grow.")
@click.option("--prompt-mb", default=8.0, help="Size of the large prompt.")
@model_option
def main(
    connections: tuple[int, ...],
    streams: int,
    stream_tokens: int,
    stream_seconds: int,
    prompt_mb: float,
    model: Path,
    **load: Any,
) -> dict[str, Rows]:
    """Measure the recorder beside a bare mitmdump redirect to the same engine."""
    found: dict[str, Rows] = {}
    with tempfile.TemporaryDirectory() as folder:
        if connections != (0,):
            found |= costs(Path(folder), model, connections, **load)
        if streams:
            loads = Loads(streams, stream_tokens, stream_seconds, prompt_mb)
            found["under load"] = measure(Path(folder), model, loads)
    return found


if __name__ == "__main__":
    main()
