"""Recovery: rebuilds a session's state from the rows of its run, after a restart or when it was forgotten.

How a session uses it, in a worker thread:

    recovered = recovery.recover(session_id)      # at the session's first call in this process, or after it was dropped
    if recovered.ended: ...                       # refuse with 410
    recovered.index(dialect.NAME, model_call)     # before each `recovered.conversations.prompt(model_call)`
    prompt = recovered.conversations.prompt(model_call)
    find_retried([*recovered.finished, ...], request_digest(...), headers)
"""

from dataclasses import dataclass

from rolltap.addons.dialects.types import ModelCall
from rolltap.addons.endpoint.retries import FinishedCall
from rolltap.addons.prompts.continuity import Conversations
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.store.tables import RunWriter


class Recovery:
    """Rebuilds sessions from the run that `writer` appends to. One for each recorder process. Thread-safe.

    The first `recover` reads the session ids of the whole run. Later ones read only what other writers have committed
    since, and the rows of this process only for a session that it has recovered before. Call it in a worker thread.
    """

    def __init__(self, writer: RunWriter, rendering: Rendering) -> None: ...

    def recover(self, session_id: str) -> "RecoveredSession":
        """Return the state of a session as its rows have it; empty for a session without rows.

        Damaged rows, and calls whose ancestors are missing or damaged, are left out with a warning: a later call is
        rendered instead of continuing them. Raises `OSError` when the run cannot be read.
        """
        raise NotImplementedError


@dataclass(slots=True)
class RecoveredSession:
    """A session's state. Not thread-safe: one worker at a time.

    A session may be dropped whenever it has no running generation: `recover` brings it back.
    """

    conversations: Conversations
    finished: list[FinishedCall]
    """The newest completed calls, oldest first: what `find_retried` searches, before the running generations."""
    tools_seen: bool
    """True when an earlier call of the session had tools."""
    ended: bool
    """True when the session has ended: an event `ended`, or a row in `sessions`."""

    def index(self, dialect: str, model_call: ModelCall) -> None:
        """Make the recovered calls findable for a request. Does nothing for the second request of the same program.

        The rule with which a harness's echoes are compared (`ModelCall.echo_rule`) is not recorded. The calls of the
        request's API are taken to have its rule, those of other APIs none.
        """
        raise NotImplementedError
