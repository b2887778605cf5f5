"""`training.json` in the run folder: the name of the training, its starts, and what it was begun with."""

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolltap.addons.errors import RunError
from rolltap.addons.store.staging import locked, write_atomically
from rolltap.trainer.training.begun import require_same
from rolltap.trainer.training.checkpoints import CHECKPOINTS, last_checkpoint
from rolltap.trainer.versions import Version

TRAINING_FILE = "training.json"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a training on a run folder. `number` is how many times it was started before."""

    run: str
    number: int

    def version(self, step: int) -> Version:
        """Return the name of the weights after `step` optimizer steps of this attempt."""
        return Version(self.run, step, self.number)


@contextmanager
def claimed_attempt(run: Path, begun: Mapping[str, Any]) -> Iterator[Attempt]:
    """Count a start of the training on the folder `run`, and yield it. No other start ever gets the same attempt.

    `begun` is what decides the steps (`begun_online`, `begun_offline`). The first start keeps it. The count is on the
    disk when the block begins, so claim before anything is published. Inside the block no other training can start on
    the folder, not even on this one's incomplete checkpoints.

    Raises `InputError` when the first start had another `begun`; `RunError` when another training is running, and when
    `training.json` is damaged, or missing beside checkpoints; and `OSError`.
    """
    run.mkdir(parents=True, exist_ok=True)
    path = run / TRAINING_FILE
    with ExitStack() as stack:
        with locked(run, wait=True):
            attempt = _next_attempt(path, begun)
            known = {"run": attempt.run, "starts": attempt.number + 1, "begun": begun}
            write_atomically(path, json.dumps(known, indent=2) + "\n")
            stack.enter_context(locked(path))
        yield attempt


def _next_attempt(path: Path, begun: Mapping[str, Any]) -> Attempt:
    try:
        with locked(path) as free:
            if free is None:
                raise RunError(f"another training is running on {path.parent}: wait until it has ended, or stop it")
            known = json.loads(path.read_text())
        attempt = Attempt(known["run"], known["starts"])
        if Version.parse(str(attempt.version(0))) != attempt.version(0):
            raise ValueError(f"no name of weights begins with {attempt.run!r} and ends with {attempt.number!r}")
        before = dict(known["begun"])
    except FileNotFoundError as error:
        if checkpoint := last_checkpoint(path.parent / CHECKPOINTS):
            raise RunError(f"{checkpoint} exists, but not {path}, which says whose it is: train elsewhere") from error
        return Attempt(secrets.token_hex(4), 0)
    except (ValueError, LookupError, TypeError) as error:
        raise RunError(f"{path} is damaged ({error}): train into a new folder") from error
    require_same(path.parent, before, begun)
    return attempt
