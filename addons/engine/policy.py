"""The policy of a run and of a session, and the weights that sampled each token.

The trainer publishes weights in `policy.json` of the run folder. It imports this file, which needs no aiohttp.
"""

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from rolltap.addons.errors import RunError
from rolltap.addons.store.door import parse_object

POLICY_FILE = "policy.json"


@dataclass(frozen=True, slots=True)
class Policy:
    """Published weights. `model` is the LoRA adapter's name in the engine, or None for the base model."""

    version: str
    model: str | None = None


class _Written(BaseModel):
    version: str | int
    model: str | None = None


UNPUBLISHED = Policy("default")
"""The engine's own weights, under vLLM's name for them: what is taken before anything is published."""


class PolicyFile:
    """Reader of a run's `policy.json`. The file is replaced atomically, and parsed again when its modification time or
    inode changes."""

    def __init__(self, run: Path) -> None:
        self._path = run / POLICY_FILE
        self._seen: tuple[int, int] | None = None
        self._policy = UNPUBLISHED

    def read(self) -> Policy:
        """Return the current policy. Raises `OSError`, and `RunError` for a malformed file."""
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return self._policy
        seen = (stat.st_mtime_ns, stat.st_ino)
        if seen != self._seen:
            try:
                written = parse_object(self._path.read_bytes(), _Written)
            except ValueError as error:
                raise RunError(f"{self._path} is not a published policy: {error}") from None
            self._policy = Policy(str(written["version"]), written.get("model"))
            self._seen = seen
        return self._policy


class SessionPolicy:
    """The policy of one session. It keeps the first adapter that `choose` returns, whatever is published later.

    New weights in the middle of a session would cost it its prefix cache in the engine. The base model is not kept: the
    engine has one set of base weights. Without `keep` each request gets the published policy. `last_version` is the
    version that sampled the session's last recorded call, None if there is none: its adapter is kept after a restart.
    """

    def __init__(self, published: PolicyFile, *, keep: bool, last_version: str | None = None) -> None:
        self.published = published
        self._keep = keep
        self._last_version = last_version
        self._kept: Policy | None = None

    def choose(self) -> Policy:
        """Return the policy for the next request to the engine. Raises as `PolicyFile.read`."""
        published = self.published.read()
        if self._keep and self._kept is None:
            self._kept = _adapter_of(self._last_version, published) or (published if published.model else None)
        self._last_version = None
        return self._kept or published

    def lost(self, policy: Policy) -> Policy | None:
        """Forget an adapter that no engine has any more. Return the policy to go on with, or None if it is the same."""
        if self._kept == policy:
            self._kept = None
        successor = self.choose()
        return successor if successor != policy else None


def _adapter_of(version: str | None, published: Policy) -> Policy | None:
    """Return the adapter of a recorded version, or None.

    Its name follows from the published one, `policy-<version>`, of the same training (the text before the first dot).
    """
    if version is None or published.model != f"policy-{published.version}":
        return None
    same_training = version.partition(".")[0] == published.version.partition(".")[0]
    return Policy(version, f"policy-{version}") if same_training else None
