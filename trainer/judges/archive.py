"""The archive of an agent's changes: written when a session is judged, so that another judge can
judge it later.

An agent chose what is in it, and anybody may have written it: it is read within a limit, its paths
are checked, and `apply_changes` writes below the workspace, through no link. The result is to be
compared with the start again.
"""

import gzip
import hashlib
import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from rolltap.addons.errors import InputError
from rolltap.trainer.judges.changes import Changes, apply_changes
from rolltap.trainer.judges.folders import MAX_PATH, Entry, Refusal, read_chunks
from rolltap.trainer.tasks.content import Start

SUFFIX = ".changes.json.gz"
MAX_BYTES = 32 << 20
"""Bytes of an archive before it is compressed. A file takes 4/3 of its size."""
_REFUSALS = {reason for kinds in get_args(Refusal) for reason in get_args(kinds)}


def keep_changes(
    changes: Changes,
    start: Start,
    workspace: Path,
    path: Path,
) -> None:
    """Write the changes in a workspace to `path`: JSON, compressed. The same changes make the same
    bytes.

    `changed` is path -> kind, whether it is executable, and the content of a file in base64 or the
    target of a link. Over `MAX_BYTES` the JSON is null. Raises `OSError`.
    """
    text = b"null"
    if sum(entry.size for entry in changes.changed.values()) < MAX_BYTES:
        changed: dict[str, tuple[str, bool, str]] = {}
        for name, entry in changes.changed.items():
            value = entry.target
            if entry.kind == "file":
                value = b64encode(b"".join(read_chunks(workspace, name))).decode()
            changed[name] = (entry.kind, entry.executable, value)
        kept = {
            "start": start.digest,
            "changed": changed,
            "deleted": changes.deleted,
            "refused": {**changes.refused},
        }
        text = json.dumps(kept, sort_keys=True).encode()
    if len(text) >= MAX_BYTES:
        text = b"null"
    path.write_bytes(gzip.compress(text, 6, mtime=0))


def restore_changes(path: Path, start: Start, workspace: Path) -> Mapping[str, Refusal]:
    """Make the changes of the archive `path` in a copy of the start, and return what was refused
    besides.

    Raises `InputError` without an archive of the start, or with a damaged one, and `OSError`.
    """
    changed: dict[str, Entry] = {}
    contents: dict[str, bytes] = {}
    refused: dict[str, Refusal] = {}
    try:
        with gzip.open(path) as packed:
            kept = json.loads(packed.read(MAX_BYTES))
        if kept is None:
            large = f"they take more than {MAX_BYTES >> 20} MiB"
            raise InputError(f"the agent's changes were not kept: {large}")
        deleted = tuple(kept["deleted"])
        for name in (*kept["changed"], *deleted):
            if not {"", ".", ".."}.isdisjoint(name.split("/")) or len(name) > MAX_PATH:
                raise InputError(f"{path} has {name[:300]!r}, which is no path of a workspace")
        for name, (kind, executable, value) in kept["changed"].items():
            target = value if kind == "link" else ""
            content = b64decode(value, validate=True) if kind == "file" else b""
            digest = hashlib.sha256(content).hexdigest()
            contents[name] = content
            changed[name] = Entry(
                kind,
                executable,
                len(content),
                digest,
                target,
            )
        for name, why in kept["refused"].items():
            if why in _REFUSALS:
                refused[name] = why
        if kept["start"] != start.digest:
            fault = "its task starts with other files than the session"
            raise InputError(f"{fault}, and the agent's changes do not fit them")
    except FileNotFoundError as error:
        raise InputError(f"the agent's changes were not kept: there is no {path}") from error
    except InputError:
        raise
    except Exception as error:  # whatever somebody wrote there
        raise InputError(f"{path} is damaged, or no archive of changes: {error!r}") from error
    apply_changes(Changes(changed, deleted), contents, workspace)
    return refused
