"""Traces as a data set that `datasets.load_from_disk` opens."""

import json
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from datasets import DatasetInfo

from rolltap.addons.store.staging import new_folder
from rolltap.trainer.exports.features import TRACE_FEATURES, trace_row
from rolltap.trainer.exports.shards import ShardWriter
from rolltap.trainer.traces.sessions import TracedSession


def save_traces(sessions: Iterable[TracedSession], out: Path, card: Callable[[], str]) -> None:
    """Write the traces of `sessions` to the folder `out`, and at the end what `card` returns as its README.md.

    Raises as `new_folder`, and what `sessions` raises; then there is no `out`.
    """
    with new_folder(out) as folder:
        with ShardWriter(folder, "data", "arrow", TRACE_FEATURES) as shards:
            for traced in sessions:
                shards.add(map(trace_row, traced.traces))
        DatasetInfo(features=TRACE_FEATURES).write_to_directory(str(folder))
        # as Dataset.save_to_disk writes it; that would need all rows in a dataset first, and write them twice
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in shards.names],
            "_fingerprint": secrets.token_hex(8),
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n")
        (folder / "README.md").write_text(card())
