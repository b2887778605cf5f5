"""Export to Parquet that the Hub's viewer shows and `load_dataset` opens: traces, calls, sessions and events.

A dataset of any number of rows, written in bounded memory.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self
from urllib.parse import urlsplit

import pyarrow as pa
from datasets import Dataset, Features, disable_progress_bars

from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.console import Advance
from rolltap.trainer.runs.exports.card import (
    CALL_FEATURES,
    EVENT_FEATURES,
    HERE,
    SESSION_FEATURES,
    TRACE_FEATURES,
    parquet_card,
    trace_row,
)
from rolltap.trainer.runs.exports.hub import public_session
from rolltap.trainer.traces.reader import count_sessions
from rolltap.trainer.traces.sessions import Totals, TraceOptions, iter_traces

SHARD_BYTES = 500 * 1024 * 1024
"""Size of a shard's columns in memory; the default of `Dataset.save_to_disk` and `push_to_hub`."""
_ROWS_AT_ONCE = 64


class Spool:
    """A buffer of rows in a temporary Arrow file beside `folder`. A context manager, which removes the file.

    Used instead of `Dataset.from_generator`, which wraps errors of the generator and refuses a generator without rows.
    Raises `OSError`.
    """

    def __init__(self, features: Features, folder: Path) -> None:
        disable_progress_bars()
        self._schema = features.arrow_schema
        self._temporary = TemporaryDirectory(prefix=".rows-", dir=folder.parent)
        self._path = f"{self._temporary.name}/rows.arrow"
        self._writer = pa.ipc.new_stream(self._path, self._schema)

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows. Keys that are not columns are ignored."""
        rows = iter(rows)
        while some := list(islice(rows, _ROWS_AT_ONCE)):
            self._writer.write_batch(pa.RecordBatch.from_pylist(some, self._schema))

    def dataset(self) -> tuple[Dataset, int]:
        """Return the rows, and into how many shards to split them. Rows cannot be added any more.

        The dataset maps the temporary file, so it is valid only inside the `with` block.
        """
        self._writer.close()
        dataset = Dataset.from_file(self._path)
        return dataset, dataset.data.nbytes // SHARD_BYTES + 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()
        self._temporary.cleanup()


_CONFIGS = {
    "traces": TRACE_FEATURES,
    "calls": CALL_FEATURES,
    "sessions": SESSION_FEATURES,
    "events": EVENT_FEATURES,
}
_SOCKET = re.compile(r"\('[^']+', \d+(?:, \d+, \d+)?\)")
"""A socket address, `('HOST', PORT)`, as Python's connection errors print it."""


def export(run: Path, out: Path, advance: Advance, *, where: str = HERE) -> int:
    """Write a run as up to four configs, and a card that loads them from `where`. Return the number of rows.

    A config without rows is left out. A call's prompt is written as it is stored, without the tokens of its parent:
    full prompts would take O(T^2) space for a session of T calls. `traces` has full sequences. Raises `RunError`,
    `LedgerError` and `OSError`.
    """
    options, totals = TraceOptions(), Totals()
    engines = _engines(run)
    total = count_sessions(run)
    with ExitStack() as stack:
        spools = {config: stack.enter_context(Spool(features, out)) for config, features in _CONFIGS.items()}
        for traced in iter_traces(run, options):
            recorded = traced.recorded
            engines.update(urlsplit(call.engine).netloc for call in recorded.calls if call.engine)
            spools["traces"].add(map(trace_row, traced.traces))
            spools["calls"].add(_without_addresses(call.to_row(), "error", engines) for call in recorded.calls)
            if recorded.session is not None:
                row = _without_addresses(public_session(recorded.session), "error", engines)
                spools["sessions"].add([_without_addresses(row, "evidence", engines)])
            totals.add(traced)
            advance("sessions", totals.sessions, total)
        spools["events"].add(_without_addresses(row, "detail", engines) for row in read_rows(run, "events"))
        rows = {config: _write(spool, out / config) for config, spool in spools.items()}
    (out / "README.md").write_text(parquet_card(run, options, totals, rows, where))
    return sum(rows.values())


def _write(spool: Spool, folder: Path) -> int:
    """Write rows as Parquet. Without rows, no folder is made: `load_dataset` refuses a split without rows."""
    dataset, shards = spool.dataset()
    if len(dataset):
        folder.mkdir()
        for number in range(shards):
            shard = dataset.shard(shards, number, contiguous=True)
            shard.to_parquet(folder / f"train-{number:05}-of-{shards:05}.parquet")
    return len(dataset)


def _engines(run: Path) -> set[str]:
    """Return the addresses (HOST:PORT) of the engines that the run's metadata names."""
    metadata = read_metadata(run)
    recorders = (recorder.get("engines", ()) for recorder in metadata.get("recorders", ()))
    return {urlsplit(url).netloc for url in chain(metadata.get("engines", ()), *recorders)}


def _without_addresses(row: dict[str, Any], column: str, engines: Collection[str]) -> dict[str, Any]:
    """Replace addresses of engines in the text of a column of `row`: they disclose the recorder's network."""
    if row[column]:
        text = _SOCKET.sub("ENGINE", row[column])
        # the longest first: one address may be a prefix of another
        for address in sorted(engines, key=len, reverse=True):
            text = text.replace(address, "ENGINE")
        row[column] = text
    return row
