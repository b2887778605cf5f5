"""Measure the recorder on long conversations, through TLS, with commits and prepared replies.

    python -m tests.bench.conversations

Clients play coding agents: a streamed call a turn, a tool call in each reply, a result of a few
hundred bytes. CPU is that of the recorder process. Three tables:

- turns: sessions that open with a prompt of so many tokens, and the cost of their later turns;
- trajectory: one session that grows to a million tokens in 700 turns;
- saturated: many sessions that open with 50,000 tokens, take 31 turns, and give each tenth turn to
  a sub-agent with a prompt of its own. The engine answers after `--reply-seconds`. The share
  compares their turns a second with those of clients that ask the engine directly.
"""

import asyncio
import json
import random
import ssl
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import click
from transformers import AutoTokenizer

from tests.bench.engines import FIRST_PACED
from tests.bench.frame import Rows, command, model_option, prose
from tests.bench.processes import Engine, Mitmdump, resident_mb
from tests.bench.wire import APIS, MAX_TOKENS, Api

LENGTHS = (8_000, 80_000, 400_000, 1_000_000)
"""Tokens of prompts."""
SESSIONS = (96, 192, 384)
BYTES_PER_TOKEN = 2.6
MEASURED_TURNS = 8
RESULT_BYTES = 400
OPENING_TOKENS = 50_000
OPENING_PIECE = 1_500
"""Bytes of a tool result of an opening."""
SUB_AGENT_TURN = 10
"""Each so many turns of a session, a sub-agent asks in its place."""
SUB_AGENT_TOKENS = 5_000
SHAPES = APIS[:2]
"""Chat Completions and Messages."""

Target = Callable[[str], dict[str, Any]]
"""Session id -> the options with which aiohttp sends its requests."""


class Agent:
    """A conversation of one API. `items` grow as a harness appends replies and results."""

    def __init__(self, api: Api, options: dict[str, Any], seed: int, tokens: int) -> None:
        self.api = api
        self.options = options
        self._rng = random.Random(seed)
        self.items: list[dict[str, Any]] = api.said(f"Fix the program of session {seed}.")
        size = 0
        while size < tokens * BYTES_PER_TOKEN:
            piece = self.prose(OPENING_PIECE)
            size += len(json.dumps(piece))
            # results differ from API to API: user messages and replies fill an opening
            self.items += [{"role": "assistant", "content": "I look."}, *api.said(piece)]

    def prose(self, length: int) -> str:
        text = ""
        while len(text) < length:
            text += prose(self._rng, 100) + "\n"
        return text[:length]

    async def turn(
        self,
        http: aiohttp.ClientSession,
        url: str | None,
        result_bytes: int,
        paced: bool,
    ) -> None:
        """Ask for a reply, and append it and the result of its tool call."""
        body = self.api.body(self.items, True)
        body["max_tokens"] = FIRST_PACED if paced else MAX_TOKENS
        data = json.dumps(body).encode()
        headers = {"content-type": "application/json", **self.api.headers}
        asked = url or self.api.url(True)
        async with http.post(asked, data=data, headers=headers, **self.options) as response:
            answered = await response.read()
        assert response.status == 200, answered[:500]
        if url is None:
            answer = self.api.read(answered, True)
            assert answer.calls, answered[-500:]
            self.items += [*answer.items, *self.api.results(answer, self.prose(result_bytes))]
        else:
            said = {"role": "assistant", "content": "I look."}
            self.items += [said, *self.api.said(self.prose(result_bytes))]


def _through(proxy: Mitmdump) -> Target:
    context = ssl.create_default_context(cafile=proxy.ca)

    def options(session_id: str) -> dict[str, Any]:
        auth = aiohttp.BasicAuth(session_id, "x")
        return {"proxy": proxy.url, "proxy_auth": auth, "ssl": context}

    return options


def _http() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600), connector=connector)


async def _turns(proxy: Mitmdump, api: Api, tokens: int) -> dict[str, Any]:
    """Return the cost of a turn of a session that has so many tokens."""
    agent = Agent(api, _through(proxy)(f"turns-{api.name}-{tokens}"), tokens, tokens)
    async with _http() as http:
        await agent.turn(http, None, RESULT_BYTES, paced=False)
        await agent.turn(http, None, RESULT_BYTES, paced=False)
        before, started = proxy.cpu_seconds(), time.perf_counter()
        for _ in range(MEASURED_TURNS):
            await agent.turn(http, None, RESULT_BYTES, paced=False)
        cpu, wall = proxy.cpu_seconds() - before, time.perf_counter() - started
    kilobytes = len(json.dumps(agent.api.body(agent.items, True))) / 1e3
    milliseconds = 1e3 * cpu / MEASURED_TURNS
    return {
        "API": api.name,
        "tokens": tokens,
        "body KB": kilobytes,
        "CPU ms a turn": milliseconds,
        "of 3 ms + 10 us a KB": milliseconds / (3 + kilobytes / 100),
        "wall ms a turn": 1e3 * wall / MEASURED_TURNS,
    }


