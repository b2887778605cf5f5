"""Datasets of a run: Parquet that the Hub's viewer shows and `load_dataset` opens, and traces for
`load_from_disk`.

Both have any number of rows and are written in bounded memory.
"""

from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self
from urllib.parse import urlsplit

import pyarrow as pa
from datasets import Dataset, Features, List, Value, disable_progress_bars

from rolltap.addons.store.records import CALL_SCHEMA, EVENT_SCHEMA, SESSION_SCHEMA
from rolltap.addons.store.staging import new_folder
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.console import Advance
from rolltap.trainer.runs.exports.card import HERE, dataset_card, file_digest
from rolltap.trainer.runs.exports.sessions import (
    each_session,
    engine_addresses,
    public_session,
    without_addresses,
)
from rolltap.trainer.traces.build import Trace
from rolltap.trainer.traces.sessions import Totals, TracedSession, TraceOptions, trace_session

_TEXT = Value("string")
_NUMBER = Value("int32")
TRACE_FEATURES = Features(
    {
        "session_id": _TEXT,
        "trace_id": _TEXT,
        "group_id": _TEXT,
        "task_id": _TEXT,
        "harness": _TEXT,
        "role": _TEXT,
        "reward": Value("float64"),
        "call_ids": List(_TEXT),
        "prompt_ids": List(_NUMBER),
        "completion_ids": List(_NUMBER),
        "completion_mask": List(Value("int8")),
        "logprobs": List(Value("float32")),
        "weight_versions": List({"version": _TEXT, "start": _NUMBER, "end": _NUMBER}),
        "continuity": List({"kind": _TEXT, "start": _NUMBER, "end": _NUMBER}),
        "shared_trace_id": _TEXT,
        "shared_tokens": _NUMBER,
    }
)
_INTERNAL = ("digest", "engine")
"""Columns that have no meaning outside of the run: the row's digest, the engine's address in the
recorder's network."""

SHARD_BYTES = 500 * 1024 * 1024
"""Size of a shard's columns in memory; the default of `Dataset.save_to_disk` and `push_to_hub`."""
_ROWS_AT_ONCE = 64


def export(
    run: Path,
    out: Path,
    advance: Advance,
    *,
    where: str = HERE,
    leave_out: Collection[str | None] = (),
) -> int:
    """Write a run as up to four configs, and a card that loads them from `where`. Return the number
    of rows.

    The sessions in `leave_out` are not written, nor their events; with None, nor the events of
    nobody.

    A config without rows is left out. A call's prompt is written as it is stored, without the
    tokens of its parent: full prompts would take O(T^2) space for a session of T calls. `traces`
    has full sequences. Raises `RunError`, `LedgerError` and `OSError`.
    """
    options = TraceOptions()
    totals = Totals()
    engines = engine_addresses(run)
    features = {
        "traces": TRACE_FEATURES,
        "calls": _features(CALL_SCHEMA),
        "sessions": _features(SESSION_SCHEMA),
        "events": _features(EVENT_SCHEMA),
    }
    with ExitStack() as stack:
        spools = {}
        for config, columns in features.items():
            spools[config] = stack.enter_context(Spool(columns, out))
        for recorded in each_session(run, advance, leave_out):
            traced = trace_session(recorded, options)
            totals.add(traced)
            engines.update(urlsplit(call.engine).netloc for call in recorded.calls if call.engine)
            spools["traces"].add(map(Trace.to_json, traced.traces))
            spools["calls"].add(
                without_addresses(call.to_row(), engines) for call in recorded.calls
            )
            if recorded.session is not None:
                row = public_session(recorded.session).to_row()
                spools["sessions"].add([without_addresses(row, engines)])
        events = (row for row in read_rows(run, "events") if row["session_id"] not in leave_out)
        spools["events"].add(without_addresses(row, engines) for row in events)
        written = {config: _write(spool, out / config) for config, spool in spools.items()}
    dataset_card(run, options, totals, written=written, where=where).save(out / "README.md")
    return sum(rows for rows, _ in written.values())


def save_traces(
    run: Path,
    sessions: Iterable[TracedSession],
    out: Path,
    options: TraceOptions,
) -> Totals:
    """Write the traces of a run's `sessions` to the new folder `out`, with a card. Return the
    counts.

    `options` are those of the traces. Raises what `new_folder` and the iteration over `sessions`
    raise; `out` is then not created.
    """
    totals = Totals()
    with new_folder(out) as folder, Spool(TRACE_FEATURES, folder) as spool:
        for traced in sessions:
            totals.add(traced)
            spool.add(map(Trace.to_json, traced.traces))
        dataset, shards = spool.dataset()
        dataset.save_to_disk(folder, num_shards=shards)
        dataset_card(run, options, totals).save(folder / "README.md")
    return totals


class Spool:
    """A buffer of rows in a temporary Arrow file beside `folder`. A context manager, which removes
    the file.

    Used instead of `Dataset.from_generator`, which wraps errors of the generator and refuses a
    generator without rows. Raises `OSError`.
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
        some = list(islice(rows, _ROWS_AT_ONCE))
        while some:
            self._writer.write_batch(pa.RecordBatch.from_pylist(some, self._schema))
            some = list(islice(rows, _ROWS_AT_ONCE))

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


def _features(schema: pa.Schema) -> Features:
    columns = [column for column in schema if column.name not in _INTERNAL]
    return Features.from_arrow_schema(pa.schema(columns))


def _write(spool: Spool, folder: Path) -> tuple[int, str]:
    """Write rows as Parquet. Return their number, and their digest, with which the names of the
    files end.

    Without rows, no folder is made: `load_dataset` refuses a split without rows.
    """
    dataset, shards = spool.dataset()
    digest = file_digest(dataset.cache_files[0]["filename"])
    if len(dataset):
        folder.mkdir()
        for number in range(shards):
            shard = dataset.shard(shards, number, contiguous=True)
            shard.to_parquet(folder / f"train-{number:05}-of-{shards:05}-{digest}.parquet")
    return len(dataset), digest
