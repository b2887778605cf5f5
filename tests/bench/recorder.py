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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import click
from transformers import AutoTokenizer

from tests.bench.client import play
from tests.bench.frame import Rows, command, model_option
from tests.bench.processes import Engine, Mitmdump
from tests.bench.stalls import Loads, measure

REQUEST_BYTES = 50_000
SHORT_REPLY = 32
"""Token count of an immediate reply."""
TURNS = 20
"""Number of measured turns of a session."""


def _replies(words: dict[str, int], stop_id: int, *, chunks: int, pace: float) -> dict:
    """Return the settings of the engine. Its replies consist of `words`, a map of words to token
    ids."""
    spoken = list(words) * (max(chunks, SHORT_REPLY) // len(words) + 1)
    settings = {"words": spoken[:chunks], "token_ids": [words[word] for word in spoken[:chunks]]}
    return {**settings, "stop_id": stop_id, "short": SHORT_REPLY, "pace": pace}


def _opening(words: dict[str, int]) -> dict:
    """Return the body of a session's first request: a conversation of `REQUEST_BYTES`, most of it
    tool results."""
    parameters = {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
    }
    function = {"name": "bash", "description": _text(words, 2_000), "parameters": parameters}
    body: dict = {
        "model": "bench",
        "max_tokens": 4_096,
        "tools": [{"type": "function", "function": function}],
    }
    messages = [
        {"role": "system", "content": _text(words, 8_000)},
        {"role": "user", "content": "Fix the bug."},
    ]
    body["messages"] = messages
    while len(json.dumps(body)) < REQUEST_BYTES:
        arguments = json.dumps({"command": _text(words, 150)})
        call = {
            "id": f"call_{len(messages)}",
            "type": "function",
            "function": {"name": "bash", "arguments": arguments},
        }
        messages.append({"role": "assistant", "content": _text(words, 150), "tool_calls": [call]})
        messages.append(
            {"role": "tool", "tool_call_id": call["id"], "content": _text(words, 2_000)}
        )
    messages.append({"role": "user", "content": "Go on."})
    return body


def _text(words: dict[str, int], length: int) -> str:
    some = "".join(words)
    return (some * (length // len(some) + 1))[:length]


async def _first_token_times(engine: str) -> dict[int, float]:
    async with aiohttp.ClientSession() as session, session.get(engine + "/times") as response:
        return {
            int(number): seconds
            for number, seconds in (await response.json(content_type=None)).items()
        }


def _plain(proxy: Mitmdump, opening: dict, connections: int, requests: int) -> dict[str, Any]:
    rounds = max(1, round(requests / (connections * TURNS)))
    turns = min(TURNS, max(1, requests // connections))
    played = [
        asyncio.run(play(proxy, opening, connections=connections, turns=turns))
        for _ in range(rounds)
    ]
    times = [seconds for timings in played for seconds in timings.requests]
    return {
        "connections": connections,
        "target": proxy.name,
        "requests/s": len(times) / sum(timings.wall for timings in played),
        "p50 ms": 1e3 * statistics.median(times),
        "CPU ms": 1e3 * sum(timings.cpu for timings in played) / len(times),
    }


def _streamed(
    proxy: Mitmdump, engine: Engine, opening: dict, connections: int, chunks: int, pace: float
) -> dict[str, Any]:
    turns = 3 if connections == 1 else 1
    timings = asyncio.run(
        play(proxy, opening, connections=connections, turns=turns, paced_seconds=chunks * pace)
    )
    written = asyncio.run(_first_token_times(engine.url))
    delays = [seen - written[number] for number, seen in timings.first_deltas.items()]
    return {
        "connections": connections,
        "target": proxy.name,
        "CPU µs/chunk": 1e6 * timings.cpu / (len(timings.requests) * chunks),
        "headers ms": 1e3 * statistics.median(timings.headers),
        "headers p99": 1e3 * sorted(timings.headers)[int(0.99 * len(timings.headers))],
        "first delta ms": 1e3 * statistics.median(delays),
    }


def _with_ratios(rows: Rows, cost: str) -> Rows:
    """Return rows with the ratio of a cost to the bare redirect's."""
    bare = {row["connections"]: row[cost] for row in rows if row["target"] == "bare redirect"}
    return [row | {"of bare": row[cost] / bare[row["connections"]]} for row in rows]


def _costs(
    folder: Path, model: Path, connections: tuple[int, ...], requests: int, chunks: int, pace: float
) -> dict[str, Rows]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    # words of one token each give as many bytes per token as a large vocabulary
    words = {
        " " + t[1:]: i for t, i in tokenizer.get_vocab().items() if re.fullmatch("Ġ[a-z]{3,}", t)
    }
    opening = _opening(words)
    settings = _replies(words, tokenizer.eos_token_id, chunks=chunks, pace=pace) | {
        "tokenizer": model
    }
    with ExitStack() as stack:
        engine = stack.enter_context(Engine("prepared", folder, settings))
        bare = stack.enter_context(Mitmdump.bare(folder, engine))
        recorder = stack.enter_context(Mitmdump.recorder(folder, folder / "run", engine, model))
        proxies = [bare, recorder]
        plain = [
            _plain(proxy, opening, number, requests) for number in connections for proxy in proxies
        ]
        streamed = [
            _streamed(proxy, engine, opening, number, chunks, pace)
            for number in connections
            for proxy in proxies
        ]
    return {
        "replies at once": _with_ratios(plain, "CPU ms"),
        "streamed": _with_ratios(streamed, "CPU µs/chunk"),
    }


@command
@click.option(
    "--connections",
    type=int,
    multiple=True,
    default=(1, 16, 64),
    show_default=True,
    help="0 for no costs.",
)
@click.option(
    "--requests", default=640, show_default=True, help="Measured requests a row, replies at once."
)
@click.option("--chunks", default=200, show_default=True, help="Tokens of a streamed reply.")
@click.option(
    "--pace", default=0.01, show_default=True, help="Seconds between two streamed tokens."
)
@click.option(
    "--streams",
    default=64,
    show_default=True,
    help="Long streams that are open at once; 0 for no loads.",
)
@click.option(
    "--stream-tokens", default=16_000, show_default=True, help="Their tokens when first measured."
)
@click.option("--stream-seconds", default=60, show_default=True, help="Time in which they grow.")
@click.option("--prompt-mb", default=8.0, show_default=True, help="Size of the large prompt.")
@model_option
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
) -> dict[str, Rows]:
    """Measure the recorder beside a bare mitmdump redirect to the same engine."""
    with tempfile.TemporaryDirectory() as folder:
        found = (
            _costs(Path(folder), model, connections, requests, chunks, pace)
            if connections != (0,)
            else {}
        )
        if streams:
            found["under load"] = measure(
                Path(folder), model, Loads(streams, stream_tokens, stream_seconds, prompt_mb)
            )
    return found


if __name__ == "__main__":
    main()
