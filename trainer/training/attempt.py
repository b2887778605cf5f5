"""`training.json` in the run folder: the name of the training, its starts, and the values that
decide its steps."""

import json
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import Any

from rolltap.addons.errors import InputError, RunError
from rolltap.addons.store.staging import locked, write_atomically
from rolltap.trainer.names import Version
from rolltap.trainer.rollouts.config import FREE_OPTIONS
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.training.arguments import dtype_of, last_checkpoint
from rolltap.trainer.training.recipe import CHECKPOINTS, FINISHED, Recipe, go_on_elsewhere

TRAINING_FILE = "training.json"
_CONSTANT = ("constant", "constant_with_warmup")
"""Values of `lr_scheduler_type` whose learning rates do not depend on the number of steps."""
_DIGEST = "sha256:"
_FREE_FIELDS = """
    gradient_accumulation_steps forward offload_checkpoints activation_checkpointing use_cpu
    report_to run_name project trackio_space_id disable_tqdm logging_* log_level save_*
"""
"""Patterns of arguments that say how a step is computed, logged and saved, not which step it is."""


def online_fingerprint(
    recipe: Recipe,
    tasks: Sequence[Task],
    harness: Harness,
    seed: int,
) -> dict[str, Any]:
    """Return what decides the steps of an online training: key -> JSON value, or the digest of a
    long one.

    Of folders that a task names the content counts. Raises `InputError` for one that cannot be
    read.
    """
    values = _fingerprint(recipe, seed)
    values["kind"] = "online"
    values["tasks"] = _digest([task.digest() for task in tasks])
    values["harness"] = _DIGEST + harness.digest()
    values |= recipe.model_dump(include={"sessions", "replace_zero_variance", "runtime"})
    if recipe.max_staleness:
        values["max_staleness"] = recipe.max_staleness
    if recipe.forks is not None:
        values |= _table("forks", recipe.forks.model_dump(by_alias=True))
    values |= _table("recorder", recipe.recorder, FREE_OPTIONS)
    values |= _table("budget", recipe.budget.model_dump(exclude_none=True))
    return values


def offline_fingerprint(
    recipe: Recipe, groups: Sequence[Sequence[object]], seed: int
) -> dict[str, Any]:
    """Return what decides the steps of an offline training. `groups` are its rows, as JSON."""
    values = _fingerprint(recipe, seed)
    values["kind"] = "offline"
    values["the recorded groups"] = _digest(groups)
    return values


def _fingerprint(recipe: Recipe, seed: int) -> dict[str, Any]:
    """Return what decides the steps of every training.

    A key of `Recipe` that decides a step is named here, or in `online_fingerprint` if it is for
    rollouts: a key that is not named may differ when a training goes on.
    """
    grpo = recipe.grpo
    values: dict[str, Any] = {"seed": seed, "model": str(recipe.model), "dtype": dtype_of(recipe)}
    values |= recipe.model_dump(
        include={"groups_per_step", "strategy", "roles", "max_tokens", "suspicious"}
    )
    is_part_of_all = 0 < grpo.get("warmup_steps", 0) < 1
    if grpo.get("lr_scheduler_type") not in _CONSTANT or is_part_of_all:
        values["steps"] = recipe.steps
    if recipe.teacher:
        values["teacher"] = recipe.teacher
    values |= _table("outcomes", recipe.outcomes.model_dump())
    values |= _table("lora", recipe.lora)
    values |= _table("grpo", grpo, _FREE_FIELDS.split())
    return values


def _table(name: str, values: Mapping[str, Any], free: Collection[str] = ()) -> dict[str, Any]:
    """Return the values of a table without those that match a `free` pattern."""
    kept = {}
    for key, value in values.items():
        if not any(fnmatch(key, pattern) for pattern in free):
            kept[f"{name}.{key}"] = value
    return kept


