"""Measure time and memory of reading a run and building its traces, as the number of sessions
grows.

    python -m tests.bench.traces

A generated run and one with four times as many sessions are each read by a process of their own,
session by session. A session is one conversation. Every call continues the one before. A few of its
tokens are sampled, the rest are tool results. Tokens are those of the traces. Peak memory is the
anonymous memory of the process: mapped pages of the run's files are not counted, since the system
can reclaim them.
"""

import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click

from rolltap.trainer.traces.build import build_traces
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.traces.reader import iter_sessions
from tests.bench.frame import Rows, command
from tests.bench.growing import calls_option, tokens_option, write_run
from tests.bench.processes import resident_mb

FACTOR = 4
"""Number of sessions of the second run per session of the first."""
SAMPLED = 0.15
"""Share of a session's tokens that were sampled."""


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
        for trace in built:
            tokens += len(trace.prompt_ids) + len(trace.completion_ids)
        peak_mb = max(peak_mb, resident_mb(os.getpid()))
    seconds = time.perf_counter() - started
    assert ledger.trained == ledger.sampled > 0
    return {
        "sessions": sessions,
        "traces": traces,
        "tokens": tokens,
        "read s": seconds - build_s,
        "build s": build_s,
        "traces/s": traces / seconds,
        "µs per token": 1e6 * seconds / tokens,
        "peak MB": peak_mb,
    }


def _in_a_fresh_process(function: Any, *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


@command
@click.option("--sessions", default=250, help="Sessions of the smaller run.")
@calls_option
@tokens_option
def main(sessions: int, turns: int, tokens: int) -> dict[str, Rows]:
    """Measure building the traces of a generated run, and of one with four times as many
    sessions."""
    rows = []
    for number in (sessions, FACTOR * sessions):
        with tempfile.TemporaryDirectory() as folder:
            write = partial(write_run, share=SAMPLED)
            run = _in_a_fresh_process(write, Path(folder, "run"), number, turns, tokens)
            rows.append(_in_a_fresh_process(measure, run))
    return {f"sessions of {turns} calls and {tokens:,} tokens": rows}


if __name__ == "__main__":
    main()
