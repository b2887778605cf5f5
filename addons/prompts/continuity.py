"""Conversation to prompt token ids: continue a recorded call token for token, or render in full and record why.

`History.match` compares the messages of a request with the recorded conversations of its session. It returns

    Continued   they begin with a call's conversation and reply: the prompt is that call's prompt, its sampled tokens,
                and the tokens of the new messages
    Changed     one of them is a reply, changed or at another place: all messages are rendered
    New         none of them is a reply: all messages are rendered, and the call is a root

Messages are compared in their canonical form (`canonical.py`); no text is tokenised again. Reasoning is not compared,
because some harnesses drop it. Reasoning, and the opaque field issued with it (`call_id`), only decide between calls
that are otherwise equal.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from rolltap.addons.dialects.call import Message, ModelCall
from rolltap.addons.prompts.canonical import (
    canonical,
    describe_difference,
    echoed_reasoning,
    extend_digest,
    fingerprint,
    first_digest,
    issued_forms,
    message_digest,
    opening_digest,
    textless,
)
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.store.records import CallKind

TEXT_DROPPED = "the request shows the parent's reply without the text beside its tool calls"
"""The reason of a continued call."""
_EXCERPT = 400
"""Characters of each recorded message that are kept to show a difference."""


@dataclass(slots=True)
class Turn:
    """A recorded call as later calls continue it.

    Its prompt begins with the first `shared` tokens of the prompt and completion of `base`. Only the tokens after them
    are stored, so that memory grows linearly with a conversation, also when its calls are rendered.
    """

    call_id: str
    base: "Turn | None"
    """The parent of a continued call; of a rendered one, the call with the most messages in common."""
    shared: int
    tail_ids: "array[int]"
    completion_ids: "array[int]"
    reasoning: str = ""
    digest: bytes = b""
    """Digest of the call's conversation and reply."""
    asked: bytes = b""
    """Digest of the call's conversation."""
    speaks: bool = False
    """True when the reply has text beside tool calls."""

    @property
    def length(self) -> int:
        """The number of tokens of the prompt and the completion."""
        return self.shared + len(self.tail_ids) + len(self.completion_ids)

    def prompt_ids(self) -> list[int]:
        """Return the full prompt of the call, in O(length of the prompt + number of turns below it)."""
        return self._ids(self.length - len(self.completion_ids)).tolist()

    def store_after(self, base: "Turn") -> None:
        """Keep of a full prompt only the tokens after those that it has in common with another call."""
        length = min(base.length, len(self.tail_ids))
        ours, theirs = (np.frombuffer(ids, np.int32)[:length] for ids in (self.tail_ids, base._ids(length)))
        different = np.flatnonzero(ours != theirs)
        self.base = base
        self.shared = int(different[0]) if len(different) else length
        self.tail_ids = self.tail_ids[self.shared :]

    def _ids(self, needed: int) -> "array[int]":
        """Return the first `needed` tokens of the prompt and the completion."""
        pieces: list[array[int]] = []
        turn: Turn | None = self
        while turn is not None:
            pieces.append((turn.tail_ids + turn.completion_ids)[: max(0, needed - turn.shared)])
            needed, turn = min(needed, turn.shared), turn.base
        joined = array("i")
        for piece in reversed(pieces):
            joined += piece
        return joined


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a request, or those after a recorded call, and the digests of their prefixes."""

    model_call: ModelCall
    digests: list[bytes]
    """N + 1 digests of N messages: `digests[n]` covers `messages[:n]` and all that is before them."""


@dataclass(frozen=True, slots=True)
class Continued:
    """The messages begin with the conversation and reply of recorded calls, and none after these is a reply."""

    turns: list[Turn]
    """All calls with this conversation and reply."""
    end: int
    """The number of messages of the conversation and reply. Those after them are new."""

    @property
    def sampled_by(self) -> str:
        """A call that sampled the reply."""
        return self.turns[0].call_id

    def turn(self, echo: Message) -> Turn | None:
        """Return the call that issued the echoed reply, None when that is ambiguous. Calls of equal tokens are one."""
        turns = self.turns
        if len(turns) > 1:
            issued = [turn for turn in turns if turn.call_id == echo.get("call_id")]
            turns = issued[:1] or [turn for turn in turns if turn.reasoning == echoed_reasoning(echo)]
        tokens = [(turn.prompt_ids(), turn.completion_ids) for turn in turns] if len(turns) > 1 else []
        return turns[0] if turns and all(each == tokens[0] for each in tokens) else None


@dataclass(frozen=True, slots=True)
class Changed:
    """A message is a recorded reply, changed or at another place."""

    index: int
    """That of the first such message."""
    call_id: str | None
    """The call of the reply; None when that may be one that cannot be read."""
    sampled_by: str | None
    """The call with the longest conversation and reply that the messages begin with, else that of the reply."""
    reason: str


@dataclass(frozen=True, slots=True)
class New:
    """No message is a recorded reply."""

    reason: str
    sampled_by: None = None


class _Followed(NamedTuple):
    """The message that followed a prefix of a conversation."""

    digest: bytes
    """Digest of the prefix and the message."""
    call_id: str
    excerpt: str
    """The first `_EXCERPT` characters of the canonical message."""


class History:
    """The conversations and replies of one session's recorded calls, by their digests. Not thread-safe.

    Holds token ids, digests and excerpts of messages: 4 bytes a token and about 1 KB a message.
    """

    def __init__(self) -> None:
        self.incomplete = False
        """True when calls of the session could not be read back: an assistant message may be the reply of one."""
        self.turns: dict[str, Turn] = {}
        """Call -> its turn."""
        self._ends: dict[bytes, list[Turn]] = {}
        """Digest of a call's conversation and reply -> the calls that have it."""
        self._next: dict[bytes, _Followed] = {}
        """Digest of a prefix -> the newest message that followed it, with the first call that had it."""
        self._replies: dict[bytes, _Followed] = {}
        """Digest of a call's conversation -> its reply."""
        self._textless: dict[bytes, bytes] = {}
        """Digest of a call's conversation and the tool calls of its reply -> the `Turn.digest`; empty for several."""
        self._issued: dict[bytes | str, str] = {}
        """Digest of a reply by itself, the id of each of its tool calls, and its call's id -> the newest such call."""
        self._changed: dict[bytes, str] = {}
        """Digest of a prefix that ends with a changed reply, in a call that was rendered -> the call of the reply."""
        self._newest: tuple[list[bytes], list[bytes]] = ([], [])
        """Cache: a fingerprint of each message of the newest request, and the digests of their prefixes, as far as no
        reply was recorded since that a message may be the echo of."""

    def read(self, model_call: ModelCall) -> Conversation:
        """Return the conversation of a request. Digests of messages that the newest request has too are copied."""
        fingerprints = [fingerprint(message) for message in model_call.messages]
        known, known_digests = self._newest
        digests = [first_digest(model_call)]
        for i, message in enumerate(model_call.messages):
            if i + 1 < len(known_digests) and digests[i] == known_digests[i] and fingerprints[i] == known[i]:
                digests.append(known_digests[i + 1])
            else:
                digests.append(self._extend(digests[i], message, model_call))
        self._newest = fingerprints, digests
        return Conversation(model_call, digests)

    def read_after(self, parent: Turn | None, model_call: ModelCall) -> Conversation:
        """Return the conversation of a recorded request, of which `model_call` has the messages after the parent's."""
        digest = first_digest(model_call) if parent is None else parent.digest
        extend = partial(self._extend, model_call=model_call)
        return Conversation(model_call, list(accumulate(model_call.messages, extend, initial=digest)))

    def match(self, conversation: Conversation) -> Continued | Changed | New:
        """Find the call with the longest conversation and reply that the messages begin with.

        The other messages are new. They may include assistant messages that no call sampled: a program's examples, or
        notifications that it writes as if the model had asked for them. These are context.

        Where a recorded conversation has a reply and the request another assistant message, the program has changed its
        history, and also where a reply stands at another place.
        """
        digests = conversation.digests
        end = next((n for n in range(len(digests) - 1, 0, -1) if digests[n] in self._ends), 0)
        turns = self._ends[digests[end]] if end else []
        known = (n for n in reversed(range(len(digests))) if digests[n] in self._next or digests[n] in self._ends)
        shared = next(known, -1)
        changed = self._changed_reply(conversation, end, shared)
        if changed is not None:
            index, call_id = changed
            sampled_by = turns[0].call_id if turns else call_id
            return Changed(index, call_id, sampled_by, self._why_changed(conversation, shared, index, call_id))
        return Continued(turns, end) if turns else New(self._why_new(conversation, shared))

    def add(self, turn: Turn, conversation: Conversation, reply: Message, kind: CallKind) -> None:
        """Record a completed call. `conversation` has the messages after its parent's conversation and reply."""
        digests, model_call = conversation.digests, conversation.model_call
        found = self.match(conversation) if kind == "rendered" else None
        if isinstance(found, Changed) and found.call_id is not None:
            self._changed.setdefault(digests[found.index + 1], found.call_id)
        if turn.base is None and (base := self._nearest(digests)) is not None:
            turn.store_after(base)
        turn.reasoning = reply.get("reasoning_content") or ""
        turn.asked, turn.digest = digests[-1], extend_digest(digests[-1], reply, model_call)
        turn.speaks = bool(reply["content"].strip() and reply.get("tool_calls"))
        if turn.speaks:
            bare = extend_digest(digests[-1], {**reply, "content": ""}, model_call)
            known = self._textless.setdefault(bare, turn.digest)
            self._textless[bare] = turn.digest if known == turn.digest else b""
        if digests[-1] in (cached := self._newest[1]):
            del cached[cached.index(digests[-1]) + 1 :]
        self._ends.setdefault(turn.digest, []).append(turn)
        self.turns[turn.call_id] = turn
        for i, message in enumerate([*model_call.messages, reply]):
            digest = [*digests, turn.digest][i + 1]
            if digests[i] not in self._next or self._next[digests[i]].digest != digest:
                excerpt = canonical(message, model_call)[:_EXCERPT]
                self._next[digests[i]] = _Followed(digest, turn.call_id, excerpt)
        self._replies[digests[-1]] = self._next[digests[-1]]
        self._issued[turn.call_id] = turn.call_id
        if reply["content"].strip() or reply.get("tool_calls"):
            self._issued[message_digest(reply, model_call)] = turn.call_id
        self._issued |= {tool_call["id"]: turn.call_id for tool_call in reply.get("tool_calls", ())}

    def _extend(self, digest: bytes, message: Message, model_call: ModelCall) -> bytes:
        """Return the digest of a prefix and the message after it; of a changed echo, that with the recorded reply."""
        exact = extend_digest(digest, message, model_call)
        if message["role"] != "assistant" or exact in self._ends or digest not in self._replies:
            return exact
        for form, reasoning in ((message, None), *issued_forms(message)):
            issued = extend_digest(digest, form, model_call)
            for found in (issued, self._textless.get(issued, b"")):
                if any(reasoning in (None, turn.reasoning) for turn in self._ends.get(found, ())):
                    return found
        return exact

    def _nearest(self, digests: list[bytes]) -> Turn | None:
        """Return a call whose conversation has the longest recorded prefix of a conversation, or None."""
        for digest in reversed(digests):
            if turns := self._ends.get(digest):
                return turns[-1]
            if followed := self._next.get(digest):
                return self.turns[followed.call_id]
        return None

    def _changed_reply(self, conversation: Conversation, start: int, shared: int) -> tuple[int, str | None] | None:
        """Return the first message from `start` on that is a reply, changed or at another place, with the reply's call.

        That is an assistant message which a call issued, which was found to be changed before, or which has a reply's
        place. After the `shared` messages of recorded conversations, the newest of these is followed. After a call to
        continue, each place has a reply as long as one is ahead: whoever inserts, drops or moves a message shifts them.
        """
        messages, digests = conversation.model_call.messages, conversation.digests
        places = [i for i in range(start, len(messages)) if messages[i]["role"] == "assistant"]
        if not places:
            return None
        left = max(start, shared)
        ahead = self._replies_ahead(digests[left])
        for i in places:
            at = self._replies.get(digests[i])
            here = [at and at.call_id] if i < left else ahead if start else ahead[i - left :][:1]
            found = self._issuer(messages[i], conversation.model_call) or self._changed.get(digests[i + 1])
            if (call_id := found or next(filter(None, here), None)) is not None:
                return i, call_id
        return (places[0], None) if self.incomplete else None

    def _replies_ahead(self, digest: bytes) -> list[str | None]:
        """Return the calls whose replies the messages are that followed a prefix, None for the other messages."""
        ahead: list[str | None] = []
        while (followed := self._next.get(digest)) is not None:
            ahead.append(self._replies[digest].call_id if digest in self._replies else None)
            digest = followed.digest
        return ahead

    def _issuer(self, message: Message, model_call: ModelCall) -> str | None:
        """Return the newest call whose reply an assistant message is, or of which it has an id; None if it has none.

        The reply may be in any conversation, and the text may have a change that `issued_forms` undoes.
        """
        ids = [message.get("call_id"), *(tool_call["id"] for tool_call in message.get("tool_calls", ()))]
        if (named := next((i for i in ids if i in self._issued), None)) is not None:
            return self._issued[named]
        forms = [message, *(form for form, _ in issued_forms(message))]
        digests = (message_digest(form, model_call) for form in forms)
        return next((self._issued[digest] for digest in digests if digest in self._issued), None)

    def _why_changed(self, conversation: Conversation, shared: int, index: int, call_id: str | None) -> str:
        digests = conversation.digests
        if call_id is None:
            return f"message {index} may be the reply of a call that cannot be read"
        if shared >= 0 and digests[index] in self._replies:
            return self._difference(conversation, index, self._replies[digests[index]])
        if shared >= 0 and (index < shared or digests[shared] not in self._next):
            return f"message {index} is the reply of call {call_id}, changed or at another place"
        return self._why_new(conversation, shared)

    def _why_new(self, conversation: Conversation, shared: int) -> str:
        """Say where a conversation leaves the recorded ones, with which it has `shared` messages in common.

        It is -1 when not even the tools are recorded.
        """
        if shared < 0:
            return "its tools are not those of any earlier call" if self._ends else "no earlier call"
        followed = self._next[conversation.digests[shared]]
        if shared == len(conversation.model_call.messages):
            return f"it ends within the conversation of call {followed.call_id}"
        return self._difference(conversation, shared, followed)

    def _difference(self, conversation: Conversation, index: int, theirs: _Followed) -> str:
        ours = canonical(conversation.model_call.messages[index], conversation.model_call)
        difference = describe_difference(ours, theirs.excerpt)
        return f"message {index} is not that of call {theirs.call_id}: {difference}"


