"""A session's row as others may read it: without the paths of the machine that recorded it."""

import json
import re
from typing import Any

from rolltap.addons.store.records import Session

_PATH = re.compile(r"(?<![\w.:/~-])(?:file://)?~?/(?:[^\s'\"/:,;()\[\]<>|]+/)+([^\s'\"/:,;()\[\]<>|]*)")
"""An absolute path of at least two parts, or one in a home folder; not the path of a URL."""
_JSON = ("parts", "evidence", "suspicions")


def public_session(session: Session) -> dict[str, Any]:
    """Return the row, with the absolute paths in its error and its evidence cut to their last part."""
    row = session.to_row()
    evidence = json.dumps(json.loads(row["evidence"]), ensure_ascii=False)
    return row | {"error": row["error"] and without_paths(row["error"]), "evidence": without_paths(evidence)}


def parsed_public_session(session: Session) -> dict[str, Any]:
    """Return the row as `public_session`, the columns that hold JSON parsed."""
    row = public_session(session)
    return row | {name: json.loads(row[name]) for name in _JSON}


def without_paths(text: str) -> str:
    """Cut absolute paths in a text to their last part: `/home/me/runs/a.log` becomes `…/a.log`."""
    return _PATH.sub(r"…/\1", text)
