"""The log-probabilities that `rolltap score` stored in a run under a name."""

from collections import defaultdict
from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.addons.store.records import DIGEST
from rolltap.addons.store.rows import row_digest
from rolltap.addons.store.scores import SCORE_SCHEMA, Score
from rolltap.addons.store.sessions import SessionIndex
from rolltap.addons.store.tables import batch_rows, read_batches


class RecordedScores:
    """The scores of one name, read from the disk when they are asked for. Not thread-safe."""

    def __init__(self, run: Path, name: str, *, some: bool = True) -> None:
        """Raises `RunError`, and `InputError` when several scorers have the name, or with `some` none."""
        scorers = defaultdict[str, dict[str, None]](dict)
        for batch in read_batches(run, "scores"):
            for each, scorer in zip(batch["name"].to_pylist(), batch["scorer"].to_pylist(), strict=True):
                scorers[each][scorer] = None
        named = [*scorers.pop(name, {})]
        if some and not named:
            has = ", ".join(scorers) or "none"
            raise InputError(f"{run} has no scores {name!r}, but {has}: `rolltap score {run} --as {name}` makes them")
        if len(named) > 1:
            raise InputError(
                f"the scores {name!r} of {run} are those of {' and '.join(named)}: score it as another name"
            )
        self._index, self.name, self.scorer = SessionIndex(run, "scores"), name, named[0] if named else None

    def of(self, session_id: str) -> dict[str, Score]:
        """Return call id -> its scores. Rows whose digest does not match are left out."""
        rows = [row for batch in self._index.batches(session_id) for row in batch_rows(batch)]
        self._index.close()
        sound = [row for row in rows if row["name"] == self.name and row.pop(DIGEST) == row_digest(row, SCORE_SCHEMA)]
        return {row["call_id"]: Score(**row) for row in sound}
