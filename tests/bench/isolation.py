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
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.choose import make_runtime
from rolltap.trainer.boxes.runtime import BoxSpec, Ended, Runtime
from tests.bench.frame import Rows, command
from tests.bench.peer import Handler
from tests.boxes import accept_with, make_spec, spec_in

PEER = Path(__file__).with_name("peer.py")
PYTHON = "/usr/bin/python3"
"""A Python that is in every box whose system folders are this machine's."""
NAMES = ("process", "sandbox", "container")
TIMEOUT = 120.0


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


def spec(name: str, folder: Path, proxy: str) -> BoxSpec:
    """Return a new box; in a container with a root folder of this machine's programs."""
    number = len(list(folder.iterdir()))
    accept = accept_with(lambda client: Handler(client, None, None))
    fields = {
        "name": f"bench-{folder.name}-{name}-{number}",
        "workdir": "/workspace",
        "proxy": proxy,
        "accept": accept,
    }
    box = folder / str(number)
    box.mkdir()
    made = make_spec(box, **fields) if name == "container" else spec_in(box, **fields)
    (made.workspace / PEER.name).write_bytes(PEER.read_bytes())
    return made


async def start_and_end(runtime: Runtime, spec: BoxSpec) -> dict[str, float]:
    """Return the time in which a box is made, its program starts and ends, and the box is gone."""
    started = time.perf_counter()
    async with runtime.box(spec) as box:
        ended = await box.run(["/bin/true"], env={}, timeout=TIMEOUT, log=spec.home / "log")
    seconds = time.perf_counter() - started
    _check(ended, runtime, spec)
    return {"box ms": 1e3 * seconds}


async def way_out(runtime: Runtime, spec: BoxSpec, sizes: Sequence[int]) -> dict[str, float]:
    """Return the measurements of a program that talks to the peer, of sizes as the peer takes
    them."""
    async with runtime.box(spec) as box:
        assert box.proxy is not None
        command = [PYTHON, PEER.name, "ask", box.proxy, *map(str, sizes)]
        ended = await box.run(command, env={}, timeout=TIMEOUT, log=spec.home / "log")
    _check(ended, runtime, spec)
    measured = json.loads((spec.home / "log").read_text())
    return {
        "round trip µs": 1e6 * statistics.median(measured["round_trips"]),
        "connection µs": 1e6 * statistics.median(measured["connections"]),
        "down MB/s": measured["download"] / 1e6,
        "up MB/s": measured["upload"] / 1e6,
    }


def _check(ended: Ended, runtime: Runtime, spec: BoxSpec) -> None:
    if ended.status != 0:
        said = (spec.home / "log").read_text()
        raise click.ClickException(f"{runtime.name}: the program ended with {ended}: {said}")


async def measure(boxes: int, rounds: int, sizes: Sequence[int]) -> Rows:
    """Return a row for each runtime: medians, and their ratios to the first runtime."""
    runtimes = available()
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in runtimes}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch, peer() as address:
        for number in range(max(boxes, rounds)):
            for name, runtime in runtimes.items():
                if number < boxes:
                    samples[name].append(
                        await start_and_end(runtime, spec(name, Path(scratch), address))
                    )
                if number < rounds:
                    samples[name].append(
                        await way_out(runtime, spec(name, Path(scratch), address), sizes)
                    )
    rows: Rows = []
    for name, measured in samples.items():
        row: dict[str, Any] = {"runtime": name}
        for column in dict.fromkeys(column for one in measured for column in one):
            row[column] = statistics.median(one[column] for one in measured if column in one)
            row[f"{column}, ratio"] = row[column] / (rows or [row])[0][column]
        rows.append(row)
    return rows


@command
@click.option(
    "--boxes", default=20, show_default=True, help="Boxes whose start and end are measured."
)
@click.option("--rounds", default=5, show_default=True, help="Boxes whose way out is measured.")
@click.option(
    "--round-trips", default=2_000, show_default=True, help="Of 1 KiB over one connection, a box."
)
@click.option(
    "--connections",
    default=200,
    show_default=True,
    help="New ones with one round trip each, a box.",
)
@click.option(
    "--megabytes",
    default=200,
    show_default=True,
    help="In each direction over one connection, a box.",
)
def main(
    boxes: int, rounds: int, round_trips: int, connections: int, megabytes: int
) -> dict[str, Rows]:
    """Measure the start and the end of a box and its way out, in every runtime that this machine
    has."""
    return {"runtimes": asyncio.run(measure(boxes, rounds, (round_trips, connections, megabytes)))}


if __name__ == "__main__":
    main()
