"""Run folders as somebody else may send them, and all that reads a run folder."""

import signal
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from urllib.parse import quote

import pyarrow as pa
from click.testing import CliRunner

from rolltap.addons.errors import RolltapError
from rolltap.addons.store.records import DIGEST, Event
from rolltap.addons.store.routing import Routing
from rolltap.addons.store.rows import row_digest
from rolltap.addons.store.tables import TABLES, RunWriter
from rolltap.trainer.cli.main import rolltap
from rolltap.trainer.reruns.record import Record
from rolltap.trainer.runs.verify import verify_run
from rolltap.trainer.traces.tables import Score
from rolltap.trainer.traces.trained import trained_batch
from rolltap.trainer.viewer.answers import answer
from rolltap.trainer.viewer.reader import RunReader
from tests.factories import START, make_call, make_session, says, write_run

CPU_SECONDS = 10
ENGINE = "http://127.0.0.1:9"
TRAINED = {
    "step": 1,
    "version": "1",
    "session_id": "s",
    "group_id": "g",
    "reward": 1.0,
    "advantage": 0.5,
    "reason": None,
    "sampled": 1,
    "trained": 1,
    "left_out": [],
    "spans": [{"call_id": "a", "start": 0, "end": 1}],
    "differences": [-1.0],
    "weights": [1.0],
}
ROUTING = Routing(session_id="s", call_id="a", layers=1, top_k=1, experts=b"\0")
SCORE = Score("s", "a", "teacher", "model", [-1.0])
ROWS = {
    "calls": make_call("a", [1], [2]).to_row(),
    "sessions": make_session().to_row(),
    "events": Event(kind="refused", session_id="s", at=START).to_row(),
    "routing": ROUTING.to_row(),
    "scores": asdict(SCORE),
    "trained": TRAINED,
}
"""A sound row of each table, without its digest."""


def sound_run(run):
    """Write a run that has rows in each table, two sessions, and files beside them."""
    messages = '[{"role": "user", "content": "go"}]'
    first = make_call("a", [1], [2], reply=says("look", "ls"), messages=messages)
    evidence = {"tests": {"one": "passed"}}
    write_run(
        run,
        first,
        make_call("b", [3], [4, 5], after=first, finished_at=START, engine=ENGINE),
        make_call("c", [7], [8], session_id="t"),
        Event(kind="call_started", session_id="s", call_id="a", at=START),
        make_session(evidence=evidence, parts={"style": 0.5}, suspicions={"rule": 1}),
        make_session("t", reward=0.0),
        ROUTING,
        SCORE,
    )
    with RunWriter(run, "never") as writer:
        writer.add_batch("trained", trained_batch([TRAINED]))
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    (run / "logs").mkdir()
    (run / "logs" / "s.log").write_text("said\n")
    return run


def add_row(run, table, **values):
    """Add a row with its own digest, whatever its values are."""
    row = ROWS[table] | values
    schema = TABLES[table]
    try:
        row[DIGEST] = row_digest(row, schema)
    except Exception:  # of a value that has none
        row[DIGEST] = ""
    path = run / f"{table}-{len(list(run.iterdir()))}-1.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist([row], schema))


class TooSlowError(Exception):
    """A command took more time of the CPU than it may."""


@contextmanager
def limited(seconds):
    """Raise `TooSlowError` when the block takes more time of the CPU."""

    def stop(*_):
        raise TooSlowError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def verify(run, **how):
    return verify_run(run, lambda *_: None, **how)


def damage(run):
    """Return what of a run is damage."""
    return [finding for finding in verify(run).findings if finding.grade == "damage"]


def view(run):
    """Ask for all that the page shows."""
    reader = RunReader(run)
    try:
        while reader.step():
            pass
        answer(reader, "api/run")
        answer(reader, "api/search?q=a")
        for session in answer(reader, "api/sessions")["sessions"]:
            path = f"api/sessions/{quote(session['session_id'], safe='')}"
            try:
                calls = answer(reader, path)["calls"]
            except RolltapError:
                continue
            for call in calls:
                answer(reader, f"{path}/calls/{quote(call['call_id'], safe='')}")
    finally:
        reader.close()


def command(line):
    done = CliRunner().invoke(rolltap, line.split())
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code != 2, done.output


COMMANDS = """
inspect: inspect {run}
inspect a session: inspect {run} s
inspect a call: inspect {run} s a
compare: inspect {run} s t
traces: traces {run} --strategy tree --json
merge: merge {run} --out {out}/merged
split: split {run} --by status --out {out}/split
filter: filter {run} --min-reward 0.5 --out {out}/filtered
view a file: view {run} --out {out}/page.html
parquet: export {run} --to parquet --out {out}/parquet
atif: export {run} --to atif --out {out}/atif
messages: export {run} --to messages --out {out}/messages
"""


def commands(run, out):
    """Return all that reads a run folder, by name. What it writes is below `out`."""
    found = {
        "verify": partial(verify, run),
        "repair": partial(verify, run, repair=True),
        "view": partial(view, run),
        "rerun": partial(Record.of, run, "s"),
    }
    for line in COMMANDS.strip().splitlines():
        name, _, words = line.partition(": ")
        found[name] = partial(command, words.format(run=run, out=out))
    return found


def attempt(read, size=0):
    """Read a run. Return what the user is told of it, or None when it was read; other errors are
    raised."""
    try:
        with limited(CPU_SECONDS + size / 1e6):
            read()
    except (RolltapError, OSError) as error:
        return str(error)
    return None
