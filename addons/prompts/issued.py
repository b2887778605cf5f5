"""The replies of a session by themselves: which call an assistant message is from, in whatever conversation."""

from rolltap.addons.dialects.types import Message, ModelCall
from rolltap.addons.prompts.digests import message_digest
from rolltap.addons.prompts.echoes import issued_forms


class Issued:
    """Finds the call that sampled an assistant message. Not thread-safe."""

    def __init__(self) -> None:
        self._calls: dict[bytes | str, str] = {}
        """Digest of a reply by itself, the id of each of its tool calls, and its call's id -> the call."""

    def add(self, call_id: str, reply: Message, model_call: ModelCall) -> None:
        """Note the reply of a call. An empty one is found by the call's id only."""
        self._calls[call_id] = call_id
        if reply["content"].strip() or reply.get("tool_calls"):
            self._calls[message_digest(reply, model_call)] = call_id
        self._calls |= {tool_call["id"]: call_id for tool_call in reply.get("tool_calls", ())}

    def call(self, message: Message, model_call: ModelCall) -> str | None:
        """Return the call whose reply an assistant message is, or of which it has an id; None for a message of others.

        The text may have a change of `echoes.py`. Its reasoning is not compared. Of equal replies the newest counts.
        """
        ids = [message.get("call_id"), *(tool_call["id"] for tool_call in message.get("tool_calls", ()))]
        if (named := next((i for i in ids if i in self._calls), None)) is not None:
            return self._calls[named]
        forms = [message, *(form for form, _ in issued_forms(message))]
        digests = (message_digest(form, model_call) for form in forms)
        return next((self._calls[digest] for digest in digests if digest in self._calls), None)
