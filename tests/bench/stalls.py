"""Loads that can stall the recorder: long streams, and a prompt of megabytes. How late is its loop,
and who waits?

While a load lasts, another session sends small requests, one after the other with a pause. Their
replies are immediate, so their times are those of the proxy. The lateness of the loop is measured
inside the proxy (`tests/bench/lag.py`).
"""

import asyncio
import sysconfig
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from tests.bench.client import Client, Timings
from tests.bench.frame import Rows, milliseconds
from tests.bench.processes import Engine, Mitmdump

PER_SECOND = 30
"""Tokens per second of a stream."""
SMALL_TOKENS = 32
PAUSE_SECONDS = 0.05
_BYTES_PER_TOKEN = 2
"""A stream that has received so many bytes for each of its first tokens has received them all but a
tool call. Words have more."""


@dataclass(frozen=True)
class Loads:
    """Sizes of the loads. `tokens` is the length of a stream when it is first measured."""

    streams: int
    tokens: int
    seconds: int
    megabytes: float

    @property
    def length(self) -> int:
        """Tokens of a stream at its end."""
        return self.tokens + PER_SECOND * self.seconds


@dataclass(frozen=True)
class Played:
    """The time in which a load was measured, by `time.monotonic`, and the statuses of its
    requests."""

    start: float
    end: float
    statuses: set[int]


def measure(folder: Path, tokenizer: Path, loads: Loads) -> Rows:
    settings = {
        "tokenizer": tokenizer,
        "lengths": [loads.length, loads.length],
        "burst": loads.tokens,
        "pace": 1 / PER_SECOND,
    }
    titles = {
        f"{loads.streams} streams of {loads.tokens:,} tokens": play_streams,
        f"a prompt of {loads.megabytes:g} MB": play_prompt,
    }
    rows = []
    with Engine("model", folder, settings) as engine:
        bare = Mitmdump.bare(folder, engine)
        for proxy in (bare, Mitmdump.recorder(folder, folder / "stalls", engine, tokenizer)):
            samples = folder / f"{proxy.name}.lag"
            with proxy.script("lag.py", bench_lag=samples):
                for title, play in titles.items():
                    row = {"load": title, "target": proxy.name}
                    rows.append(row | asyncio.run(_measure(play, loads, proxy, samples)))
    return rows


async def play_streams(proxy: Mitmdump, loads: Loads) -> Played:
    """Play streams that are long already, and grow at the pace of a large model.

    They are measured from the last stream's first tokens to the end of the first stream.
    """

    async def stream(long: asyncio.Event) -> int:
        body = {**_small(), "max_tokens": loads.length, "stream": True}
        received = b""
        async with _client(proxy) as client, client.post(body) as response:
            async for data in response.content.iter_any():
                received += data
                if len(received) >= _BYTES_PER_TOKEN * loads.tokens:
                    long.set()
        assert received.endswith(b"data: [DONE]\n\n"), received[-500:]
        return response.status

    long = [asyncio.Event() for _ in range(loads.streams)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream(event)) for event in long]
        for event in long:
            await event.wait()
        start = time.monotonic()
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        end = time.monotonic()
    if end - start < loads.seconds / 4:
        early = "streams ended before all had begun: give more --stream-seconds"
        raise click.ClickException(f"{proxy.name}: {early}")
    return Played(start, end, {task.result() for task in tasks})


async def play_prompt(proxy: Mitmdump, loads: Loads) -> Played:
    """Send one large prompt."""
    body = _small(_source_text(int(loads.megabytes * 1e6)))
    async with _client(proxy) as client:
        start = time.monotonic()
        async with client.post(body) as response:
            await response.read()
        return Played(start, time.monotonic(), {response.status})


async def _measure(play: Any, loads: Loads, proxy: Mitmdump, samples: Path) -> dict[str, Any]:
    waits: list[tuple[float, float]] = []
    async with _others(proxy, waits):
        cpu = proxy.cpu_seconds()
        started = time.monotonic()
        played = await play(proxy, loads)
        cpu_share = (proxy.cpu_seconds() - cpu) / (time.monotonic() - started)
    last = played.end + PAUSE_SECONDS  # a pause can cover a short load
    others = []
    for ended, seconds in waits:
        if played.start <= ended and ended - seconds <= last:
            others.append(seconds)
    late = await _lateness(samples, played)
    return {
        "status": ", ".join(map(str, sorted(played.statuses))),
        "seconds": played.end - played.start,
        "CPU %": 100 * cpu_share,
        **milliseconds("lag", late),
        "others": len(others),
        **milliseconds("others' wait", others),
    }


@asynccontextmanager
async def _others(proxy: Mitmdump, waits: list[tuple[float, float]]) -> AsyncIterator[None]:
    """Send small requests for the duration of the block, and append the end and the seconds of each
    to `waits`.

    The first one is answered before the block begins, the last one after it has ended.
    """
    over = False

    async def ask_again() -> None:
        while not over:
            await asyncio.sleep(PAUSE_SECONDS)
            await ask()

    async def ask() -> None:
        started = time.monotonic()
        async with client.post(_small()) as response:
            answer = await response.read()
        assert response.status == 200, answer
        waits.append((time.monotonic(), time.monotonic() - started))

    async with _client(proxy) as client:
        await ask()
        task = asyncio.create_task(ask_again())
        yield
        over = True
        await task


async def _lateness(samples: Path, played: Played) -> np.ndarray:
    """Return the seconds by which the loop was late under a load. The proxy writes its samples in
    blocks: waits."""
    while True:
        written = samples.read_bytes() if samples.exists() else b""
        times, late = np.frombuffer(written[: len(written) // 16 * 16]).reshape(-1, 2).T
        if len(times) and times[-1] > played.end:
            # a sample is about the time since the one before
            before = np.concatenate([[0.0], times[:-1]])
            return late[(times >= played.start) & (before <= played.end)]
        await asyncio.sleep(0.1)


def _client(proxy: Mitmdump) -> Client:
    return Client(proxy, {"messages": []}, Timings())


def _small(text: str = "Go on.") -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "bench", "max_tokens": SMALL_TOKENS, "messages": messages}


def _source_text(length: int) -> str:
    """Return a text of the standard library's sources."""
    text = ""
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        text += path.read_text(encoding="ascii", errors="ignore")
        if len(text) >= length:
            break
    return text[:length]
