"""The published policy of a run, and the policy of a session.

The trainer publishes weights in `policy.json` of the run folder. It imports this file, which needs
no aiohttp.
"""

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from rolltap.addons.errors import RunError
from rolltap.addons.store.untrusted import parse_object

POLICY_FILE = "policy.json"


@dataclass(frozen=True, slots=True)
class Policy:
    """Published weights. `model` is the adapter's name in the engine, None for the base model."""

    version: str
    model: str | None = None


UNPUBLISHED = Policy("default")
"""The engine's own weights, under vLLM's name for them: taken before anything is published."""


class _Written(BaseModel):
    version: str | int
    model: str | None = None


class PolicyFile:
    """Reader of a run's `policy.json`. The file is replaced atomically, and parsed again when its
    modification time or inode changes."""

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
    """The policy of one session, which keeps the first adapter that `choose` returns.

    New weights in the middle of a session would cost it its prefix cache in the engine. The base
    model is not kept: the engine has one set of base weights. Without `keep` each request gets the
    published policy. `last_version` is the version that sampled the session's last recorded call,
    None if there is none: its adapter is kept after a restart.
    """

    def __init__(
        self,
        published: PolicyFile,
        *,
        keep: bool,
        last_version: str | None = None,
    ) -> None:
        self.published = published
        self._keep = keep
        self._last_version = last_version
        self._kept: Policy | None = None

    def choose(self) -> Policy:
        """Return the policy for the next request to the engine. Raises as `PolicyFile.read`."""
        published = self.published.read()
        if self._kept is not None:
            return self._kept
        if not self._keep:
            return published
        policy = _adapter_of(self._last_version, published)
        self._last_version = None
        if policy.model is not None:
            self._kept = policy
        return policy

    def lost(self, policy: Policy) -> Policy | None:
        """Forget an adapter that no engine has any more. Return the policy to go on with, or None
        if it is the same."""
        if self._kept == policy:
            self._kept = None
        successor = self.choose()
        return successor if successor != policy else None


def _adapter_of(version: str | None, published: Policy) -> Policy:
    """Return the adapter of a recorded version, or `published` if that is not known.

    Its name follows from the published one, `policy-<version>`, of the same training (the text
    before the first dot).
    """
    training, _, _ = published.version.partition(".")
    if version is None or version.partition(".")[0] != training:
        return published
    if published.model != f"policy-{published.version}":
        return published
    return Policy(version, f"policy-{version}")
