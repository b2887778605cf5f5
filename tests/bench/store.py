"""Measure the cost of recording on the disk: commits per second and bytes per token.

    python -m tests.bench.store

A commit is a call such as a recorder makes: 666 new tokens, of which 200 sampled, and 3 KB of
messages. With the policy `call` a number of concurrent calls wait for fsync, as in the recorder.
"disk alone" is a loop of appending as many bytes and calling fdatasync. The session of the second
table grows to 40,000 tokens in 60 calls. Bytes per token are the file's bytes over those tokens.
JSON Lines hold the same values and the whole prompt in every call.
"""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click
import numpy as np
import pyarrow as pa

from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Call
from rolltap.addons.store.tables import RunWriter, Sync, read_batches, run_files
from tests.bench.frame import Rows, command
from tests.factories import make_call

TURNS = 60
NEW_TOKENS, SAMPLED = 466, 200
"""Token counts of a turn: new prompt tokens after the parent's, and the reply."""
_WORDS = [
    "the",
    "file",
    "has",
    "a",
    "test",
    "that",
    "fails",
    "when",
    "it",
    "is",
    "run",
    "with",
    "an",
    "empty",
    "list",
]


def make_session(number: int) -> Iterator[Call]:
    """Yield the calls of a session that grows."""
    some = np.random.default_rng(number)
    call = None
    for turn in range(TURNS):
        call = make_call(
            f"{number:08x}{turn:024x}",
            (150_000 ** some.random(NEW_TOKENS)).astype(int).tolist(),
            (150_000 ** some.random(SAMPLED)).astype(int).tolist(),
            after=call,
            session_id=f"session-{number}",
            logprobs=(-some.exponential(0.3, SAMPLED)).tolist(),
            dialect="chat",
            host="api.openai.com",
            path="/v1/chat/completions",
            model="model",
            finish_reason="stop",
            messages=json.dumps([{"role": "tool", "content": " ".join(some.choice(_WORDS, 650))}]),
            reply=json.dumps({"role": "assistant", "content": " ".join(some.choice(_WORDS, 100))}),
        )
        yield call


async def _commit(writer: RunWriter, calls: list[Call], at_once: int) -> None:
    left = iter(calls)

    async def worker() -> None:
        for call in left:
            writer.add_call(call)
            if writer.sync_policy == "call":
                await asyncio.to_thread(writer.sync)
            elif writer.sync_policy == "session" and call.call_id.endswith(f"{TURNS - 1:x}"):
                await asyncio.to_thread(writer.end_session)

    await asyncio.gather(*(worker() for _ in range(at_once)))


def _commits(folder: Path, calls: list[Call], sync: Sync, at_once: int) -> dict:
    write_metadata(folder, {})
    writer = RunWriter(folder, sync)
    start = time.perf_counter()
    asyncio.run(_commit(writer, calls, at_once))
    seconds = time.perf_counter() - start
    writer.close()
    return {"sync": sync, "calls at once": at_once, "commits/s": len(calls) / seconds}


def _disk(folder: Path, size: int, times: int) -> dict:
    data = bytes(size)
    with (folder / "disk").open("xb", buffering=0) as file:
        start = time.perf_counter()
        for _ in range(times):
            file.write(data)
            os.fdatasync(file.fileno())
        seconds = time.perf_counter() - start
    return {"sync": "disk alone", "calls at once": 1, "commits/s": times / seconds}


def _sizes(folder: Path) -> list[dict]:
    write_metadata(folder, {})
    calls = list(make_session(0))
    writer = RunWriter(folder, "never")
    for call in calls:
        writer.add_call(call)
    [path] = run_files(folder, "calls")
    sizes = {"as recorded": path.stat().st_size}
    writer.close()
    sizes["compacted"] = path.stat().st_size
    compressed = folder / "compressed"
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    batches = list(read_batches(folder, "calls"))
    with pa.ipc.new_stream(compressed, batches[0].schema, options=options) as stream:
        for batch in batches:
            stream.write_batch(batch)
    sizes["compacted, zstd"] = compressed.stat().st_size
    lines = (json.dumps(asdict(call), default=str) + "\n" for call in calls)
    sizes["JSON Lines"] = sum(len(line.encode()) for line in lines)
    tokens = len(calls[-1].prompt_ids) + SAMPLED
    return [
        {"file": file, "bytes": size, "bytes/token": size / tokens} for file, size in sizes.items()
    ]


@command
@click.option("--commits", default=1800, show_default=True, help="Commits a row.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="On the disk to measure.  [default: the system's]",
)
def main(commits: int, folder: Path | None) -> dict[str, Rows]:
    """Measure commits per second under every sync policy, and bytes per token."""
    sessions = -(-commits // TURNS)
    calls = [call for number in range(sessions) for call in make_session(number)][:commits]
    policies: list[tuple[Sync, int]] = [
        ("never", 1),
        ("session", 1),
        ("call", 1),
        ("call", 16),
        ("call", 64),
    ]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        sizes = _sizes(Path(scratch) / "sizes")
        rows = [_commits(Path(scratch) / f"{sync}-{n}", calls, sync, n) for sync, n in policies]
        rows.append(_disk(Path(scratch), sizes[0]["bytes"] // TURNS, commits))
    for row in rows:
        row["of never"] = row["commits/s"] / rows[0]["commits/s"]
    for size in sizes:
        size["of recorded"] = size["bytes"] / sizes[0]["bytes"]
    return {"commits": rows, "sizes": sizes}


if __name__ == "__main__":
    main()
