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

import click
import numpy as np

from tests.bench.client import Client, Timings
from tests.bench.frame import Rows
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


def measure(folder: Path, tokenizer: Path, loads: Loads) -> Rows:
    length = loads.tokens + PER_SECOND * loads.seconds
    settings = {
        "tokenizer": tokenizer,
        "lengths": [length, length],
        "burst": loads.tokens,
        "pace": 1 / PER_SECOND,
    }
    rows = []
    with Engine("model", folder, settings) as engine:
        bare = Mitmdump.bare(folder, engine)
        for proxy in (bare, Mitmdump.recorder(folder, folder / "stalls", engine, tokenizer)):
            samples = folder / f"{proxy.name}.lag"
            with proxy.measuring(samples):
                for load in (_Streams(loads, length), _Prompt(loads)):
                    row = {"load": load.name, "target": proxy.name}
                    rows.append(row | asyncio.run(_measure(load, proxy, samples)))
    return rows


@dataclass(frozen=True)
class Played:
    """The time in which a load was measured, by `time.monotonic`, and the statuses of its
    requests."""

    start: float
    end: float
    statuses: set[int]


class _Streams:
    """Streams that are long already, and grow at the pace of a large model."""

    def __init__(self, loads: Loads, length: int) -> None:
        self._loads, self._length = loads, length
        self.name = f"{loads.streams} streams of {loads.tokens:,} tokens"

    async def play(self, proxy: Mitmdump) -> Played:
        """Play the load. It is measured from the last stream's first tokens to the end of the first
        stream."""
        long = [asyncio.Event() for _ in range(self._loads.streams)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._stream(proxy, event)) for event in long]
            await asyncio.gather(*(event.wait() for event in long))
            start = time.monotonic()
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            end = time.monotonic()
        if end - start < self._loads.seconds / 4:
            raise click.ClickException(
                f"{proxy.name}: streams ended before all had begun: give more --stream-seconds"
            )
        return Played(start, end, {task.result() for task in tasks})

    async def _stream(self, proxy: Mitmdump, long: asyncio.Event) -> int:
        body = {**_small(), "max_tokens": self._length, "stream": True}
        received = b""
        async with _client(proxy) as client, client.post(body) as response:
            async for data in response.content.iter_any():
                received += data
                if len(received) >= _BYTES_PER_TOKEN * self._loads.tokens:
                    long.set()
        assert received.endswith(b"data: [DONE]\n\n"), received[-500:]
        return response.status


class _Prompt:
    def __init__(self, loads: Loads) -> None:
        self._bytes = int(loads.megabytes * 1e6)
        self.name = f"a prompt of {loads.megabytes:g} MB"

    async def play(self, proxy: Mitmdump) -> Played:
        body = _small(_source_text(self._bytes))
        async with _client(proxy) as client:
            start = time.monotonic()
            async with client.post(body) as response:
                await response.read()
            return Played(start, time.monotonic(), {response.status})


async def _measure(load: _Streams | _Prompt, proxy: Mitmdump, samples: Path) -> dict:
    waits: list[tuple[float, float]] = []
    async with _others(proxy, waits):
        cpu, started = proxy.cpu_seconds(), time.monotonic()
        played = await load.play(proxy)
        cpu_share = (proxy.cpu_seconds() - cpu) / (time.monotonic() - started)
    last = played.end + PAUSE_SECONDS  # a pause can cover a short load
    others = [
        seconds for ended, seconds in waits if played.start <= ended and ended - seconds <= last
    ]
    late = await _lateness(samples, played)
    return {
        "status": ", ".join(map(str, sorted(played.statuses))),
        "seconds": played.end - played.start,
        "CPU %": 100 * cpu_share,
        "lag ms": 1e3 * float(np.median(late)),
        "lag p99": 1e3 * float(np.percentile(late, 99)),
        "lag worst": 1e3 * float(late.max()),
        "others": len(others),
        "others' wait ms": 1e3 * float(np.median(others)),
        "others' worst": 1e3 * max(others),
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


def _small(text: str = "Go on.") -> dict:
    return {
        "model": "bench",
        "max_tokens": SMALL_TOKENS,
        "messages": [{"role": "user", "content": text}],
    }


def _source_text(length: int) -> str:
    """Return a text of the standard library's sources."""
    text = ""
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        text += path.read_text(encoding="ascii", errors="ignore")
        if len(text) >= length:
            break
    return text[:length]
