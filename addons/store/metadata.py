"""`run.json`: what a run was recorded with, for whoever reads it and for whoever records more of it."""

import json
from pathlib import Path
from typing import Any

from rolltap.addons.errors import RunError
from rolltap.addons.store.records import SCHEMA_VERSION
from rolltap.addons.store.staging import locked, write_atomically

RUN_FILE = "run.json"


def read_metadata(run: Path) -> dict[str, Any]:
    """The contents of `run.json`.

    Raises `RunError` when there is none, when it is damaged, and when another schema wrote it.
    """
    path = run / RUN_FILE
    try:
        metadata: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise RunError(f"{run} is not a run folder: it has no {RUN_FILE}") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    version = metadata.get("schema_version") if isinstance(metadata, dict) else None
    if not isinstance(version, int):
        raise RunError(f"{path} names no schema_version")
    if version != SCHEMA_VERSION:
        other = "a newer" if version > SCHEMA_VERSION else "an older"
        raise RunError(f"{run} has schema {version}, this rolltap reads {SCHEMA_VERSION}: read it with {other} rolltap")
    return metadata


def write_metadata(run: Path, metadata: dict[str, Any]) -> None:
    """Create the run folder and its `run.json`, or check that the folder belongs to the same model.

    A run holds token ids of one tokenizer: raises `RunError` when `run.json` names another tokenizer or template.
    """
    run.mkdir(parents=True, exist_ok=True)
    with locked(run, wait=True):
        if not (run / RUN_FILE).exists():
            _write_metadata(run, {"schema_version": SCHEMA_VERSION, **metadata})
            return
    known = read_metadata(run)
    for key in ("tokenizer_sha256", "chat_template_sha256"):
        if known.get(key) != metadata.get(key):
            raise RunError(f"{run} was recorded with another {key.removesuffix('_sha256')}: choose a new folder")


def add_recorder(run: Path, recorder: dict[str, Any]) -> None:
    """Note in `run.json`, under `recorders`, what one recorder samples with; once for those that are alike."""
    with locked(run, wait=True):
        metadata = read_metadata(run)
        recorders = metadata.setdefault("recorders", [])
        if recorder not in recorders:
            recorders.append(recorder)
            _write_metadata(run, metadata)


def add_engine(run: Path, url: str, engine: dict[str, Any]) -> None:
    """Note in `run.json`, under `engines`, what an engine says of itself; the last word stands."""
    with locked(run, wait=True):
        metadata = read_metadata(run)
        engines = metadata.setdefault("engines", {})
        if engines.get(url) != engine:
            engines[url] = engine
            _write_metadata(run, metadata)


def _write_metadata(run: Path, metadata: dict[str, Any]) -> None:
    write_atomically(run / RUN_FILE, json.dumps(metadata, indent=2) + "\n")
