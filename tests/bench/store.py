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
import pyarrow as pa

from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Call
from rolltap.addons.store.tables import RunWriter, Sync, read_batches, run_files
from tests.bench.frame import Rows, command, folder_option
from tests.bench.growing import add_text, grow

TURNS = 60
NEW_TOKENS = 466
SAMPLED = 200
"""Token counts of a turn: new prompt tokens after the parent's, and the reply."""
POLICIES: list[tuple[Sync, int]] = [
    ("never", 1),
    ("session", 1),
    ("call", 1),
    ("call", 16),
    ("call", 64),
]
FIELDS = {
    "dialect": "chat",
    "host": "api.openai.com",
    "path": "/v1/chat/completions",
    "model": "model",
    "finish_reason": "stop",
}


def make_session(number: int) -> Iterator[Call]:
    for call in grow(number, TURNS, NEW_TOKENS, SAMPLED, **FIELDS):
        add_text(call, 650, 100)
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


def _commits(folder: Path, calls: list[Call], sync: Sync, at_once: int) -> float:
    """Return commits per second."""
    write_metadata(folder, {})
    with RunWriter(folder, sync) as writer:
        start = time.perf_counter()
        asyncio.run(_commit(writer, calls, at_once))
        return len(calls) / (time.perf_counter() - start)


def _disk(folder: Path, size: int, times: int) -> float:
    """Return appends of so many bytes per second."""
    data = bytes(size)
    with (folder / "disk").open("xb", buffering=0) as file:
        start = time.perf_counter()
        for _ in range(times):
            file.write(data)
            os.fdatasync(file.fileno())
        return times / (time.perf_counter() - start)


def _sizes(folder: Path) -> Rows:
    write_metadata(folder, {})
    calls = list(make_session(0))
    with RunWriter(folder, "never") as writer:
        for call in calls:
            writer.add_call(call)
        [path] = run_files(folder, "calls")
        sizes = {"as recorded": path.stat().st_size}
    sizes["compacted"] = path.stat().st_size
    compressed = folder / "compressed"
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    batches = list(read_batches(folder, "calls"))
    with pa.ipc.new_stream(compressed, batches[0].schema, options=options) as stream:
        for batch in batches:
            stream.write_batch(batch)
    sizes["compacted, zstd"] = compressed.stat().st_size
    sizes["JSON Lines"] = 0
    for call in calls:
        sizes["JSON Lines"] += len(json.dumps(asdict(call), default=str).encode()) + 1
    tokens = len(calls[-1].prompt_ids) + SAMPLED
    rows = []
    for file, size in sizes.items():
        of_recorded = size / sizes["as recorded"]
        row = {"file": file, "bytes": size, "bytes/token": size / tokens}
        rows.append(row | {"of recorded": of_recorded})
    return rows


@command
@click.option("--commits", default=1800, help="Commits a row.")
@folder_option
def main(commits: int, folder: Path | None) -> dict[str, Rows]:
    """Measure commits per second under every sync policy, and bytes per token."""
    calls: list[Call] = []
    for number in range(-(-commits // TURNS)):
        calls += make_session(number)
    del calls[commits:]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        sizes = _sizes(Path(scratch) / "sizes")
        measured = []
        for sync, at_once in POLICIES:
            per_second = _commits(Path(scratch) / f"{sync}-{at_once}", calls, sync, at_once)
            measured.append((sync, at_once, per_second))
        alone = _disk(Path(scratch), sizes[0]["bytes"] // TURNS, commits)
        measured.append(("disk alone", 1, alone))
    rows = []
    for sync, at_once, per_second in measured:
        row = {"sync": sync, "calls at once": at_once, "commits/s": per_second}
        rows.append(row | {"of never": per_second / measured[0][2]})
    return {"commits": rows, "sizes": sizes}


if __name__ == "__main__":
    main()
