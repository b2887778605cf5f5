"""`batches.jsonl` in the run folder: the sessions of each step that was trained, one JSON object a line.

A session is `[id, revision]`. A step that is taken again takes these sessions with the rewards of these revisions, and
no attempt at one that was a fault.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from rolltap.addons.errors import RunError

BATCHES = "batches.jsonl"
"""Name of the file in the run folder."""


class TrainedBatches:
    """The file of a run. Only the training that claimed the folder writes it.

    The constructor removes a last line that was not written to its end. It raises `RunError` for another line that is
    not a batch, and `OSError`.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / BATCHES
        self._steps: dict[int, list[tuple[str, int]]] = {}
        text = self._path.read_bytes() if self._path.exists() else b""
        *lines, torn = text.split(b"\n")
        if torn:
            os.truncate(self._path, len(text) - len(torn))
        for number, line in enumerate(lines, 1):
            try:
                batch = json.loads(line)
                self._steps[int(batch["step"])] = [(str(name), int(number)) for name, number in batch["sessions"]]
            except (ValueError, TypeError, LookupError) as error:
                raise RunError(f"{self._path}, line {number} is damaged ({error}): train into a new folder") from error

    def get(self, step: int) -> list[tuple[str, int]] | None:
        """Return id and revision of a step's sessions in their order; None when its batch was not trained before."""
        return self._steps.get(step)

    def add(self, step: int, sessions: Sequence[tuple[str, int]]) -> None:
        """Write the batch of a step, id and revision of each. It is on the disk after the return. Raises `OSError`."""
        self._steps[step] = list(sessions)
        with self._path.open("ab") as file:
            file.write(json.dumps({"step": step, "sessions": self._steps[step]}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