@dataclass(slots=True)
class Prompt:
    """The prompt of a call, and how it was made."""

    model_call: ModelCall = field(repr=False)
    ids: list[int]
    kind: CallKind
    reason: str | None
    """The `Call.kind_reason`."""
    parent: Turn | None
    prefix_length: int
    """The number of leading `ids` that are the parent's prompt and completion."""
    new_messages: list[Message]
    """The messages after the parent's conversation and reply. Without a parent, all messages."""
    sampled_by: str | None = None
    """The parent, else a call whose reply is among the messages; None when there is no such call."""

    opening: bytes = field(init=False, repr=False)
    """The `opening_digest` of the conversation."""

    def __post_init__(self) -> None:
        self.opening = opening_digest(self.model_call)


class Conversations:
    """The history of one session, and the prompts of its calls. Not thread-safe."""

    def __init__(self, rendering: Rendering) -> None:
        self.history = History()
        self._rendering = rendering

    def prompt(self, model_call: ModelCall) -> Prompt:
        """Return the prompt of a new call: see `History.match`.

        A call that could be continued is rendered too when its echo fits several calls, and when the renderer refuses.
        """
        conversation = self.history.read(model_call)
        found = self.history.match(conversation)
        continued = self._continue(conversation, found) if isinstance(found, Continued) else found.reason
        if isinstance(continued, Prompt):
            return continued
        messages = model_call.messages
        ids = self._rendering.render(self._with_reasoning(messages), model_call.tools)
        kind: CallKind = "root" if isinstance(found, New) else "rendered"
        return Prompt(model_call, ids, kind, continued, None, 0, messages, found.sampled_by)

    def sampled_by(self, model_call: ModelCall) -> str | None:
        """Return the `Prompt.sampled_by` of a request, without its prompt."""
        return self.history.match(self.history.read_after(None, model_call)).sampled_by

    def add(self, call_id: str, prompt: Prompt, completion_ids: Sequence[int], reply: Message) -> None:
        """Record a completed call for later calls to continue. `reply` is the message that the harness receives."""
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
        """Record a completed call from what its row has: what is known of calls follows from their rows and the order.

        Echoes in the request are compared with the replies of the calls before it in the order of completion, not with
        those that were complete when it came. `model_call` has the tools that the model saw, the echo rule, and only
        the new messages. Restored once more under another echo rule, a call can be found by the requests of either.
        """
        shared = 0 if parent is None else parent.length
        turn = Turn(call_id, parent, shared, array("i", tail_ids), array("i", completion_ids))
        self.history.add(turn, self.history.read_after(parent, model_call), reply, kind)
        return turn

    def _continue(self, conversation: Conversation, found: Continued) -> Prompt | str:
        """Return the prompt that continues a call, or why none can be continued."""
        model_call, turn = conversation.model_call, found.turn(conversation.model_call.messages[found.end - 1])
        if turn is None:
            return f"{len(found.turns)} earlier calls fit equally well up to message {found.end}"
        new_messages = model_call.messages[found.end :]
        written, completion_ids = self._with_reasoning(new_messages), turn.completion_ids.tolist()
        ids = self._rendering.continued(turn.prompt_ids(), completion_ids, written, model_call.tools)
        if ids is None:
            return self._rendering.refusal or f"the renderer cannot continue call {turn.call_id}"
        reason = TEXT_DROPPED if turn.speaks and textless(model_call.messages[found.end - 1]) else None
        return Prompt(model_call, ids, "bridged", reason, turn, turn.length, new_messages, turn.call_id)

    def _with_reasoning(self, messages: list[Message]) -> list[Message]:
        """Return the messages with recorded reasoning where the harness sent only the opaque field issued with it."""
        written: list[Message] = []
        for message in messages:
            turn = self.history.turns.get(message.get("call_id", ""))
            if turn is not None and turn.reasoning and not message.get("reasoning_content"):
                message = {**message, "reasoning_content": turn.reasoning}
            written.append(message)
        return written
