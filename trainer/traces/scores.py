"""The log-probabilities that `rolltap score` stored in a run under a name."""

from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.addons.store.index import SessionIndex
from rolltap.addons.store.records import DIGEST
from rolltap.addons.store.rows import Row
from rolltap.addons.store.tables import read_batches
from rolltap.trainer.traces.tables import Score


class RecordedScores(SessionIndex):
    """The scores of one name, read from the disk when they are asked for. Not thread-safe.

    Attributes:
        scorer: The weights that gave them; None as long as there are none.

    Raises `RunError`, and `InputError` when several scorers have the name, or with `some` none.
    """

    def __init__(self, run: Path, name: str, *, some: bool = True) -> None:
        super().__init__(run, "scores")
        self.name = name
        self.scorer: str | None = None
        names: dict[str, None] = {}
        for batch in read_batches(run, "scores"):
            for row in batch.select(["name", "scorer"]).to_pylist():
                names[row["name"]] = None
                self._take(row)
        if some and self.scorer is None:
            known = ", ".join(names) or "none"
            fix = f"`rolltap score {run} --as {name}` makes them"
            raise InputError(f"{run} has no scores {name!r}, but {known}: {fix}")

    def of(self, session_id: str) -> dict[str, Score]:
        """Return call id -> its scores. Rows whose digest does not match are left out.

        Raises `InputError` when another scorer has the name.
        """
        found: dict[str, Score] = {}
        for row in self.sound_rows(session_id):
            del row[DIGEST]
            if self._take(row):
                found[row["call_id"]] = Score(**row)
        self.close()
        return found

    def _take(self, row: Row) -> bool:
        """Return True for a row of the name, whose scorer is now known."""
        if row["name"] != self.name:
            return False
        scorer = row["scorer"]
        if self.scorer not in (None, scorer):
            both = f"{self.scorer} and {scorer}"
            what = f"the scores {self.name!r} of {self._run} are those of {both}"
            raise InputError(f"{what}: score it as another name")
        self.scorer = scorer
        return True
