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
from rolltap.trainer.judges.folders import MAX_PATH, Entry, Refusal, opened, read_chunks
from rolltap.trainer.tasks.content import Start

SUFFIX = ".changes.json.gz"
MAX_BYTES = 32 << 20
"""Bytes of an archive before it is compressed. A file takes 4/3 of its size."""
_REFUSALS = {reason for kinds in get_args(Refusal) for reason in get_args(kinds)}


def keep_changes(changes: Changes, start: Start, workspace: Path, path: Path) -> None:
    """Write the changes in a workspace to `path`: JSON, compressed. The same changes make the same
    bytes.

    `changed` is path -> kind, whether it is executable, and the content of a file in base64 or the
    target of a link. Over `MAX_BYTES` it is None. Raises `OSError`.
    """
    text = b"null"
    if sum(entry.size for entry in changes.changed.values()) < MAX_BYTES:
        changed = {name: _packed(workspace, name, entry) for name, entry in changes.changed.items()}
        kept = {
            "start": start.digest,
            "changed": changed,
            "deleted": changes.deleted,
            "refused": {**changes.refused},
        }
        text = json.dumps(kept, sort_keys=True).encode()
    path.write_bytes(gzip.compress(text if len(text) < MAX_BYTES else b"null", 6, mtime=0))


def _packed(workspace: Path, path: str, entry: Entry) -> tuple[str, bool, str]:
    if entry.kind != "file":
        return entry.kind, False, entry.target
    parent, _, name = path.rpartition("/")
    with opened(workspace, parent) as folder:
        return entry.kind, entry.executable, b64encode(b"".join(read_chunks(folder, name))).decode()


def restore_changes(path: Path, start: Start, workspace: Path) -> Mapping[str, Refusal]:
    """Make the changes of the archive `path` in a copy of the start, and return what was refused
    besides.

    Raises `InputError` without an archive of the start, or with a damaged one, and `OSError`.
    """
    try:
        with gzip.open(path) as packed:
            kept = json.loads(packed.read(MAX_BYTES))
        if kept is None:
            raise InputError(
                f"the agent's changes were not kept: they take more than {MAX_BYTES >> 20} MiB"
            )
        for name in (*kept["changed"], *kept["deleted"]):
            if {"", ".", ".."} & {*name.split("/")} or len(name) > MAX_PATH:
                raise InputError(f"{path} has {name[:300]!r}, which is no path of a workspace")
        changed, contents = dict[str, Entry](), dict[str, bytes]()
        for name, (kind, executable, value) in kept["changed"].items():
            contents[name] = content = b64decode(value, validate=True) if kind == "file" else b""
            digest, target = hashlib.sha256(content).hexdigest(), value if kind == "link" else ""
            changed[name] = Entry(kind, executable, len(content), digest, target)
        if kept["start"] != start.digest:
            raise InputError(
                "its task starts with other files than the session, which the agent's changes do"
                " not fit"
            )
        changes = Changes(changed, tuple(kept["deleted"]))
        refused = {name: why for name, why in kept["refused"].items() if why in _REFUSALS}
    except FileNotFoundError as error:
        raise InputError(f"the agent's changes were not kept: there is no {path}") from error
    except InputError:
        raise
    except Exception as error:  # whatever somebody wrote there
        raise InputError(f"{path} is damaged, or no archive of changes: {error!r}") from error
    apply_changes(changes, contents, workspace)
    return refused
