"""Load the recorder with many sessions, then with faults, and compare every token with what the
engine sent.

    python -m tests.bench.soak --sessions 256 --seconds 300 --chaos-seconds 210

Sessions speak four APIs, half of them with streamed replies, and their conversations grow. The
engine samples 30 tokens a second for each; what it must have sent follows from a call's prompt and
its first tokens (`tests/bench/model.py`). Chaos kills recorders with `kill -9`, restarts the engine
and fills the disk, while clients hang up. Clients repeat requests as SDKs do. Exit status 1 when a
token differs, or when a reply that a client received whole is missing, differs or is double.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import click

from tests.bench.frame import Rows, command, milliseconds, model_option
from tests.bench.load import Load
from tests.bench.model import Model
from tests.bench.processes import ROOT, Engine, Mitmdump
from tests.bench.verdict import judge
from tests.conftest import on_a_small_disk

PACE = 1 / 30
LENGTHS = (40, 250)
"""Tokens of a reply."""
PAUSE_SECONDS = 7.0
"""Time between the end of a fault and the next one."""
ENGINE_DOWN_SECONDS = 2.0
DISK_FULL_SECONDS = 4.0
DISK = "512m"
"""Size of the disk that is filled up."""


def paced_engine(folder: Path, tokenizer: Path) -> Engine:
    """Return an engine that samples 30 tokens a second for each call."""
    settings = {"tokenizer": tokenizer, "lengths": LENGTHS, "burst": 0, "pace": PACE}
    return Engine("model", folder, settings)


def soak(
    folder: Path, model: Path, disk: Path | None, sessions: int, seconds: int, chaos_seconds: int
) -> Rows:
    """Play the load and then chaos, with the run on `disk` if there is one. Returns a row for each
    phase."""
    run = (disk or folder) / "run"
    faults: Counter[str] = Counter()
    with ExitStack() as stack:
        engine = stack.enter_context(paced_engine(folder, model))
        recorder = stack.enter_context(Mitmdump.recorder(folder, run, engine, model))
        chaos = time.time() + seconds
        load = Load(recorder, chaos, chaos + chaos_seconds)
        # this thread has little to do, so that it does not keep the clients waiting
        pool = stack.enter_context(ThreadPoolExecutor(1))
        playing = pool.submit(asyncio.run, load.play(sessions))
        before = _measure(recorder)
        time.sleep(max(0.0, chaos - time.time()))
        after = _measure(recorder)
        for fault in _faults(recorder, engine, disk) if chaos_seconds else ():
            faults[fault] += 1
            if time.time() + PAUSE_SECONDS >= load.end:
                break
            time.sleep(PAUSE_SECONDS)
        playing.result()
        ended = _measure(recorder)
    phases: Rows = [
        {
            "phase": "load",
            "CPU %": 100 * (after["CPU s"] - before["CPU s"]) / seconds,
            "start MB": before["MB"],
            "end MB": after["MB"],
            "KB a session": 1024 * (after["MB"] - before["MB"]) / sessions,
            "log lines": after["log lines"] - before["log lines"],
        },
        {"phase": "chaos", "log lines": ended["log lines"] - after["log lines"], "faults": faults},
    ]
    verdicts = judge(run, Model(model, *LENGTHS), load.replies, chaos)
    for number, verdict in enumerate(verdicts):
        phases[number] |= {"wrong": verdict.wrong, **vars(verdict), **_clients(load, bool(number))}
    return phases


def _measure(recorder: Mitmdump) -> dict[str, float]:
    lines = recorder.log.read_bytes().count(b"\n")
    return {"CPU s": recorder.cpu_seconds(), "MB": recorder.megabytes(), "log lines": lines}


def _clients(load: Load, chaos: bool) -> dict[str, Any]:
    """Return what the clients saw in a phase: times to the headers of streamed replies, and
    errors."""
    times = []
    for reply in load.replies:
        if reply.headers_seconds and (reply.at >= load.chaos) == chaos:
            times.append(reply.headers_seconds)
    errors = {}
    for (during, kind), count in load.errors.most_common():
        if during == chaos:
            errors[kind] = count
    return {**(milliseconds("headers", times) if times else {}), "errors": errors}


def _faults(recorder: Mitmdump, engine: Engine, disk: Path | None) -> Iterator[str]:
    """Make faults without an end, one after the other. All processes run after each."""
    while True:
        recorder.kill()
        recorder.start()
        yield "kill -9 of a recorder"
        if disk is not None:
            ballast = disk / "ballast"
            with ballast.open("wb") as file:
                _take_all(file.fileno())
            time.sleep(DISK_FULL_SECONDS)
            ballast.unlink()
            yield "full disk"
        engine.kill()
        time.sleep(ENGINE_DOWN_SECONDS)
        engine.start()
        yield "engine restart"


def _take_all(descriptor: int) -> None:
    """Make a file so large that its disk is full, while others write to that disk."""
    size = 0
    for step in (1 << 24, 1 << 20, 1 << 12):
        with suppress(OSError):
            while True:
                os.posix_fallocate(descriptor, size, step)
                size += step


@command
@click.option("--sessions", default=64)
@click.option("--seconds", default=60, help="Time without faults.")
@click.option("--chaos-seconds", default=60, help="Time with faults; 0 for none.")
@click.option(
    "--disk",
    type=click.Path(path_type=Path),
    help="A small disk to fill up. Default: one that is mounted.",
)
@model_option
def main(disk: Path | None, chaos_seconds: int, **load: Any) -> dict[str, Rows]:
    """Load the recorder with many sessions and faults, and compare every token with the
    engine's."""
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as folder:
        if disk is None and chaos_seconds:
            # a mount is seen only by the process that makes it, and by those that it starts
            again = [sys.executable, "-m", "tests.bench.soak", *sys.argv[1:], "--disk", scratch]
            if prefix := on_a_small_disk(DISK, scratch):
                sys.exit(subprocess.run([*prefix, *again], cwd=ROOT).returncode)
            click.echo("no full disk: this machine lets nobody mount a small one", err=True)
        return {"phases": soak(Path(folder), disk=disk, chaos_seconds=chaos_seconds, **load)}


if __name__ == "__main__":
    main()
