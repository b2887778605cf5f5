"""Conversation to prompt token ids: continue a recorded call token for token, or render in full and record why.

A recorded call is found by comparing canonical messages (`canonical.py`). Its text is not tokenised again. Reasoning is
not compared, because some harnesses drop it. Reasoning, and the opaque field issued with it (`call_id`), only decide
between calls that are otherwise equal.

The replies of a session by themselves: which call an assistant message is from, in whatever conversation.

A recorded call as later calls continue it.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from rolltap.addons.dialects.model_call import Message, ModelCall
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
)
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.store.records import CallKind


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


@dataclass(slots=True)
class Turn:
    """A recorded call of a conversation.

    Its prompt begins with the first `shared` tokens of the prompt and completion of `base`. Only the tokens after them
    are stored, so that memory grows linearly with a conversation, also when its calls are rendered.
    """

    call_id: str
    base: "Turn | None"
    """The parent of a bridged call; for a rendered one, the call whose conversation has the most messages in common."""
    shared: int
    tail_ids: "array[int]"
    completion_ids: "array[int]"
    reasoning: str
    digest: bytes
    """Digest of the call's conversation and reply."""

    @property
    def length(self) -> int:
        """The number of tokens of the prompt and the completion."""
        return self.shared + len(self.tail_ids) + len(self.completion_ids)

    def prompt_ids(self) -> list[int]:
        """Return the full prompt of the call, in O(length of the prompt + number of turns below it)."""
        return self._ids(self.length - len(self.completion_ids)).tolist()

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

    def common_length(self, prompt_ids: "array[int]") -> int:
        """Return how many leading tokens the prompt and completion have in common with another prompt."""
        length = min(self.length, len(prompt_ids))
        ours, theirs = (np.frombuffer(ids, np.int32)[:length] for ids in (self._ids(length), prompt_ids))
        return int(different[0]) if len(different := np.flatnonzero(ours != theirs)) else length


def pick_turn(turns: list[Turn], echoed: Message) -> Turn | None:
    """Return the turn that issued the echoed reply, or None when that is ambiguous.

    `turns` have the same canonical conversation and reply. Turns with equal token ids count as the same turn.
    """
    if len(turns) > 1 and (issued := [turn for turn in turns if turn.call_id == echoed.get("call_id")]):
        return issued[0]
    if len(turns) > 1:
        turns = [turn for turn in turns if turn.reasoning == echoed_reasoning(echoed)]
    if not turns:
        return None
    first = turns[0]
    if any(t.completion_ids != first.completion_ids or t.prompt_ids() != first.prompt_ids() for t in turns[1:]):
        return None
    return first


_EXCERPT = 400
"""Characters of each recorded message that are kept to show a difference."""


@dataclass(slots=True)
class Prompt:
    """The prompt of a call, and how it was made."""

    model_call: ModelCall = field(repr=False)
    ids: list[int]
    kind: CallKind
    reason: str | None
    """Why the call is not `bridged`; None when it is."""
    parent: Turn | None
    prefix_length: int
    """The number of leading `ids` that are the parent's prompt and completion."""
    new_messages: list[Message]
    """The messages after the parent's conversation and reply. Without a parent, all messages."""
    sampled_by: str | None = None
    """The parent, else a call whose reply is among the messages; None when there is no such call."""
    digests: list[bytes] = field(repr=False, default_factory=list)
    """The digest of each prefix of the conversation: `digests[n]` covers `messages[:n]`."""

    opening: bytes = field(init=False, repr=False)
    """The `opening_digest` of the conversation."""

    def __post_init__(self) -> None:
        self.opening = opening_digest(self.model_call)


class _Followed(NamedTuple):
    """The message that followed a prefix of a conversation."""

    digest: bytes
    """Digest of the prefix and the message."""
    call_id: str
    excerpt: str
    """The first `_EXCERPT` characters of the canonical message."""


