"""Which weights are the policy now: `policy.json` in the run folder, written by the publisher, read for every call."""

import json
from dataclasses import dataclass
from pathlib import Path

POLICY_FILE = "policy.json"


@dataclass(frozen=True, slots=True)
class Policy:
    """The published weights. `model` is the LoRA adapter's name in the engine, or None for the base model."""

    version: str
    model: str | None = None


class PolicyFile:
    """The newest `policy.json` of a run. It is replaced atomically, so a changed time stamp means new contents."""

    def __init__(self, run: Path) -> None:
        self._path = run / POLICY_FILE
        self._seen: tuple[int, int] | None = None
        self._policy = Policy("default")

    def read(self) -> Policy:
        """The current policy; the engine's own weights (`default`) before anything was published."""
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