async def _trajectory(proxy: Mitmdump, api: Api, turns: int, tokens: int) -> dict[str, Any]:
    agent = Agent(api, _through(proxy)(f"trajectory-{api.name}"), 7, 0)
    result_bytes = int(tokens * BYTES_PER_TOKEN / turns) - 400
    before, last = proxy.cpu_seconds(), 0.0
    async with _http() as http:
        for _ in range(turns):
            started = proxy.cpu_seconds()
            await agent.turn(http, None, result_bytes, paced=False)
            last = proxy.cpu_seconds() - started
    return {
        "API": api.name,
        "turns": turns,
        "body MB": len(json.dumps(agent.api.body(agent.items, True))) / 1e6,
        "CPU s": proxy.cpu_seconds() - before,
        "last turn ms": 1e3 * last,
        "recorder MB": resident_mb(proxy.process.pid),
    }


async def _saturated(
    targets: list[Target],
    url: str | None,
    sessions: int,
    turns: int,
    proxies: Sequence[Mitmdump] = (),
) -> dict[str, float]:
    """Return the costs of so many sessions at a time, after their first turns.

    Without `proxies`, they ask for `url` themselves.
    """

    async def play(number: int, gate: asyncio.Barrier) -> None:
        api = SHAPES[0] if url else SHAPES[number % len(SHAPES)]
        options = targets[number % len(targets)](f"saturated-{sessions}-{len(targets)}-{number}")
        main = Agent(api, options, number, OPENING_TOKENS)
        await main.turn(http, url, RESULT_BYTES, paced=True)
        await gate.wait()
        for turn in range(1, turns):
            agent = main
            if turn % SUB_AGENT_TURN == 0:
                agent = Agent(api, options, number + turn, SUB_AGENT_TOKENS)
            await agent.turn(http, url, RESULT_BYTES, paced=True)

    gate = asyncio.Barrier(sessions + 1)
    async with _http() as http:
        async with asyncio.TaskGroup() as group:
            for number in range(sessions):
                group.create_task(play(number, gate))
            await gate.wait()
            started = time.perf_counter()
            before = sum(proxy.cpu_seconds() for proxy in proxies)
        taken = sessions * (turns - 1)
        return {
            "turns/s": taken / (time.perf_counter() - started),
            "CPU ms a turn": 1e3 * (sum(proxy.cpu_seconds() for proxy in proxies) - before) / taken,
        }


class Bench:
    """The processes of one table, in a folder of their own."""

    def __init__(self, folder: Path, model: Path, reply_seconds: float) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        call = json.dumps({"name": "bash", "arguments": {"command": "sed -n 1,20p file.py"}})
        reply = f"I look.\n<tool_call>\n{call}\n</tool_call>"
        ids = tokenizer.encode(reply, add_special_tokens=False)
        settings = {
            "words": [" word"] * len(ids),
            "token_ids": ids,
            "stop_id": tokenizer.eos_token_id,
            "short": len(ids),
            "pace": reply_seconds / len(ids),
            "tokenizer": model,
        }
        self._folder = folder
        self._model = model
        self.engine = Engine("prepared", folder, settings)

    def recorder(self, number: int) -> Mitmdump:
        folder = self._folder / str(number)
        folder.mkdir(exist_ok=True)
        return Mitmdump.recorder(folder, folder / "run", self.engine, self._model)


def _saturation(
    bench: Bench,
    sessions: tuple[int, ...],
    processes: tuple[int, ...],
    turns: int,
) -> Rows:
    rows: Rows = []
    for number in sessions:
        chat = bench.engine.url + "/v1/chat/completions"
        direct = asyncio.run(_saturated([lambda _: {}], chat, number, turns))["turns/s"]
        for count in processes:
            with ExitStack() as stack:
                proxies = [stack.enter_context(bench.recorder(1 + i)) for i in range(count)]
                targets = [_through(proxy) for proxy in proxies]
                found = asyncio.run(_saturated(targets, None, number, turns, proxies))
                memory = max(resident_mb(proxy.process.pid) for proxy in proxies)
            row = {
                "sessions": number,
                "recorders": count,
                **found,
                "share of direct": found["turns/s"] / direct,
                "MB a recorder": memory,
            }
            rows.append(row)
    return rows


@command
@click.option("--tokens", type=int, multiple=True, default=LENGTHS, show_default=True)
@click.option("--turns", default=700, show_default=True, help="Of the trajectory; 0 for none.")
@click.option("--trajectory-tokens", default=1_000_000, show_default=True)
@click.option("--sessions", type=int, multiple=True, default=SESSIONS, help="0 for none.")
@click.option("--processes", type=int, multiple=True, default=(1, 4), help="Recorders.")
@click.option("--session-turns", default=31, show_default=True)
@click.option("--reply-seconds", default=2.6, show_default=True, help="Of the last table.")
@model_option
def main(
    tokens: tuple[int, ...],
    turns: int,
    trajectory_tokens: int,
    sessions: tuple[int, ...],
    processes: tuple[int, ...],
    session_turns: int,
    reply_seconds: float,
    model: Path,
) -> dict[str, Rows]:
    """Measure the recorder's cost of long conversations."""
    found: dict[str, Rows] = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), model, reply_seconds)
        with bench.engine:
            with bench.recorder(0) as proxy:
                rows = [_turns(proxy, api, number) for api in SHAPES for number in tokens]
                found["turns"] = [asyncio.run(row) for row in rows]
            if turns:
                with bench.recorder(0) as proxy:
                    play = [_trajectory(proxy, api, turns, trajectory_tokens) for api in SHAPES]
                    found["trajectory"] = [asyncio.run(played) for played in play]
            if sessions != (0,):
                found["saturated"] = _saturation(bench, sessions, processes, session_turns)
    return found


if __name__ == "__main__":
    main()
