"""Load the recorder with many sessions, then with faults, and compare every token with what the engine sent.

    python -m tests.bench.soak --sessions 256 --seconds 300 --chaos-seconds 210

Sessions speak four APIs, half of them with streamed replies, and their conversations grow. The engine samples 30 tokens
a second for each; what it must have sent follows from a call's prompt and its first tokens (`tests/bench/model.py`).
Chaos kills recorders with `kill -9`, restarts the engine and fills the disk, while clients hang up. Clients repeat
requests as SDKs do. Exit status 1 when a token differs, or when a reply that a client received whole is missing,
differs or is double.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from tests.bench.chaos import Chaos, on_a_small_disk
from tests.bench.load import Log, Plan, meet, play
from tests.bench.model import Model
from tests.bench.processes import RECORDER, ROOT, Engine, Mitmdump, cpu_seconds, resident_mb
from tests.bench.verdict import judge

PACE = 1 / 30
LENGTHS = (40, 250)
"""Tokens of a reply."""
PHASES = ("load", "chaos")


def soak(
    folder: Path,
    tokenizer: Path,
    disk: Path | None,
    *,
    sessions: int,
    seconds: int,
    chaos_seconds: int,
    recorders: int,
    clients: int,
) -> dict[str, Any]:
    """Play the load and then chaos, with the run on `disk` if there is one. Returns the results as JSON."""
    run = (disk or folder) / "run"
    with ExitStack() as stack:
        settings = {"tokenizer": str(tokenizer), "lengths": LENGTHS, "burst": 0, "pace": PACE}
        engine = stack.enter_context(Engine("model_engine", folder, settings))
        options = {"rolltap_out": run, "rolltap_engine": engine.url, "rolltap_model": tokenizer}
        taps = [Mitmdump(f"recorder-{n}", folder, [RECORDER], options) for n in range(recorders)]
        for tap in taps:
            stack.enter_context(tap)
        pool = _start_clients(stack, clients)
        start = time.time()
        plan = Plan([tap.proxy for tap in taps], taps[0].ca, start + seconds, start + seconds + chaos_seconds)
        playing = [pool.submit(play, plan, list(range(n, sessions, clients))) for n in range(clients)]
        before = _measure(taps)
        time.sleep(max(0.0, plan.chaos - time.time()))
        after = _measure(taps)
        faults = Chaos(taps, engine, disk)
        if chaos_seconds:
            faults.run(plan.end)
        logs = [future.result() for future in playing]
        log = Log([r for one in logs for r in one.replies], sum((one.errors for one in logs), Counter()))
        ended = _measure(taps)
    verdicts = judge(run, Model(tokenizer, *LENGTHS), log.replies, plan.chaos)
    phases = []
    for number, verdict in enumerate(verdicts[: 2 if chaos_seconds else 1]):
        costs = _costs(before, after, seconds, sessions) if number == 0 else {"log_lines": ended[2] - after[2]}
        row = {"phase": PHASES[number], "sessions": sessions, **vars(verdict), "wrong": verdict.wrong}
        errors = {kind: count for (during, kind), count in log.errors.most_common() if during == bool(number)}
        phases.append({**row, **_headers(log, plan, bool(number)), **costs, "errors": errors})
    wrong = sum(verdict.wrong for verdict in verdicts)
    return {"phases": phases, "faults": faults.faults, "disk": disk is not None, "wrong": wrong}


def _start_clients(stack: ExitStack, number: int) -> ProcessPoolExecutor:
    """Return a pool whose processes have started."""
    context = get_context("spawn")
    barrier = context.Barrier(number + 1)
    pool = ProcessPoolExecutor(number, mp_context=context, initializer=meet, initargs=(barrier,))
    stack.enter_context(pool)
    for _ in range(number):
        pool.submit(int)  # a process starts when a task finds none that is idle
    barrier.wait()
    return pool


def _measure(taps: list[Mitmdump]) -> tuple[float, float, int]:
    """Return CPU seconds, memory in MB and log lines of the recorders."""
    lines = sum(tap.log.read_bytes().count(b"\n") for tap in taps)
    return sum(cpu_seconds(tap.pid) for tap in taps), sum(resident_mb(tap.pid) for tap in taps), lines


def _costs(before: tuple, after: tuple, seconds: int, sessions: int) -> dict[str, Any]:
    return {
        "cpu_percent": 100 * (after[0] - before[0]) / seconds,
        "start_mb": before[1],
        "end_mb": after[1],
        "session_kb": 1024 * (after[1] - before[1]) / sessions,
        "log_lines": after[2] - before[2],
    }


def _headers(log: Log, plan: Plan, chaos: bool) -> dict[str, float]:
    """Return the times to the headers of streamed replies that ended in a phase."""
    times = [r.headers_seconds for r in log.replies if r.headers_seconds and (r.at >= plan.chaos) == chaos]
    if not times:
        return {}
    p50, p99 = 1e3 * np.percentile(times, [50, 99])
    return {"headers_p50_ms": float(p50), "headers_p99_ms": float(p99)}


_ROWS = {
    "sessions": "sessions",
    "received": "replies received whole",
    "missing": "of them missing in the run",
    "differing": "differing from their row",
    "doubles": "double",
    "calls": "calls recorded",
    "unheard": "completed, but received by nobody",
    "excluded": "excluded from training",
    "tokens": "tokens compared",
    "mismatches": "tokens or log-probabilities that differ",
    "headers_p50_ms": "headers, median ms",
    "headers_p99_ms": "p99",
    "cpu_percent": "CPU of the recorders, %",
    "start_mb": "their memory at start, MB",
    "end_mb": "at the end, MB",
    "session_kb": "growth for a session, KB",
    "log_lines": "log lines",
}


def _print(result: dict[str, Any]) -> None:
    table = Table("", *(phase["phase"] for phase in result["phases"]))
    for key, title in _ROWS.items():
        cells = (phase.get(key, "") for phase in result["phases"])
        table.add_row(title, *(f"{cell:,.0f}" if isinstance(cell, (int, float)) else cell for cell in cells))
    console = Console(soft_wrap=True)
    console.print(table)
    for phase in result["phases"]:
        for key in ("kinds", "statuses", "reasons", "errors"):
            console.print(f"{phase['phase']}, {key}:", ", ".join(f"{n:,} {name}" for name, n in phase[key].items()))
    console.print("faults:", ", ".join(f"{n} {name}" for name, n in result["faults"].items()))


@click.command(help="Load the recorder with many sessions and faults, and compare every token with the engine's.")
@click.option("--sessions", default=64, show_default=True)
@click.option("--seconds", default=60, show_default=True, help="Time without faults.")
@click.option("--chaos-seconds", default=60, show_default=True, help="Time with faults; 0 for none.")
@click.option("--recorders", default=1, show_default=True, help="Recorders on the run; sessions are spread over them.")
@click.option("--clients", default=1, show_default=True, help="Processes that the clients run in.")
@click.option("--disk", type=click.Path(path_type=Path), help="A small disk to fill up. Default: one that is mounted.")
@click.option("--model", default=ROOT / "runs/quickstart/model", type=click.Path(path_type=Path), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def main(
    sessions: int,
    seconds: int,
    chaos_seconds: int,
    recorders: int,
    clients: int,
    disk: Path | None,
    model: Path,
    as_json: bool,
) -> None:
    if not model.is_dir():
        raise click.ClickException(f"{model} is missing: make it with recipes/quickstart/make_model.py {model}")
    with tempfile.TemporaryDirectory() as scratch:
        if disk is None and chaos_seconds:
            # a mount is seen only by the process that makes it, and by those that it starts
            again = [sys.executable, "-m", "tests.bench.soak", *sys.argv[1:], "--disk", scratch]
            command = on_a_small_disk(Path(scratch), again)
            if command is not None:
                sys.exit(subprocess.run(command, cwd=ROOT).returncode)
            click.echo("no full disk: this machine lets nobody mount a small one", err=True)
        counts = {"sessions": sessions, "seconds": seconds, "chaos_seconds": chaos_seconds}
        with tempfile.TemporaryDirectory() as folder:
            result = soak(Path(folder), model, disk, **counts, recorders=recorders, clients=clients)
    if as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        _print(result)
    if result["wrong"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
