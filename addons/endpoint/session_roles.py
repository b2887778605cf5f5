"""The earlier calls of a session, as far as they tell the role of a new one."""

from collections.abc import Sequence
from dataclasses import dataclass

from rolltap.addons.dialects.types import Message, ModelCall
from rolltap.addons.endpoint.roles import Earlier
from rolltap.addons.prompts.digests import opening_digest
from rolltap.addons.store.records import CallRole


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A sampled tool call whose result no request has given."""

    call_id: str
    opening: bytes


class SessionRoles:
    """The roles of a session's completed calls, and the tool calls without a result.

    An `opening` is a digest of a conversation's tools and leading system messages. Not thread-safe.

    A conversation that begins while a tool call waits is a sub-agent's: the tool call has started it. One with the
    opening of the call that waits longest is not: the program asks again, has shortened its history, or runs once more
    in the same session after a last tool call that it never answers (`submit`, `finish`). A later run with another
    opening, for instance with the time in its system prompt, is taken for a sub-agent then. Both roles are trained.
    """

    def __init__(self) -> None:
        self.tools_seen = False
        """True when an earlier call of the session had tools."""
        self._roles: dict[str, CallRole] = {}
        self._openings: dict[str | None, bytes] = {}
        """Call of a row -> the opening of its conversation."""
        self._waiting: dict[str, _Waiting] = {}
        """Id of a tool call -> the call that sampled it, in the order in which these completed."""

    def ask(self, messages: Sequence[Message], tools: bool, opening: bytes, sampled_by: str | None) -> Earlier:
        """Note a request, and return what earlier calls say about its role.

        `sampled_by` is the call that it continues, or else one whose reply is among its messages.
        """
        self._answer(messages, sampled_by)
        waiting = list(self._waiting.values())
        others = [call for call in waiting if call.opening != opening]
        begins = sampled_by is None and bool(others) and waiting[0].opening != opening
        role = self._roles.get(sampled_by or "")
        earlier = Earlier(tools=self.tools_seen, role=role, waiting=others[-1].call_id if begins else None)
        self.tools_seen |= tools
        return earlier

    def complete(self, call_id: str, role: CallRole, opening: bytes, reply: Message) -> None:
        """Note the reply of a completed call."""
        self._roles[call_id] = role
        if role == "compaction":
            self._waiting.clear()  # the results are part of the summary
        for tool_call in reply.get("tool_calls", ()):
            self._waiting[tool_call["id"]] = _Waiting(call_id, opening)

    def restore(
        self, call_id: str, parent_id: str | None, role: CallRole, model_call: ModelCall, reply: Message
    ) -> None:
        """Note a completed call from its row. The parent comes first. `model_call` has the messages after the parent's.

        A call whose prompt was rendered is noted as one that continues no other. A call that is known stays as it is.
        """
        if call_id in self._roles:
            return
        opening = self._openings[call_id] = self._openings.get(parent_id) or opening_digest(model_call)
        self.ask(model_call.messages, bool(model_call.tools), opening, parent_id)
        self.complete(call_id, role, opening, reply)

    def _answer(self, messages: Sequence[Message], sampled_by: str | None) -> None:
        """Forget the tool calls that a request answers or goes on without, and those that began meanwhile."""
        answered = {message["tool_call_id"] for message in messages if message["role"] == "tool"}
        ids = list(self._waiting)
        first = next(
            (i for i, w in enumerate(ids) if w in answered or self._waiting[w].call_id == sampled_by), len(ids)
        )
        for over in ids[first:]:
            del self._waiting[over]