def require_same_fingerprint(
    where: object, known: Mapping[str, Any], given: Mapping[str, Any]
) -> None:
    """Raise `InputError`, which names the keys, unless a training is started with the values that
    are `known`."""
    differ = [
        key for key in known.keys() | given.keys() if _json(known.get(key)) != _json(given.get(key))
    ]
    if "kind" in differ:
        differ = ["kind"]
    if not differ:
        return
    named = ", ".join(_named(known, key) for key in sorted(differ))
    fix = "start in another folder, or put them back"
    if differ == ["steps"] and isinstance(where, Path) and (where / FINISHED).exists():
        fix = go_on_elsewhere(where, given["steps"] - known["steps"])
    raise InputError(f"{where} was begun with other values of {named}: {fix}")


def _named(known: Mapping[str, Any], key: str) -> str:
    if key not in known:
        return f"{key} (it was not given)"
    value = _json(known[key])
    if key == "steps":
        return (
            f"steps (it was {value}, and the learning rates follow from it unless lr_scheduler_type"
            " is constant)"
        )
    if value.startswith(f'"{_DIGEST}'):
        return key
    return f"{key} (it was {value})"


def _digest(value: Any) -> str:
    return _DIGEST + sha256(_json(value).encode()).hexdigest()


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a training on a run folder. `number` is how many times it was started before."""

    run: str
    number: int

    def version(self, step: int) -> Version:
        """Return the name of the weights after `step` optimizer steps of this attempt."""
        return Version(self.run, step, self.number)


@contextmanager
def claimed_attempt(run: Path, fingerprint: Mapping[str, Any]) -> Iterator[Attempt]:
    """Count a start of the training on the folder `run`, and yield it. No other start ever gets the
    same attempt.

    The first start keeps the `fingerprint`. The count is on the disk when the block begins, in
    which no other training can start on the folder.

    Raises `InputError` when the first start had another fingerprint; `RunError` when another
    training is running, and when `training.json` is damaged, or missing beside checkpoints; and
    `OSError`.
    """
    run.mkdir(parents=True, exist_ok=True)
    path = run / TRAINING_FILE
    with ExitStack() as stack:
        with locked(run, wait=True):
            attempt = _next_attempt(path, fingerprint)
            known = {"run": attempt.run, "starts": attempt.number + 1, "begun": fingerprint}
            write_atomically(path, json.dumps(known, indent=2) + "\n")
            stack.enter_context(locked(path))
        yield attempt


def require_shared(run: Path, attempt: Attempt) -> None:
    """Raise `InputError` unless this process, on whatever machine, sees the folder `run` of the
    attempt."""
    path = run / TRAINING_FILE
    if not path.exists() or f'"{attempt.run}"' not in path.read_text():
        raise InputError(
            f"{run.absolute()} is not that of the first process: all nodes must share it, under one"
            " path"
        )


def _next_attempt(path: Path, fingerprint: Mapping[str, Any]) -> Attempt:
    try:
        with locked(path) as free:
            if free is None:
                raise RunError(
                    f"another training is running on {path.parent}: wait until it has ended, or"
                    " stop it"
                )
            known = json.loads(path.read_text())
        attempt = Attempt(known["run"], known["starts"])
        if Version.parse(str(attempt.version(0))) != attempt.version(0):
            raise ValueError(
                f"no name of weights begins with {attempt.run!r} and ends with {attempt.number!r}"
            )
        before: dict[str, Any] = dict(known["begun"])
    except FileNotFoundError as error:
        checkpoint = last_checkpoint(path.parent / CHECKPOINTS)
        if checkpoint is not None:
            raise RunError(
                f"{checkpoint} exists, but not {path}, which says whose it is: train elsewhere"
            ) from error
        return Attempt(secrets.token_hex(4), 0)
    except (ValueError, LookupError, TypeError) as error:
        raise RunError(f"{path} is damaged ({error}): train into a new folder") from error
    require_same_fingerprint(path.parent, before, fingerprint)
    return attempt