class _Changed(NamedTuple):
    """An assistant message, at an index, that is a recorded reply, changed or at another place."""

    place: int
    call_id: str | None
    """The call of the reply; None when that may be one that cannot be read."""


class Conversations:
    """The recorded calls of one session, indexed by the digest of each call's conversation and reply.

    Holds token ids, digests and excerpts of messages: 4 bytes a token and about 1 KB a message. Not thread-safe.
    """

    def __init__(self, rendering: Rendering) -> None:
        self.incomplete = False
        """True when calls of the session could not be read back: an assistant message may be the reply of one."""
        self._rendering = rendering
        self._turns: dict[bytes, list[Turn]] = {}
        self._by_call: dict[str, Turn] = {}
        self._next: dict[bytes, _Followed] = {}
        """Digest of a prefix -> the newest message that followed it, with the first call that had it."""
        self._replies: dict[bytes, _Followed] = {}
        """Digest of a call's conversation -> its reply."""
        self._issued = Issued()
        self._changed: dict[bytes, str] = {}
        """Digest of a prefix that ends with a `_Changed` message of a rendered call -> the call of the reply."""
        self._newest: tuple[list[bytes], list[bytes]] = ([], [])
        """Cache: a fingerprint of each message of the newest request, and the digests of their prefixes."""

    def prompt(self, model_call: ModelCall) -> Prompt:
        """Return the prompt of a new call.

        It bridges the call with the longest conversation and reply that the messages begin with. The other messages
        are new. They may include assistant messages that no call sampled: a program's examples, or notifications that
        it writes as if the model had asked for them. These are context.

        Where a recorded conversation has a reply and the request another assistant message, the program has changed
        its history: all messages are rendered then, as are those with a reply at another place (`_changed_reply`). So
        they are without a call to continue, unless none of them is a reply, which makes the call a root.
        """
        messages, tools, digests = model_call.messages, model_call.tools, self._prefix_digests(model_call)
        end, changed = self._place(model_call, digests)
        turns = self._turns[digests[end]] if end else []
        sampled_by = turns[0].call_id if turns else changed and changed.call_id
        if turns and changed is None:
            turn = pick_turn(turns, messages[end - 1])
            if turn is not None:
                completion_ids, new_messages = turn.completion_ids.tolist(), messages[end:]
                written = [self._with_reasoning(message) for message in new_messages]
                ids = self._rendering.bridge(turn.prompt_ids(), completion_ids, written, tools)
                if ids is not None:
                    how = turn, turn.length, new_messages, turn.call_id, digests
                    return Prompt(model_call, ids, "bridged", None, *how)
                reason = self._rendering.refusal or f"the renderer cannot continue call {turn.call_id}"
            else:
                reason = f"{len(turns)} earlier calls fit equally well up to message {end}"
        else:
            reason = self._difference(model_call, digests, changed)
        ids = self._rendering.render([self._with_reasoning(message) for message in messages], tools)
        kind: CallKind = "root" if sampled_by is None and changed is None else "rendered"
        return Prompt(model_call, ids, kind, reason, None, 0, messages, sampled_by, digests)

    def sampled_by(self, model_call: ModelCall) -> str | None:
        """Return the `Prompt.sampled_by` of a request, without its prompt."""
        digests = self._extend_all(first_digest(model_call), model_call)
        end, changed = self._place(model_call, digests)
        return self._turns[digests[end]][0].call_id if end else changed and changed.call_id

    def add(self, call_id: str, prompt: Prompt, completion_ids: Sequence[int], reply: Message) -> None:
        """Record a completed call for later calls to continue. `reply` is the message that the harness receives."""
        digests = prompt.digests[len(prompt.digests) - 1 - len(prompt.new_messages) :]
        tail_ids = array("i", prompt.ids[prompt.prefix_length :])
        how = digests, prompt.new_messages, reply, prompt.model_call, prompt.kind
        self._add(call_id, prompt.parent, tail_ids, completion_ids, *how)

    def restore(
        self,
        call_id: str,
        parent_id: str | None,
        tail_ids: Sequence[int],
        completion_ids: Sequence[int],
        model_call: ModelCall,
        reply: Message,
        kind: CallKind,
    ) -> Turn:
        """Record a call as `add` did, from its row. The parent comes first.

        `model_call` has the tools that the model saw, the echo rule, and only the new messages. Restored once more
        under another echo rule, a call can be found by the requests of either.

        Echoes are compared with the replies of the calls that are restored before it. Live, they were compared with
        those that were complete when its request came: where parallel calls have replies that differ by a change of
        `echoes.py` only, later calls may find another one of these, or none.
        """
        parent = None if parent_id is None else self._by_call[parent_id]
        digests = self._extend_all(first_digest(model_call) if parent is None else parent.digest, model_call)
        how = digests, model_call.messages, reply, model_call, kind
        return self._add(call_id, parent, array("i", tail_ids), completion_ids, *how)

    def _add(
        self,
        call_id: str,
        parent: Turn | None,
        tail_ids: "array[int]",
        completion_ids: Sequence[int],
        digests: list[bytes],
        new_messages: list[Message],
        reply: Message,
        model_call: ModelCall,
        kind: CallKind,
    ) -> Turn:
        """Record a call. `digests` are those of the prefixes that the new messages and the reply follow."""
        changed = self._place(model_call, digests)[1] if kind == "rendered" else None
        if changed is not None and changed.call_id is not None:
            self._changed.setdefault(digests[changed.place + 1], changed.call_id)
        base, shared = parent, parent.length if parent is not None else 0
        if base is None and (base := self._nearest(digests)) is not None:
            shared = base.common_length(tail_ids)
            tail_ids = tail_ids[shared:]
        conversation = digests[-1]
        digests = [*digests, extend_digest(conversation, reply, model_call)]
        reasoning = reply.get("reasoning_content") or ""
        turn = Turn(call_id, base, shared, tail_ids, array("i", completion_ids), reasoning, digests[-1])
        self._turns.setdefault(turn.digest, []).append(turn)
        self._by_call[call_id] = turn
        for i, message in enumerate([*new_messages, reply]):
            followed = self._next.get(digests[i])
            if followed is None or followed.digest != digests[i + 1]:
                excerpt = canonical(message, model_call)[:_EXCERPT]
                self._next[digests[i]] = _Followed(digests[i + 1], call_id, excerpt)
        self._replies[conversation] = self._next[conversation]
        self._issued.add(call_id, reply, model_call)
        return turn

    def _nearest(self, digests: list[bytes]) -> Turn | None:
        """Return a call whose conversation has the longest recorded prefix of a conversation, or None."""
        for digest in reversed(digests):
            if turns := self._turns.get(digest):
                return turns[-1]
            if followed := self._next.get(digest):
                return self._by_call[followed.call_id]
        return None

    def _with_reasoning(self, message: Message) -> Message:
        """Return the message with its recorded reasoning when the harness sent only the opaque field issued with it."""
        turn = self._by_call.get(message.get("call_id", ""))
        if turn is None or not turn.reasoning or message.get("reasoning_content"):
            return message
        return {**message, "reasoning_content": turn.reasoning}

    def _prefix_digests(self, model_call: ModelCall) -> list[bytes]:
        """Return the N + 1 digests of the prefixes of N messages. Those that the newest request has too are copied."""
        fingerprints = [fingerprint(message) for message in model_call.messages]
        known, known_digests = self._newest
        digests = [first_digest(model_call)]
        for i, message in enumerate(model_call.messages):
            if i < len(known) and digests[i] == known_digests[i] and fingerprints[i] == known[i]:
                digests.append(known_digests[i + 1])
            else:
                digests.append(self._extend(digests[i], message, model_call))
        self._newest = fingerprints, digests
        return digests

    def _extend_all(self, digest: bytes, model_call: ModelCall) -> list[bytes]:
        """Return the N + 1 digests of a prefix and of those that N messages make of it."""
        extend = partial(self._extend, model_call=model_call)
        return list(accumulate(model_call.messages, extend, initial=digest))

    def _extend(self, digest: bytes, message: Message, model_call: ModelCall) -> bytes:
        """Return the digest of a prefix and the message after it; of a changed echo, that with the recorded reply."""
        exact = extend_digest(digest, message, model_call)
        if message["role"] != "assistant" or exact in self._turns or digest not in self._replies:
            return exact
        for form, reasoning in issued_forms(message):
            issued = extend_digest(digest, form, model_call)
            if any(reasoning in (None, turn.reasoning) for turn in self._turns.get(issued, ())):
                return issued
        return exact

    def _place(self, model_call: ModelCall, digests: list[bytes]) -> tuple[int, _Changed | None]:
        """Return how many messages the longest recorded conversation and reply has, and the changed one after it."""
        end = next((n for n in range(len(digests) - 1, 0, -1) if digests[n] in self._turns), 0)
        return end, self._changed_reply(model_call, digests, end)

    def _changed_reply(self, model_call: ModelCall, digests: list[bytes], start: int) -> _Changed | None:
        """Return the first message from `start` on that is a reply, changed or at another place; None without one.

        That is an assistant message which a call issued, which was found to be changed before, or which has a reply's
        place. Where the messages leave the recorded conversations, the newest of these is followed. After a call to
        continue, each place has a reply as long as one is ahead: whoever inserts, drops or moves a message shifts them.
        """
        messages = model_call.messages
        places = [i for i in range(start, len(messages)) if messages[i]["role"] == "assistant"]
        if not places:
            return None
        left = max(start, self._shared(digests))
        ahead = self._replies_ahead(digests[left])
        for i in places:
            at = self._replies.get(digests[i])
            here = [at and at.call_id] if i < left else ahead if start else ahead[i - left :][:1]
            found = self._issued.call(messages[i], model_call) or self._changed.get(digests[i + 1])
            if (call_id := found or next(filter(None, here), None)) is not None:
                return _Changed(i, call_id)
        return _Changed(places[0], None) if self.incomplete else None

    def _replies_ahead(self, digest: bytes) -> list[str | None]:
        """Return the calls whose replies the messages are that followed a prefix, None for the other messages."""
        ahead: list[str | None] = []
        while (followed := self._next.get(digest)) is not None:
            ahead.append(self._replies[digest].call_id if digest in self._replies else None)
            digest = followed.digest
        return ahead

    def _shared(self, digests: list[bytes]) -> int:
        """Return the number of messages of the longest recorded prefix, -1 when not even the tools are recorded."""
        recorded = (n for n in reversed(range(len(digests))) if digests[n] in self._next or digests[n] in self._turns)
        return next(recorded, -1)

    def _difference(self, model_call: ModelCall, digests: list[bytes], changed: _Changed | None) -> str:
        """Describe where the conversation first differs from the recorded ones, at the latest in a changed reply."""
        messages, shared = model_call.messages, self._shared(digests)
        if changed is not None and changed.call_id is None:
            return f"message {changed.place} may be the reply of a call that cannot be read"
        if shared < 0:
            return "its tools are not those of any earlier call" if self._turns else "no earlier call"
        if changed is not None and digests[changed.place] in self._replies:
            shared, theirs = changed.place, self._replies[digests[changed.place]]
        elif changed is not None and (changed.place < shared or digests[shared] not in self._next):
            return f"message {changed.place} is the reply of call {changed.call_id}, changed or at another place"
        elif shared == len(messages):
            return f"it ends within the conversation of call {self._next[digests[shared]].call_id}"
        else:
            theirs = self._next[digests[shared]]
        difference = describe_difference(canonical(messages[shared], model_call), theirs.excerpt)
        return f"message {shared} is not that of call {theirs.call_id}: {difference}"
