"""Published weights: their names, their folders, and the policy file that tells the recorder of them."""

import json
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from rolltap.addons.engine.policy import POLICY_FILE
from rolltap.addons.errors import RunError
from rolltap.addons.store.staging import write_atomically
from rolltap.trainer.engine.base_weights import LOADED
from rolltap.trainer.versions import Version

Agrees = Callable[[str | None], None]
"""Compares what the engines serve with the trainer. The argument is the model's name in them, None for the base."""
OTHER_BASE = "it was made for other weights of the base model"


def published_name(version: str) -> str:
    """Return the name of published weights: of their folder, and of an adapter in the engines."""
    return f"policy-{version}"


def published_version(name: str) -> Version | None:
    """Return the version of an adapter that a training published, by its name in the engines; None for other names."""
    return Version.parse(name.removeprefix(prefix)) if name.startswith(prefix := published_name("")) else None


def names_of_run(version: str) -> str:
    """Return how the names of all weights begin that the training of a version publishes."""
    return published_name(version.partition(".")[0]) + "."


def base_version(version: str) -> str:
    """Return the version of base weights in the attempt that publishes a version."""
    parsed = Version.parse(version)
    return LOADED if parsed is None else str(Version(parsed.run, 0, parsed.attempt))


def save(target: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a hidden folder, then rename it to `target`. Raises `RunError`."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except OSError as error:
        raise RunError(f"{target} could not be written: {error}; the engines are unchanged") from error


def keep_only(folder: Path, version: str, kept: Collection[Path]) -> None:
    """Remove other weights of a version's training: older ones, and those that a killed training left there."""
    names = names_of_run(version)
    for path in [*folder.glob(f"{names}*"), *folder.glob(f".{names}*")]:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def write_policy(run: Path, model: str | None, version: str) -> None:
    """Write the policy file, from which the recorder reads the current version and its model name in the engines.

    `model` None is the base model. Raises `RunError`.
    """
    try:
        write_atomically(run / POLICY_FILE, json.dumps({"model": model, "version": version}) + "\n")
    except OSError as error:
        raise RunError(f"{run / POLICY_FILE} could not be written: {error}; the policy is the previous one") from error
