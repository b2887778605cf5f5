"""The published policy: `policy.json` in the run folder, written by the trainer and read for each engine request."""

import json
from dataclasses import dataclass
from pathlib import Path

POLICY_FILE = "policy.json"


@dataclass(frozen=True, slots=True)
class Policy:
    """Published weights. `model` is the LoRA adapter's name in the engine, or None for the base model."""

    version: str
    model: str | None = None


class PolicyFile:
    """Reader of a run's `policy.json`. The file is replaced atomically, and parsed again when its modification time or
    inode changes."""

    def __init__(self, run: Path) -> None:
        self._path = run / POLICY_FILE
        self._seen: tuple[int, int] | None = None
        self._policy = Policy("default")

    def read(self) -> Policy:
        """Return the current policy, or the version `default` (the engine's own weights) before the first publication.

        Raises `OSError`, and `ValueError` or `KeyError` for a malformed file.
        """
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return self._policy
        seen = (stat.st_mtime_ns, stat.st_ino)
        if seen != self._seen:
            data = json.loads(self._path.read_text())
            self._policy = Policy(str(data["version"]), data.get("model"))
            self._seen = seen
        return self._policy
