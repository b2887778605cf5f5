"""Options of one session, in place of the recorder's.

They are a file in the run folder, which is written before the session's first call.
"""

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Self

from rolltap.addons.options import RecordedFrom
from rolltap.addons.store.staging import write_atomically


class SessionOptions(NamedTuple):
    """Options of a session, all optional.

    Attributes:
        sampling: Sampling parameters in place of those of `rolltap_sampling`, key by key.
        rerun: The recorded session whose calls answer its requests, in place of `rolltap_rerun`.
    """

    sampling: Mapping[str, Any] = {}
    rerun: RecordedFrom | None = None

    def write(self, run: Path, session_id: str) -> None:
        """Give them to a session of a run; without any, nothing is written. Raises `OSError`."""
        given: dict[str, Any] = {}
        if self.sampling:
            given["sampling"] = dict(self.sampling)
        if self.rerun is not None:
            given["rerun"] = self.rerun.as_json()
        if given:
            path = _file(run, session_id)
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, json.dumps(given))

    @classmethod
    def read(cls, run: Path, session_id: str) -> Self:
        """Return those of a session. Raises `OSError`, and `ValueError` for a damaged file."""
        path = _file(run, session_id)
        try:
            given = json.loads(path.read_text())
            rerun = given.get("rerun")
            return cls(given.get("sampling", {}), rerun and RecordedFrom.of(rerun))
        except FileNotFoundError:
            return cls()
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} has no options of a session: {error!r}") from error


def _file(run: Path, session_id: str) -> Path:
    name = blake2b(session_id.encode(), digest_size=16).hexdigest()
    return run / "given" / f"{name}.json"
