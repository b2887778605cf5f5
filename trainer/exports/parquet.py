"""Parquet that the Hub's viewer shows and `load_dataset` opens: traces, calls, sessions and events."""

import re
import shutil
from collections.abc import Collection
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from datasets import Features

from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.exports.card import HERE, parquet_card
from rolltap.trainer.exports.features import CALL_FEATURES, EVENT_FEATURES, SESSION_FEATURES, TRACE_FEATURES, trace_row
from rolltap.trainer.exports.shards import ShardWriter
from rolltap.trainer.progress import Advance
from rolltap.trainer.traces.reader import count_sessions
from rolltap.trainer.traces.sessions import Selection, Totals, iter_traces

_SOCKET = re.compile(r"\('[^']+', \d+(?:, \d+, \d+)?\)")
"""An address as Python writes it into the error of a connection."""


def export(run: Path, out: Path, advance: Advance, *, where: str = HERE) -> int:
    """Write a run as four configs and a card that says to load them from `where`; returns the number of rows.

    A config without rows is left out. Prompts stay as they are stored, what follows the parent's: whole ones take room
    that grows with the square of a session's turns, and `traces` has whole sequences. Raises `RunError`, `LedgerError`
    and `OSError`.
    """
    selection, totals = Selection(), Totals()
    engines = _engines(run)
    total = count_sessions(run)
    with (
        _shards(out, "traces", TRACE_FEATURES) as traces,
        _shards(out, "calls", CALL_FEATURES) as calls,
        _shards(out, "sessions", SESSION_FEATURES) as sessions,
    ):
        for traced in iter_traces(run, selection):
            traces.add(map(trace_row, traced.traces))
            engines.update(urlsplit(call.engine).netloc for call in traced.recorded.calls if call.engine)
            calls.add(_without_addresses(call.to_row(), "error", engines) for call in traced.recorded.calls)
            sessions.add([session.to_row()] if (session := traced.recorded.session) else [])
            totals.add(traced)
            advance("sessions", totals.sessions, total)
    with _shards(out, "events", EVENT_FEATURES) as events:
        events.add(_without_addresses(row, "detail", engines) for row in read_rows(run, "events"))
    rows = {shards.folder.name: shards.rows for shards in (traces, calls, sessions, events)}
    for config, count in rows.items():
        if not count:  # load_dataset refuses a split without rows
            shutil.rmtree(out / config)
    (out / "README.md").write_text(parquet_card(run, selection, totals, rows, where))
    return sum(rows.values())


def _shards(out: Path, config: str, features: Features) -> ShardWriter:
    (out / config).mkdir()
    return ShardWriter(out / config, "train", "parquet", features)


def _engines(run: Path) -> set[str]:
    """The addresses of the engines that the run's metadata names."""
    metadata = read_metadata(run)
    recorders = (recorder.get("engines", ()) for recorder in metadata.get("recorders", ()))
    return {urlsplit(url).netloc for url in chain(metadata.get("engines", ()), *recorders)}


def _without_addresses(row: dict[str, Any], column: str, engines: Collection[str]) -> dict[str, Any]:
    """The row as it is stored, but for the addresses of engines in the text of a column: those are of the recorder's
    network."""
    if row[column]:
        text = _SOCKET.sub("ENGINE", row[column])
        # the longest first, as one may begin another
        for address in sorted(engines, key=len, reverse=True):
            text = text.replace(address, "ENGINE")
        row[column] = text
    return row
