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
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import numpy as np

from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.traces.build import build_traces
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.traces.reader import iter_sessions
from tests.bench.frame import Rows, command
from tests.bench.processes import resident_mb
from tests.factories import make_call, make_session

FACTOR = 4
"""Number of sessions of the second run per session of the first."""
SAMPLED = 0.15
"""Share of a session's tokens that were sampled."""
VOCABULARY = 150_000


def generate(run: Path, sessions: int, turns: int, tokens: int) -> None:
    """Write a run whose sessions have `turns` calls each and `tokens` tokens in all."""
    rng = np.random.default_rng(0)
    turn_tokens = tokens // turns
    sampled = max(1, round(SAMPLED * turn_tokens))
    write_metadata(run, {"model": "bench"})
    with RunWriter(run) as writer:
        for session_id in (f"session-{number:06}" for number in range(sessions)):
            call = None
            for turn in range(turns):
                ids = rng.integers(VOCABULARY, size=turn_tokens).tolist()
                fields = {"call_id": f"{session_id}-{turn:06}", "session_id": session_id}
                logprobs = (-rng.exponential(size=sampled)).tolist()
                call = make_call(
                    turn, ids[sampled:], ids[:sampled], after=call, logprobs=logprobs, **fields
                )
                writer.add_call(call)
            writer.add_session(make_session(session_id))


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
@click.option("--sessions", default=250, show_default=True, help="Sessions of the smaller run.")
@click.option("--turns", default=60, show_default=True, help="Calls of a session.")
@click.option(
    "--tokens", default=40_000, show_default=True, help="Tokens of a session's last call."
)
def main(sessions: int, turns: int, tokens: int) -> dict[str, Rows]:
    """Measure building the traces of a generated run, and of one with four times as many
    sessions."""
    rows = []
    for number in (sessions, FACTOR * sessions):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            _in_a_fresh_process(generate, run, number, turns, tokens)
            rows.append(_in_a_fresh_process(measure, run))
    return {f"sessions of {turns} calls and {tokens:,} tokens": rows}


if __name__ == "__main__":
    main()
