"""Measure the recorder on long conversations, through TLS, with commits and prepared replies.

    python -m tests.bench.conversations

Clients play coding agents: a streamed call a turn, a tool call in each reply, a result of a few
hundred bytes. CPU is that of the recorder process. Two tables:

- turns: sessions that open with a prompt of so many tokens, and the cost of their later turns;
- trajectory: one session that grows to a million tokens in 700 turns.
"""

import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import click
from transformers import AutoTokenizer

from tests.bench.frame import Rows, command, model_option, prose
from tests.bench.processes import Engine, Mitmdump
from tests.bench.wire import APIS, MAX_TOKENS, Api

LENGTHS = (8_000, 80_000, 400_000, 1_000_000)
"""Tokens of prompts."""
BYTES_PER_TOKEN = 2.6
MEASURED_TURNS = 8
RESULT_BYTES = 400
OPENING_PIECE = 1_500
"""Bytes of a tool result of an opening."""
SHAPES = APIS[:2]
"""Chat Completions and Messages."""
LOOK = {"role": "assistant", "content": "I look."}


class Agent:
    """A conversation of one API. `items` grow as a harness appends replies and results."""

    def __init__(self, api: Api, proxy: Mitmdump, name: str, seed: int, tokens: int) -> None:
        self.api = api
        self.options = proxy.options(f"{name}-{api.name}", proxy.context())
        self._rng = random.Random(seed)
        self.items: list[dict[str, Any]] = api.said(f"Fix the program of session {seed}.")
        size = 0
        while size < tokens * BYTES_PER_TOKEN:
            piece = self.prose(OPENING_PIECE)
            size += len(json.dumps(piece))
            # results differ from API to API: user messages and replies fill an opening
            self.items += [LOOK, *api.said(piece)]

    def prose(self, length: int) -> str:
        text = ""
        while len(text) < length:
            text += prose(self._rng, 100) + "\n"
        return text[:length]

    @property
    def size(self) -> int:
        """Bytes of a request."""
        return len(json.dumps(self.api.body(self.items, True)))

    async def turn(self, http: aiohttp.ClientSession, result_bytes: int = RESULT_BYTES) -> None:
        """Ask for a reply, and append it and the result of its tool call."""
        data = json.dumps(self.api.body(self.items, True) | {"max_tokens": MAX_TOKENS}).encode()
        headers = {"content-type": "application/json", **self.api.headers}
        asked = http.post(self.api.url(True), data=data, headers=headers, **self.options)
        async with asked as response:
            answered = await response.read()
        assert response.status == 200, answered[:500]
        answer = self.api.read(answered, True)
        assert answer.calls, answered[-500:]
        self.items += [*answer.items, *self.api.results(answer, self.prose(result_bytes))]


def _http() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600))


async def turns_of(proxy: Mitmdump, api: Api, tokens: int) -> dict[str, Any]:
    """Return the cost of a turn of a session that has so many tokens."""
    agent = Agent(api, proxy, f"turns-{tokens}", tokens, tokens)
    async with _http() as http:
        await agent.turn(http)
        await agent.turn(http)
        before = proxy.cpu_seconds()
        started = time.perf_counter()
        for _ in range(MEASURED_TURNS):
            await agent.turn(http)
        cpu = 1e3 * (proxy.cpu_seconds() - before) / MEASURED_TURNS
        wall = 1e3 * (time.perf_counter() - started) / MEASURED_TURNS
    kilobytes = agent.size / 1e3
    return {
        "API": api.name,
        "tokens": tokens,
        "body KB": kilobytes,
        "CPU ms a turn": cpu,
        "of 3 ms + 10 us a KB": cpu / (3 + kilobytes / 100),
        "wall ms a turn": wall,
    }


async def trajectory(proxy: Mitmdump, api: Api, turns: int, tokens: int) -> dict[str, Any]:
    agent = Agent(api, proxy, "trajectory", 7, 0)
    result_bytes = int(tokens * BYTES_PER_TOKEN / turns) - 400
    before = proxy.cpu_seconds()
    last = 0.0
    async with _http() as http:
        for _ in range(turns):
            started = proxy.cpu_seconds()
            await agent.turn(http, result_bytes)
            last = proxy.cpu_seconds() - started
    return {
        "API": api.name,
        "turns": turns,
        "body MB": agent.size / 1e6,
        "CPU s": proxy.cpu_seconds() - before,
        "last turn ms": 1e3 * last,
        "recorder MB": proxy.megabytes(),
    }


def prepared(folder: Path, model: Path) -> Engine:
    """Return an engine whose replies look at a file."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    call = json.dumps({"name": "bash", "arguments": {"command": "sed -n 1,20p file.py"}})
    reply = f"I look.\n<tool_call>\n{call}\n</tool_call>"
    ids = tokenizer.encode(reply, add_special_tokens=False)
    settings = {
        "words": [" word"] * len(ids),
        "token_ids": ids,
        "stop_id": tokenizer.eos_token_id,
        "short": len(ids),
        "pace": 0.0,
        "tokenizer": model,
    }
    return Engine("prepared", folder, settings)


@command
@click.option("--tokens", type=int, multiple=True, default=LENGTHS)
@click.option("--turns", default=700, help="Of the trajectory; 0 for none.")
@click.option("--trajectory-tokens", default=1_000_000)
@model_option
def main(
    tokens: tuple[int, ...], turns: int, trajectory_tokens: int, model: Path
) -> dict[str, Rows]:
    """Measure the recorder's cost of long conversations."""
    found: dict[str, Rows] = {"turns": []}
    with tempfile.TemporaryDirectory() as name, prepared(Path(name), model) as engine:
        recorder = Mitmdump.recorder(Path(name), Path(name, "run"), engine, model)
        with recorder as proxy:
            for api in SHAPES:
                for number in tokens:
                    found["turns"].append(asyncio.run(turns_of(proxy, api, number)))
        if turns:
            found["trajectory"] = []
            with recorder as proxy:
                for api in SHAPES:
                    row = asyncio.run(trajectory(proxy, api, turns, trajectory_tokens))
                    found["trajectory"].append(row)
    return found


if __name__ == "__main__":
    main()
