"""A rollout with many sessions at once in sandboxes: how late the driver's event loop is, and what
the driver costs.

    python -m tests.bench.at_once --sessions 256

A session is a shell that asks the model with curl for streamed replies, at 30 tokens a second, and
is judged by `test`. The loop's lag is the lateness of sleeps of 5 ms in it. A process beside it
that only sleeps says how late the cores are for anybody. Exit status 1 when a session has another
outcome than `completed`.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

import rolltap
from tests.bench.frame import Rows, command, model_option
from tests.bench.processes import Engine
from tests.bench.service import GROUP, cpu_seconds
from tests.bench.soak import LENGTHS, PACE

SLEEP_SECONDS = 0.005
_ASK = """curl -sSNf -o answer.txt -H 'content-type: application/json' -d \
'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "turn %d"}]}' \
https://api.openai.com/v1/chat/completions"""
# The process keeps its figures until the end, because it would stop in `print` once the pipe is
# full.
_BESIDE = f"""
import sys, threading, time
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set())).start()
late = []
while not over.is_set():
    before = time.monotonic()
    time.sleep({SLEEP_SECONDS})
    late.append(time.monotonic() - before - {SLEEP_SECONDS})
print(*late)
"""


async def measure_lag(samples: list[float]) -> None:
    while True:
        before = time.monotonic()
        await asyncio.sleep(SLEEP_SECONDS)
        samples.append(time.monotonic() - before - SLEEP_SECONDS)


async def roll_out(lags: list[float], **how: Any) -> rolltap.Run:
    measuring = asyncio.create_task(measure_lag(lags))
    try:
        return await rolltap.rollout_async(**how)
    finally:
        measuring.cancel()


def load(folder: Path, model: Path, at_once: int, turns: int, runtime: str) -> dict[str, Any]:
    """Run so many sessions at once, which make `turns` calls each."""
    script = "; ".join(["set -e", *(_ASK % turn for turn in range(turns))])
    tasks = []
    for number in range(at_once // GROUP):
        judge = ["test", "-s", "answer.txt"]
        tasks.append(rolltap.Task(id=f"t{number}", instruction="go", evaluate=judge))
    settings = {"tokenizer": model, "lengths": LENGTHS, "burst": 0, "pace": PACE}
    lags: list[float] = []
    beside = [sys.executable, "-c", _BESIDE]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with Engine("model", folder, settings) as engine:
        before = cpu_seconds(os.getpid())[0]
        began = time.monotonic()
        with subprocess.Popen(beside, text=True, **pipes) as idle:
            rolling = roll_out(
                lags,
                tasks=tasks,
                harness=rolltap.Harness(name="curl", program="sh", headless=["-c", script]),
                engine=engine.url,
                model=model,
                out=folder / "run",
                sessions=GROUP,
                concurrency=at_once,
                ready=at_once,
                runtime=runtime,
                progress=False,
            )
            run = asyncio.run(rolling)
            taken = time.monotonic() - began
            cost = cpu_seconds(os.getpid())[0] - before
            others, _ = idle.communicate()
    sessions = run.sessions()
    row: dict[str, Any] = {
        "sessions": len(sessions),
        "calls": len(sessions) * turns,
        "seconds": taken,
    }
    row["driver CPU ms a session"] = 1e3 * cost / len(sessions)
    for name, samples in (
        ("loop lag", lags),
        ("a process beside it", list(map(float, others.split()))),
    ):
        p50, p90, p99 = 1e3 * np.percentile(samples, [50, 90, 99])
        row |= {f"{name} ms": float(p50), f"{name} p90": float(p90), f"{name} p99": float(p99)}
        row[f"{name} worst"] = 1e3 * max(samples)
    wrong = sum(session.status != "completed" for session in sessions)
    return row | {"load average": os.getloadavg()[0], "wrong": wrong}


@command
@click.option("--sessions", default=256, show_default=True, help="Sessions that run at once.")
@click.option("--turns", default=3, show_default=True, help="Calls of a session.")
@click.option("--runtime", default="sandbox", show_default=True)
@model_option
def main(sessions: int, turns: int, runtime: str, model: Path) -> dict[str, Rows]:
    """Run many sessions at once, and measure how late the driver's event loop is."""
    with tempfile.TemporaryDirectory() as folder:
        return {"driver": [load(Path(folder), model, sessions, turns, runtime)]}


if __name__ == "__main__":
    main()
