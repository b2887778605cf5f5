"""A rollout with many sessions at once in sandboxes: how late the driver's event loop is, and what
the driver costs.

    python -m tests.bench.at_once --sessions 256

A session is a shell that asks the model with curl for streamed replies, at 30 tokens a second, and
is judged by `test`. The loop's lag is the lateness of sleeps of 5 ms in it. A process beside it
that only sleeps says how late the cores are for anybody. Exit status 1 when a session has another
outcome than `completed`.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

import rolltap
from tests.bench.frame import Rows, command, milliseconds, model_option
from tests.bench.soak import paced_engine

GROUP = 8
"""Sessions of a group."""
JUDGE = ["test", "-s", "answer.txt"]
SLEEP_SECONDS = 0.005
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


def ask_in_turns(turns: int, *, stream: bool) -> str:
    """Return a script of sh that asks the model with curl so many times."""
    lines = ["set -e"]
    for turn in range(turns):
        messages = [{"role": "user", "content": f"turn {turn}"}]
        body = json.dumps({"model": "m", "stream": stream, "messages": messages})
        options = f"-sSNf -o answer.txt -H 'content-type: application/json' -d '{body}'"
        lines.append(f"curl {options} https://api.openai.com/v1/chat/completions")
    return "\n".join(lines)


def cpu_seconds(pid: int) -> tuple[float, float]:
    """Return the CPU seconds of a process, and of the children that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system, of_children, system_of_children = map(int, fields[11:15])
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + system) / ticks, (of_children + system_of_children) / ticks


async def roll_out(lags: list[float], **how: Any) -> rolltap.Run:
    async def measure() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(SLEEP_SECONDS)
            lags.append(time.monotonic() - before - SLEEP_SECONDS)

    measuring = asyncio.create_task(measure())
    try:
        return await rolltap.rollout_async(**how)
    finally:
        measuring.cancel()


def load(folder: Path, model: Path, at_once: int, turns: int, runtime: str) -> dict[str, Any]:
    """Run so many sessions at once, which make `turns` calls each."""
    headless = ["-c", ask_in_turns(turns, stream=True)]
    tasks = []
    for number in range(at_once // GROUP):
        tasks.append(rolltap.Task(id=f"t{number}", instruction="go", evaluate=JUDGE))
    lags: list[float] = []
    beside = [sys.executable, "-c", _BESIDE]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with paced_engine(folder, model) as engine:
        before, _ = cpu_seconds(os.getpid())
        began = time.monotonic()
        with subprocess.Popen(beside, text=True, **pipes) as idle:
            rolling = roll_out(
                lags,
                tasks=tasks,
                harness=rolltap.Harness(name="curl", program="sh", headless=headless),
                engine=engine.url,
                model=model,
                out=folder / "run",
                sessions=GROUP,
                concurrency=at_once,
                ready=at_once,
                runtime=runtime,
                progress=False,
            )
            sessions = asyncio.run(rolling).sessions()
            taken = time.monotonic() - began
            after, _ = cpu_seconds(os.getpid())
            others, _ = idle.communicate()
    return {
        "sessions": len(sessions),
        "calls": len(sessions) * turns,
        "seconds": taken,
        "driver CPU ms a session": 1e3 * (after - before) / len(sessions),
        **milliseconds("loop lag", lags),
        **milliseconds("a process beside it", [float(late) for late in others.split()]),
        "load average": os.getloadavg()[0],
        "wrong": sum(session.status != "completed" for session in sessions),
    }


@command
@click.option("--sessions", default=256, help="Sessions that run at once.")
@click.option("--turns", default=3, help="Calls of a session.")
@click.option("--runtime", default="sandbox")
@model_option
def main(sessions: int, turns: int, runtime: str, model: Path) -> dict[str, Rows]:
    """Run many sessions at once, and measure how late the driver's event loop is."""
    with tempfile.TemporaryDirectory() as folder:
        return {"driver": [load(Path(folder), model, sessions, turns, runtime)]}


if __name__ == "__main__":
    main()
