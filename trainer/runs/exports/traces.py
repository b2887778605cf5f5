"""Traces as a dataset that `datasets.load_from_disk` opens."""

from collections.abc import Callable, Iterable
from pathlib import Path

from rolltap.addons.store.staging import new_folder
from rolltap.trainer.runs.exports.card import TRACE_FEATURES, trace_row
from rolltap.trainer.runs.exports.parquet import Spool
from rolltap.trainer.traces.sessions import TracedSession


def save_traces(sessions: Iterable[TracedSession], out: Path, card: Callable[[], str]) -> None:
    """Write the traces of `sessions` to the folder `out`, with a README.md.

    `card` returns the README's text; it is called after the last session. Raises what `new_folder` and the iteration
    over `sessions` raise; `out` is then not created.
    """
    with new_folder(out) as folder, Spool(TRACE_FEATURES, folder) as spool:
        for traced in sessions:
            spool.add(map(trace_row, traced.traces))
        dataset, shards = spool.dataset()
        dataset.save_to_disk(folder, num_shards=shards)
        (folder / "README.md").write_text(card())
