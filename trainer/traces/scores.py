"""The log-probabilities that `rolltap score` stored in a run under a name."""

from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.addons.store.records import DIGEST
from rolltap.addons.store.scores import Score
from rolltap.addons.store.sessions import SessionIndex, TableScan


class RecordedScores:
    """The scores of one name, read from the disk when they are asked for. Not thread-safe."""

    def __init__(self, run: Path, name: str, *, some: bool = True) -> None:
        """Raises `RunError`, and `InputError` when several scorers have the name, or with `some` none."""
        self.name = name
        self.scorer: str | None = None
        self._run = run
        self._index = SessionIndex(run, "scores")
        self._scan = TableScan(run, "scores")
        self._names: dict[str, None] = {}
        self.refresh()
        if some and self.scorer is None:
            has = ", ".join(self._names) or "none"
            raise InputError(f"{run} has no scores {name!r}, but {has}: `rolltap score {run} --as {name}` makes them")

    def refresh(self) -> None:
        """Add what was committed since. Raises `OSError`, and `InputError` when another scorer has the name."""
        self._index.refresh()
        for new in self._scan.new():
            for _, batch in new.batches:
                names = batch["name"].to_pylist()
                for name, scorer in zip(names, batch["scorer"].to_pylist(), strict=True):
                    self._names[name] = None
                    if name == self.name:
                        self._take(scorer)

    def _take(self, scorer: str) -> None:
        if self.scorer not in (None, scorer):
            raise InputError(
                f"the scores {self.name!r} of {self._run} are those of {self.scorer} and {scorer}: "
                "score it as another name"
            )
        self.scorer = scorer

    def of(self, session_id: str) -> dict[str, Score]:
        """Return call id -> its scores. Rows whose digest does not match are left out."""
        found: dict[str, Score] = {}
        for row in self._index.sound_rows(session_id):
            del row[DIGEST]
            if row["name"] == self.name:
                found[row["call_id"]] = Score(**row)
        self._index.close()
        return found
