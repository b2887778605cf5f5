"""Measure what a runtime costs: start and end of a box, and the way out of it.

    python -m tests.bench.isolation

The runtimes take turns in each round, so that a slower minute of the machine is one for all.
Numbers are medians, and their ratio to `process` stands below them. A runtime that this machine
lacks is left out.

    box         a box is made, a program that does nothing runs in it, and the box is gone
    round trip  1 KiB to the peer and back, over one connection
    connection  a new connection and one round trip
    down, up    many bytes over one connection

The peer (`tests/bench/peer.py`) stands in place of the recorder: a process of its own, or in this
process where a box has a network of its own.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.choose import make_runtime
from rolltap.trainer.boxes.runtime import BoxSpec, Runtime
from tests.bench.frame import Rows, command
from tests.bench.peer import Handler
from tests.boxes import accept_with, make_spec, spec_in

PEER = Path(__file__).with_name("peer.py")
PYTHON = "/usr/bin/python3"
"""A Python that is in every box whose system folders are this machine's."""
NAMES = ("process", "sandbox", "container")
TIMEOUT = 600.0


@contextmanager
def peer() -> Iterator[str]:
    process = subprocess.Popen([sys.executable, PEER, "serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.wait()


def available() -> dict[str, Runtime]:
    """Return the runtimes that this machine has, and say which ones it lacks."""
    found = {}
    for name in NAMES:
        runtime = make_runtime(name)
        try:
            runtime.check()
        except InputError as error:
            click.echo(f"{name} is left out: {error}", err=True)
        else:
            found[name] = runtime
    return found


def new_box(name: str, folder: Path, proxy: str) -> BoxSpec:
    """Return a new box; in a container with a root folder of this machine's programs."""
    number = len(list(folder.iterdir()))
    fields = {
        "name": f"bench-{folder.name}-{name}-{number}",
        "workdir": "/workspace",
        "proxy": proxy,
        "accept": accept_with(lambda client: Handler(client, None, None)),
    }
    box = folder / str(number)
    box.mkdir()
    made = make_spec(box, **fields) if name == "container" else spec_in(box, **fields)
    (made.workspace / PEER.name).write_bytes(PEER.read_bytes())
    return made


async def run_in_box(runtime: Runtime, spec: BoxSpec, *command: str) -> tuple[float, str]:
    """Run a program in a new box, to which the address of the peer is `{proxy}`. Return the seconds
    from the box's start to its end, and the program's output."""
    log = spec.home / "log"
    started = time.perf_counter()
    async with runtime.box(spec) as box:
        words = [word.format(proxy=box.proxy) for word in command]
        ended = await box.run(words, env={}, timeout=TIMEOUT, log=log)
    seconds = time.perf_counter() - started
    if ended.status != 0:
        said = f"the program ended with {ended}: {log.read_text()}"
        raise click.ClickException(f"{runtime.name}: {said}")
    return seconds, log.read_text()


async def measure(boxes: int, rounds: int, *sizes: int) -> Rows:
    """Return a row for each runtime: medians, and their ratios to the first runtime."""
    runtimes = available()
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in runtimes}
    ask = [PYTHON, PEER.name, "ask", "{proxy}", *map(str, sizes)]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, peer() as address:
        for number in range(max(boxes, rounds)):
            for name, runtime in runtimes.items():
                found: dict[str, float] = {}
                if number < boxes:
                    spec = new_box(name, Path(folder), address)
                    seconds, _ = await run_in_box(runtime, spec, "/bin/true")
                    found["box ms"] = 1e3 * seconds
                if number < rounds:
                    spec = new_box(name, Path(folder), address)
                    _, said = await run_in_box(runtime, spec, *ask)
                    measured = json.loads(said)
                    found["round trip µs"] = 1e6 * median(measured["round_trips"])
                    found["connection µs"] = 1e6 * median(measured["connections"])
                    found["down MB/s"] = measured["download"] / 1e6
                    found["up MB/s"] = measured["upload"] / 1e6
                for column, value in found.items():
                    samples[name].setdefault(column, []).append(value)
    rows: Rows = []
    for name, columns in samples.items():
        row: dict[str, Any] = {"runtime": name}
        rows.append(row)
        for column, values in columns.items():
            row[column] = median(values)
            row[f"{column}, ratio"] = row[column] / rows[0][column]
    return rows


@command
@click.option("--boxes", default=20, help="Boxes whose start and end are measured.")
@click.option("--rounds", default=5, help="Boxes whose way out is measured.")
@click.option("--round-trips", default=2_000, help="Of 1 KiB over one connection, a box.")
@click.option("--connections", default=200, help="New ones with one round trip each, a box.")
@click.option("--megabytes", default=200, help="In each direction over one connection, a box.")
def main(
    boxes: int, rounds: int, round_trips: int, connections: int, megabytes: int
) -> dict[str, Rows]:
    """Measure the start and the end of a box and its way out, in every runtime that this machine
    has."""
    rows = asyncio.run(measure(boxes, rounds, round_trips, connections, megabytes))
    return {"runtimes": rows}


if __name__ == "__main__":
    main()
