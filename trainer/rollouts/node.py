"""The contract of a node, a place where sessions run.

It is this process (`LocalNode` in session.py), an actor of a Ray cluster (`nodes/ray.py`), or a
service (`service/node.py`).
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from rolltap.addons.errors import RecorderError
from rolltap.addons.store.records import Session
from rolltap.trainer.rollouts.queue import Slots
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.traces.facts import Facts

EnteredPhase = Literal["running", "judging"]
"""A phase of a session that needs a slot."""
Enter = Callable[[EnteredPhase], Awaitable[None]]
"""Waits for the slot of a phase, and leaves the slot of the phase before."""


class NodeLostError(RecorderError):
    """A node is gone: its machine, its process, or the way to it."""


@dataclass(slots=True)
class SessionAttempt:
    """An attempt at a session of a group.

    Attributes:
        policy_version: Version of the weights of a session without a sampled token. None stands for
            the version that is published when the session begins.
        why_stopped: The error in the row of a session that is cancelled while it runs.
        queued_seconds: Seconds for which the session waited for this node.
        retried_seconds: Seconds of its earlier attempts, with the pauses and the waiting after
            each.
        row: The session's row. The node sets it before `run` returns or raises. A session that
            ended before it began to run has none.
    """

    session_id: str
    group: Group
    policy_version: str | None = None
    why_stopped: str = "the rollout was stopped while it ran"
    queued_seconds: float = 0.0
    retried_seconds: float = 0.0
    row: Session | None = None


class Node(Protocol):
    """A place where sessions run. A runner calls all methods in its event loop."""

    name: str
    """Unique among the nodes of a runner. It is empty for this process."""
    slots: Slots

    async def run(self, attempt: SessionAttempt, enter: Enter) -> Facts:
        """Run a session until its row is on the disk.

        Awaits `enter("running")` before the session begins to run, and `enter("judging")` before it
        is judged. A cancelled call stops the session, which gets its row if it has begun.

        Raises `RecorderError`, `NodeLostError` above all, `RunError` and `OSError` when the node
        can run no further session.
        """

    def first_version(self, session_id: str) -> str | None:
        """Return the version of the weights of a session's first call; None before it, and in an
        evaluation."""
