"""Measure time and memory of reading a run and building its traces, as the number of sessions grows.

    python -m tests.bench.traces

A generated run and one with four times as many sessions are each read by a process of their own, session by session. A
session is one conversation. Every call continues the one before. A few of its tokens are sampled, the rest are tool
results. Tokens are those of the traces. Peak memory is the anonymous memory of the process: mapped pages of the run's
files are not counted, since the system can reclaim them.
"""

import json
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Call, Session, VersionSpan
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.traces.build import build_traces
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.traces.reader import iter_sessions
from tests.bench.processes import resident_mb

FACTOR = 4
"""Number of sessions of the second run per session of the first."""
SAMPLED = 0.15
"""Share of a session's tokens that were sampled."""
VOCABULARY = 150_000
START = datetime(2026, 1, 1, tzinfo=UTC)
_COLUMNS = {
    "sessions": "sessions",
    "tokens": "tokens",
    "read_s": "read s",
    "build_s": "build s",
    "traces_per_s": "traces/s",
    "us_per_token": "µs/token",
    "peak_mb": "peak MB",
}


def write_run(run: Path, sessions: int, turns: int, tokens: int) -> None:
    """Write a run whose sessions have `turns` calls each and `tokens` tokens in all."""
    rng = np.random.default_rng(0)
    write_metadata(run, {"model": "bench"})
    with closing(RunWriter(run)) as writer:
        for number in range(sessions):
            session_id = f"session-{number:06}"
            for call in _conversation(rng, session_id, turns, tokens // turns):
                writer.add_call(call)
            writer.add_session(
                Session(
                    session_id=session_id,
                    task_id="task",
                    group_id="group",
                    harness="bench",
                    status="completed",
                    reward=1.0,
                    started_at=START,
                )
            )


def _conversation(rng: np.random.Generator, session_id: str, turns: int, turn_tokens: int) -> list[Call]:
    sampled = max(1, round(SAMPLED * turn_tokens))
    calls: list[Call] = []
    for turn in range(turns):
        known = calls[-1].prompt_ids + calls[-1].completion_ids if calls else []
        ids = rng.integers(VOCABULARY, size=turn_tokens).tolist()
        calls.append(
            Call(
                session_id=session_id,
                call_id=f"{session_id}-{turn:06}",
                prompt_ids=known + ids[sampled:],
                completion_ids=ids[:sampled],
                logprobs=(-rng.exponential(size=sampled)).tolist(),
                weight_versions=[VersionSpan(version="0", start=0, end=sampled)],
                parent_id=calls[-1].call_id if calls else None,
                prefix_length=len(known),
                kind="bridged" if calls else "root",
                started_at=START + timedelta(seconds=turn),
            )
        )
    return calls


def measure(run: Path) -> dict[str, Any]:
    """Read a run in this process and return its row of the table."""
    ledger = Ledger()
    sessions = traces = tokens = 0
    build_s = peak_mb = 0.0
    started = time.perf_counter()
    for recorded in iter_sessions(run):
        before = time.perf_counter()
        built, account = build_traces(recorded.calls, "tree")
        build_s += time.perf_counter() - before
        ledger += account
        sessions += 1
        traces += len(built)
        tokens += sum(len(trace.prompt_ids) + len(trace.completion_ids) for trace in built)
        peak_mb = max(peak_mb, resident_mb(os.getpid()))
    seconds = time.perf_counter() - started
    assert ledger.trained == ledger.sampled > 0
    return {
        "sessions": sessions,
        "traces": traces,
        "tokens": tokens,
        "read_s": seconds - build_s,
        "build_s": build_s,
        "traces_per_s": traces / seconds,
        "us_per_token": 1e6 * seconds / tokens,
        "peak_mb": peak_mb,
    }


def _in_a_fresh_process(function: Any, *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


@click.command(help="Measure building the traces of a generated run, and of one with four times as many sessions.")
@click.option("--sessions", default=250, show_default=True, help="Sessions of the smaller run.")
@click.option("--turns", default=60, show_default=True, help="Calls of a session.")
@click.option("--tokens", default=40_000, show_default=True, help="Tokens of a session's last call.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def main(sessions: int, turns: int, tokens: int, as_json: bool) -> None:
    rows = []
    for number in (sessions, FACTOR * sessions):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            _in_a_fresh_process(write_run, run, number, turns, tokens)
            rows.append(_in_a_fresh_process(measure, run))
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    small, large = rows
    table = Table(title=f"traces of sessions of {turns} calls and {tokens:,} tokens")
    for title in _COLUMNS.values():
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*(f"{row[key]:,.3g}" if row[key] < 10 else f"{row[key]:,.0f}" for key in _COLUMNS))
    table.add_section()
    table.add_row(*(f"x {large[key] / small[key]:.2f}" for key in _COLUMNS))
    Console().print(table)


if __name__ == "__main__":
    main()
