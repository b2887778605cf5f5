"""Options of one session, in place of the recorder's.

They are a file in the run folder, which is written before the session's first call.
"""

from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel

from rolltap.addons.errors import RunError
from rolltap.addons.options import RecordedFrom
from rolltap.addons.store.staging import write_atomically


class SessionOptions(BaseModel):
    """Options of a session, all optional.

    Attributes:
        sampling: Sampling parameters in place of those of `rolltap_sampling`, key by key.
        rerun: The recorded session whose calls answer its requests, in place of `rolltap_rerun`.
        allow: Patterns of the hosts that it may reach, in place of those of `rolltap_allow`.
        model_calls: False for the programs of a judge, which have credentials of their own: no
            request of theirs is a model call of the policy.
    """

    sampling: dict[str, Any] = {}
    rerun: RecordedFrom | None = None
    allow: tuple[str, ...] | None = None
    model_calls: bool = True

    def write(self, run: Path, session_id: str) -> None:
        """Give them to a session of a run; without any, nothing is written. Raises `OSError`."""
        if self != SessionOptions():
            path = _file(run, session_id)
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, self.model_dump_json())

    @staticmethod
    def remove(run: Path, session_id: str) -> None:
        """Forget those of a session that has ended. Raises `OSError`."""
        _file(run, session_id).unlink(missing_ok=True)

    @classmethod
    def read(cls, run: Path, session_id: str) -> Self:
        """Return those of a session. Raises `OSError`, and `RunError` for a damaged file."""
        path = _file(run, session_id)
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return cls()
        except ValueError as error:
            raise RunError(f"the options of a session in {path} are damaged") from error


def _file(run: Path, session_id: str) -> Path:
    name = blake2b(session_id.encode(), digest_size=16).hexdigest()
    return run / "given" / f"{name}.json"
