"""Conversation to prompt token ids: continue a recorded call token for token, or render in full.

`History.match` says which of the two it is, and why.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rolltap.addons.dialects.call import Message, ModelCall
from rolltap.addons.prompts.canonical import opening_digest, textless
from rolltap.addons.prompts.history import History, Match, Turn
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.store.records import CallKind

TEXT_DROPPED = "the request shows the parent's reply without the text beside its tool calls"
"""The reason of a continued call."""


@dataclass(slots=True)
class Prompt:
    """The prompt of a call, and how it was made."""

    model_call: ModelCall = field(repr=False)
    ids: "array[int]"
    kind: CallKind
    reason: str | None
    """The `Call.kind_reason`."""
    parent: Turn | None
    prefix_length: int
    """The number of leading `ids` that are the parent's prompt and completion."""
    new_messages: list[Message]
    """The messages after the parent's conversation and reply. Without a parent, all messages."""
    sampled_by: str | None = None
    """The parent, else a call whose reply is among the messages; None when there is none."""

    @property
    def opening(self) -> bytes:
        """The `opening_digest` of the conversation."""
        if self.parent is not None:
            return self.parent.opening
        return opening_digest(self.model_call)

    def digest(self) -> bytes:
        """Return the digest of the ids, of which only those after the parent's are read."""
        return _hash_after(self.parent, self.ids[self.prefix_length :]).digest()


class Conversations:
    """The history of one session, and the prompts of its calls. Not thread-safe."""

    def __init__(self, rendering: Rendering) -> None:
        self.history = History()
        self._rendering = rendering

    def prompt(self, model_call: ModelCall) -> Prompt:
        """Return the prompt of a new call: see `History.match`.

        A call that could be continued is rendered too when its echo fits several calls, and when
        the renderer refuses.
        """
        match = self.history.match(self.history.read(model_call))
        if match.reason is None:
            continued = self._continue(model_call, match)
            if continued is not None:
                return continued
        messages = model_call.messages
        ids = self._rendering.render(self._with_reasoning(messages), model_call.tools)
        return Prompt(
            model_call,
            array("i", ids),
            match.kind,
            match.reason,
            parent=None,
            prefix_length=0,
            new_messages=messages,
            sampled_by=match.sampled_by,
        )

    def sampled_by(self, model_call: ModelCall) -> str | None:
        """Return the `Prompt.sampled_by` of a request, without its prompt."""
        return self.history.match(self.history.read_after(None, model_call)).sampled_by

    def add(
        self,
        call_id: str,
        prompt: Prompt,
        completion_ids: Sequence[int],
        reply: Message,
    ) -> None:
        """Record a completed call for later calls to continue.

        `reply` is the message that the harness receives.
        """
        new = replace(prompt.model_call, messages=prompt.new_messages)
        tail_ids = prompt.ids[prompt.prefix_length :]
        self.restore(call_id, prompt.parent, tail_ids, completion_ids, new, reply, prompt.kind)

    def restore(
        self,
        call_id: str,
        parent: Turn | None,
        tail_ids: Sequence[int],
        completion_ids: Sequence[int],
        model_call: ModelCall,
        reply: Message,
        kind: CallKind,
    ) -> Turn:
        """Record a completed call from what its row has, in the order of completion.

        All that is known of calls follows from their rows and that order: echoes in the request
        are compared with the replies of the calls before it, not with those that were complete
        when it came. `model_call` has the tools that the model saw, the echo rule, and only the
        new messages. Restored once more under another echo rule, a call can be found by the
        requests of either.
        """
        tail = array("i", tail_ids)
        completion = array("i", completion_ids)
        hashed = _hash_after(parent, tail)
        hashed.update(completion)
        turn = Turn(call_id, parent, 0, tail, completion, hashed)
        if parent is None:
            turn.opening = opening_digest(model_call)
        else:
            turn.opening = parent.opening
            turn.shared = parent.length
        self.history.add(turn, self.history.read_after(parent, model_call), reply, kind)
        return turn

    def _continue(self, model_call: ModelCall, match: Match) -> Prompt | None:
        """Return the prompt that continues a call. Without one, the match gets the reason."""
        end = match.end
        echo = model_call.messages[end - 1]
        new_messages = model_call.messages[end:]
        turn = match.turn(echo)
        if turn is None:
            count = len(match.turns)
            match.reason = f"{count} earlier calls fit equally well up to message {end}"
            return None
        ids = turn.prompt_ids()
        extension = self._rendering.extension(
            ids,
            turn.completion_ids.tolist(),
            self._with_reasoning(new_messages),
            model_call.tools,
        )
        if extension is None:
            match.reason = f"the renderer cannot continue call {turn.call_id}"
            if self._rendering.refusal:
                match.reason = self._rendering.refusal
            return None
        ids += turn.completion_ids
        ids.extend(extension)
        reason = None
        if turn.textless and textless(echo):
            reason = TEXT_DROPPED
        return Prompt(
            model_call,
            ids,
            "bridged",
            reason,
            parent=turn,
            prefix_length=turn.length,
            new_messages=new_messages,
            sampled_by=turn.call_id,
        )

    def _with_reasoning(self, messages: list[Message]) -> list[Message]:
        """Return the messages with the reasoning that a harness left out.

        It is that of the call which issued the opaque field of the message.
        """
        written: list[Message] = []
        for message in messages:
            turn = self.history.turns.get(message.get("call_id", ""))
            if turn is not None and turn.reasoning and not message.get("reasoning_content"):
                message = {**message, "reasoning_content": turn.reasoning}
            written.append(message)
        return written


def ids_digest(ids: Sequence[int]) -> bytes:
    """Return the digest of the ids of a prompt, as `Prompt.digest` does."""
    return _hash_after(None, array("i", ids)).digest()


def _hash_after(parent: Turn | None, ids: "array[int]") -> "hashlib.blake2b":
    """Return the hash of a turn's ids and the ids after them."""
    hashed = hashlib.blake2b(digest_size=16)
    if parent is not None:
        hashed = parent.hashed.copy()
    hashed.update(ids)
    return hashed
