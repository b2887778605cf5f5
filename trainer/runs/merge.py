"""Merge of several runs into one, or of the sound rows of a damaged run. Rows are copied unchanged, with their digests.

Memory: one batch, and the ids of the sessions. The output folder is created atomically.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rolltap.addons.errors import InputError
from rolltap.addons.store.digest import DIGEST
from rolltap.addons.store.metadata import read_metadata, write_metadata
from rolltap.addons.store.segment import SegmentReader
from rolltap.addons.store.staging import new_folder
from rolltap.addons.store.tables import TABLES, RunWriter, read_batches, run_files
from rolltap.trainer.progress import Advance
from rolltap.trainer.runs.findings import check_rows
from rolltap.trainer.runs.parts import named

_JOINED = ("engines", "recorders", "left_behind")
"""Keys of `run.json` whose values are joined from all runs."""


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """The losses of one damaged file when its run is merged."""

    file: str
    """`RUN/FILE`."""
    rows: int
    """Rows whose digest does not match."""
    places: int
    """Byte ranges that cannot be read, each of one or more adjacent commits."""


@dataclass(frozen=True, slots=True)
class _Source:
    run: Path
    metadata: dict[str, Any]

    @property
    def name(self) -> str:
        return self.run.absolute().name

    @property
    def names_model(self) -> bool:
        """True unless the run is an import without a model."""
        return self.metadata.get("source") != "import" or "tokenizer_sha256" in self.metadata

    def origins(self, merged: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the run's name and the metadata that differs from `merged`; for a merged run, one entry per origin."""
        origins = self.metadata.get("merged_from", [{"run": self.name}])
        known = (*_JOINED, "merged_from")
        other = {key: value for key, value in self.metadata.items() if key not in known and merged.get(key) != value}
        return [{**other, **origin} for origin in origins]


def merge_runs(runs: Sequence[Path], out: Path, advance: Advance) -> tuple[int, list[LeftBehind]]:
    """Write the sound rows of one or more runs to the new folder `out`.

    Return the number of sessions, and the losses: rows that cannot be read or whose digest does not match are not
    copied.
    The new `run.json` lists the losses as `left_behind`.

    Raises `InputError` when the runs' tokenizers or chat templates differ, when two runs have calls or the row of the
    same session, and when no row of a damaged run is sound. Raises `RunError` when a run cannot be read.
    """
    sources = [_Source(run, read_metadata(run)) for run in runs]
    # an import that names no model is taken to be of the model of the runs it is merged with
    recorded = [source for source in sources if source.names_model] or sources
    recorded.sort(key=lambda source: source.metadata.get("source") == "import")  # the merged run is a recorded one
    _require_one_model(recorded)
    _require_other_sessions(runs)
    tables = [(source, table) for source in sources for table in TABLES]
    files = [(source, table, path) for source, table in tables for path in run_files(source.run, table)]
    size, done = sum(path.stat().st_size for _, _, path in files), 0
    sessions: set[str | None] = set()
    left_behind: list[LeftBehind] = []
    with new_folder(out) as staged:
        with RunWriter(staged, "never") as writer:
            for source, table, path in files:
                done += path.stat().st_size
                left_behind += _copy_sound_rows(source, table, path, writer, sessions)
                advance("bytes copied", done, size)
        if left_behind and not sessions:
            raise InputError(f"no session of {', '.join(map(str, runs))} can be saved: {out} was not written")
        write_metadata(staged, _merged_metadata(recorded[0], sources, left_behind))
    return len(sessions), left_behind


def _copy_sound_rows(
    source: _Source, table: str, path: Path, writer: RunWriter, sessions: set[str | None]
) -> Iterator[LeftBehind]:
    """Write the rows of a file whose digest matches. Yield the losses, if there are any.

    Adds to `sessions` the ids of sessions with a copied call or row.
    """
    rows = 0
    with SegmentReader(path, TABLES[table]) as reader:
        for _, batch in reader:
            sound = pa.array([fault is None for _, fault in check_rows(table, batch)])
            if sound.true_count:
                writer.add_batch(table, copied := batch.filter(sound))
                if table != "events":
                    sessions.update(copied.column("session_id").unique().to_pylist())
            rows += sound.false_count
    writer.end_session()
    if rows or reader.damage:
        yield LeftBehind(f"{source.name}/{path.name}", rows, len(reader.damage))


def _require_one_model(sources: Sequence[_Source]) -> None:
    first = sources[0]
    for key in ("tokenizer_sha256", "chat_template_sha256"):
        for other in sources[1:]:
            if first.metadata.get(key) != other.metadata.get(key):
                what = key.removesuffix("_sha256").replace("_", " ")
                raise InputError(f"{first.run} and {other.run} do not have the same {what}: merge runs of one model")


def _require_other_sessions(runs: Sequence[Path]) -> None:
    owners: dict[str, Path] = {}
    for run in runs:
        batches = (batch for table in ("calls", "sessions") for batch in read_batches(run, table))
        recorded = {session_id for batch in batches for session_id in batch.column("session_id").unique().to_pylist()}
        if repeated := sorted(session_id for session_id in recorded if session_id in owners):
            first = owners[repeated[0]]
            alike = _digests(first, repeated[0]) == _digests(run, repeated[0])
            what = "with the same content: leave one run out" if alike else "with other content"
            raise InputError(f"{run} and {first} both have session {named(repeated)}, {what}")
        owners |= dict.fromkeys(recorded, run)


def _digests(run: Path, session_id: str) -> set[str]:
    """Return the digests of a session's calls and row."""
    batches = (batch for table in ("calls", "sessions") for batch in read_batches(run, table, [session_id]))
    return {digest for batch in batches for digest in batch.column(DIGEST).to_pylist()}


def _merged_metadata(first: _Source, sources: Sequence[_Source], left_behind: Sequence[LeftBehind]) -> dict[str, Any]:
    """Return the metadata of the first run with the engines, recorders and losses of all runs.

    Other metadata in which a run differs is in `merged_from`.
    """
    merged = dict(first.metadata)
    if engines := {url: engine for source in sources for url, engine in source.metadata.get("engines", {}).items()}:
        merged["engines"] = engines
    for key, more in (("recorders", []), ("left_behind", [asdict(loss) for loss in left_behind])):
        entries = [entry for source in sources for entry in source.metadata.get(key, [])] + more
        if entries:
            merged[key] = [entry for number, entry in enumerate(entries) if entry not in entries[:number]]
    merged["merged_from"] = [entry for source in sources for entry in source.origins(merged)]
    return merged
