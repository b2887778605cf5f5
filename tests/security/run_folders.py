"""Run folders as somebody else may send them, and all that reads a run folder."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
from click.testing import CliRunner, Result

from rolltap.addons.errors import RolltapError
from rolltap.addons.store.records import DIGEST, Event
from rolltap.addons.store.routing import Routing
from rolltap.addons.store.rows import row_digest
from rolltap.addons.store.tables import TABLES, RunWriter
from rolltap.trainer.cli.main import rolltap
from rolltap.trainer.reruns.record import Record
from rolltap.trainer.runs.verify import Verification, verify_run
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
ROWS = {
    "calls": make_call("a", [1], [2]).to_row(),
    "sessions": make_session().to_row(),
    "events": Event(kind="refused", session_id="s", at=START).to_row(),
    "routing": Routing(session_id="s", call_id="a", layers=1, top_k=1, experts=b"\0").to_row(),
    "scores": asdict(Score("s", "a", "teacher", "model", [-1.0])),
    "trained": TRAINED,
}
"""A sound row of each table, without its digest."""


def sound_run(run: Path) -> Path:
    """Write a run that has rows in each table, two sessions, and files beside them."""
    first = make_call(
        "a", [1], [2], reply=says("look", "ls"), messages='[{"role": "user", "content": "go"}]'
    )
    then = make_call("b", [3], [4, 5], after=first, finished_at=START, engine=ENGINE)
    write_run(
        run,
        first,
        then,
        make_call("c", [7], [8], session_id="t"),
        Event(kind="call_started", session_id="s", call_id="a", at=START),
        make_session(
            evidence={"tests": {"one": "passed"}}, parts={"style": 0.5}, suspicions={"rule": 1}
        ),
        make_session("t", reward=0.0),
        Routing(session_id="s", call_id="a", layers=1, top_k=1, experts=b"\0"),
        Score("s", "a", "teacher", "model", [-1.0]),
    )
    with RunWriter(run, "never") as writer:
        writer.add_batch("trained", trained_batch([TRAINED]))
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    (run / "logs").mkdir()
    (run / "logs" / "s.log").write_text("said\n")
    return run


def add_row(run: Path, table: str, **values: object) -> None:
    """Add a row with its own digest, whatever its values are."""
    row = ROWS[table] | values
    schema = TABLES[table]
    try:
        digest = row_digest(row, schema)
    except Exception:  # of a value that has none
        digest = ""
    path = run / f"{table}-{len(list(run.iterdir()))}-1.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist([row | {DIGEST: digest}], schema))


class TooSlowError(Exception):
    """A command took more time of the CPU than it may."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TooSlowError` when the block takes more time of the CPU."""

    def stop(*_: object) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def verify(run: Path) -> Verification:
    return verify_run(run, lambda *_: None)


def commands(run: Path, out: Path) -> dict[str, Callable[[], object]]:
    """Return all that reads a run folder, by name. What it writes is below `out`."""

    def command(*arguments: object) -> Result:
        done = CliRunner().invoke(rolltap, list(map(str, arguments)))
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code != 2, done.output
        return done

    def view() -> None:
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

    exports = {
        to: lambda to=to: command("export", run, "--to", to, "--out", out / to) for to in FORMATS
    }
    return {
        "verify": lambda: verify(run),
        "repair": lambda: verify_run(run, lambda *_: None, repair=True),
        "inspect": lambda: command("inspect", run),
        "inspect a session": lambda: command("inspect", run, "s"),
        "inspect a call": lambda: command("inspect", run, "s", "a"),
        "compare": lambda: command("inspect", run, "s", "t"),
        "traces": lambda: command("traces", run, "--strategy", "tree", "--json"),
        "merge": lambda: command("merge", run, "--out", out / "merged"),
        "split": lambda: command("split", run, "--by", "status", "--out", out / "split"),
        "filter": lambda: command("filter", run, "--min-reward", "0.5", "--out", out / "filtered"),
        "view": view,
        "view a file": lambda: command("view", run, "--out", out / "page.html"),
        "rerun": lambda: Record.of(run, "s"),
        **exports,
    }


FORMATS = ("parquet", "atif", "messages")


def attempt(read: Callable[[], object], size: int = 0) -> str | None:
    """Read a run. Return what the user is told of it, or None when it was read; other errors are
    raised."""
    try:
        with limited(CPU_SECONDS + size / 1e6):
            read()
    except (RolltapError, OSError) as error:
        return str(error)
    return None
