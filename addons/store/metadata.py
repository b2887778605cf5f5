"""`run.json`: the schema version, tokenizer, recorders and engines of a run."""

import hashlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rolltap.addons.errors import RunError
from rolltap.addons.store.records import SCHEMA_VERSION
from rolltap.addons.store.staging import locked, write_atomically
from rolltap.addons.store.untrusted import parse_object, read_file

RUN_FILE = "run.json"


class _Recorder(BaseModel):
    engines: list[str] = []
    limits: dict[str, Any] = {}
    images: Any = None


class _Metadata(BaseModel):
    """Fields of `run.json`, as far as they are read."""

    run_id: str | None = None
    """Drawn when a run begins; its parts, made by split and filter, have it too."""
    model: str | None = None
    source: str | None = None
    tokenizer_sha256: str | None = None
    chat_template_sha256: str | None = None
    engines: dict[str, dict[str, Any]] = {}
    recorders: list[_Recorder] = []
    merged_from: list[dict[str, Any]] = []
    left_behind: list[dict[str, Any]] = []


def tokenizer_digests(vocabulary: Mapping[str, int], chat_template: object) -> dict[str, str]:
    """Return the entries of `run.json` that say which tokenizer and chat template a model has.

    `vocabulary` is token -> id, as `get_vocab` of a Transformers tokenizer returns it.
    """
    return {
        "tokenizer_sha256": _sha256(json.dumps(vocabulary, sort_keys=True)),
        "chat_template_sha256": _sha256(str(chat_template)),
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_metadata(run: Path) -> dict[str, Any]:
    """Return the contents of `run.json`.

    Raises `RunError` when the file is missing, is damaged, or has another schema version.
    """
    path = run / RUN_FILE
    try:
        metadata = parse_object(read_file(run, RUN_FILE), _Metadata)
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{run} is not a run folder: it has no {RUN_FILE}") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    version = metadata.get("schema_version")
    if not isinstance(version, int):
        raise RunError(f"{path} has no schema_version, or one that is not an integer")
    if version != SCHEMA_VERSION:
        other = "a newer" if version > SCHEMA_VERSION else "an older"
        versions = f"{run} has schema {version}, this rolltap reads {SCHEMA_VERSION}"
        raise RunError(f"{versions}: read it with {other} rolltap")
    return metadata


def write_metadata(run: Path, metadata: dict[str, Any]) -> None:
    """Create the run folder and its `run.json`, or check that it has the same tokenizer.

    All token ids of a run belong to one tokenizer. Raises `RunError` when `run.json` has another
    tokenizer or chat template, and `OSError`.
    """
    run.mkdir(parents=True, exist_ok=True)
    with locked(run, wait=True):
        if not (run / RUN_FILE).exists():
            run_id = secrets.token_hex(4)
            _write(run, {"schema_version": SCHEMA_VERSION, "run_id": run_id, **metadata})
            return
    require_tokenizer(run, metadata, "choose a new folder")


def require_tokenizer(run: Path, metadata: Mapping[str, Any], advice: str) -> dict[str, Any]:
    """Return the contents of `run.json`.

    Raises `RunError`, with advice, if its tokenizer or chat template is not that of `metadata`.
    """
    known = read_metadata(run)
    for key in ("tokenizer_sha256", "chat_template_sha256"):
        if known.get(key) != metadata.get(key):
            what = key.removesuffix("_sha256")
            raise RunError(f"{run} was recorded with another {what}: {advice}")
    return known


def add_recorder(run: Path, recorder: dict[str, Any]) -> None:
    """Append `recorder` to the list `recorders` of `run.json`, unless it has an equal entry.

    Raises `RunError` and `OSError`.
    """
    with locked(run, wait=True):
        metadata = read_metadata(run)
        recorders = metadata.setdefault("recorders", [])
        if recorder not in recorders:
            recorders.append(recorder)
            _write(run, metadata)


def add_engine(run: Path, url: str, engine: dict[str, Any]) -> None:
    """Set `engines[url]` of `run.json` to a description. Raises `RunError` and `OSError`."""
    with locked(run, wait=True):
        metadata = read_metadata(run)
        engines = metadata.setdefault("engines", {})
        if engines.get(url) != engine:
            engines[url] = engine
            _write(run, metadata)


def _write(run: Path, metadata: dict[str, Any]) -> None:
    write_atomically(run / RUN_FILE, json.dumps(metadata, indent=2) + "\n")
