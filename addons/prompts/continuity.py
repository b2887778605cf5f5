"""Conversation to prompt token ids: continue a recorded call token for token, or render in full and record why.

A recorded call is found by comparing canonical messages (`canonical.py`). Its text is not tokenised again. Reasoning is
not compared, because some harnesses drop it. Reasoning, and the opaque field issued with it (`call_id`), only decide
between calls that are otherwise equal.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rolltap.addons.dialects.types import Message, ModelCall
from rolltap.addons.prompts.canonical import canonical
from rolltap.addons.prompts.digests import (
    describe_difference,
    extend_digest,
    fingerprint,
    first_digest,
    message_digest,
)
from rolltap.addons.prompts.echoes import issued_forms
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.prompts.turns import Turn, pick_turn
from rolltap.addons.store.records import CallKind

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

    @property
    def opening(self) -> bytes:
        """The `opening_digest` of the conversation."""
        messages = self.model_call.messages
        return self.digests[next((n for n, m in enumerate(messages) if m["role"] != "system"), len(messages))]


class _Followed(NamedTuple):
    """The message that followed a prefix of a conversation."""

    digest: bytes
    """Digest of the prefix and the message."""
    call_id: str
    excerpt: str
    """The first `_EXCERPT` characters of the canonical message."""


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
        self._issued: dict[bytes | str, str] = {}
        """Digest of a reply by itself, and the id of each of its tool calls -> the call."""
        self._newest: tuple[list[bytes], list[bytes]] = ([], [])
        """Cache: a fingerprint of each message of the newest request, and the digests of their prefixes."""

    def prompt(self, model_call: ModelCall) -> Prompt:
        """Return the prompt of a new call.

        It bridges the call with the longest conversation and reply that the messages begin with. The other messages
        are new. They may include assistant messages that no call sampled: a program's examples, or notifications that
        it writes as if the model had asked for them. These are context.

        Where a recorded conversation has a reply and the request another assistant message, the program has changed
        its history: all messages are rendered then. So they are without a call to continue, unless none of them is a
        reply, which makes the call a root.
        """
        messages, tools = model_call.messages, model_call.tools
        digests = self._prefix_digests(model_call)
        end = next((n for n in range(len(messages), 0, -1) if digests[n] in self._turns), 0)
        turns = self._turns[digests[end]] if end else []
        changed = self._changed_reply(messages, digests, end)
        sampled_by = turns[0].call_id if turns else self._sampled_by(model_call)
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
            reason = self._difference(model_call, digests, changed) if self._turns else "no earlier call"
        ids = self._rendering.render([self._with_reasoning(message) for message in messages], tools)
        kind: CallKind = "root" if sampled_by is None and changed is None else "rendered"
        return Prompt(model_call, ids, kind, reason, None, 0, messages, sampled_by, digests)

    def add(self, call_id: str, prompt: Prompt, completion_ids: Sequence[int], reply: Message) -> None:
        """Record a completed call for later calls to continue. `reply` is the message that the harness receives."""
        digests = prompt.digests[len(prompt.digests) - 1 - len(prompt.new_messages) :]
        tail_ids = array("i", prompt.ids[prompt.prefix_length :])
        model_call, new_messages = prompt.model_call, prompt.new_messages
        self._add(call_id, prompt.parent, tail_ids, completion_ids, digests, new_messages, reply, model_call)

    def restore(
        self,
        call_id: str,
        parent_id: str | None,
        tail_ids: Sequence[int],
        completion_ids: Sequence[int],
        model_call: ModelCall,
        reply: Message,
    ) -> Turn:
        """Record a call as `add` did, from its row. The parent comes first.

        `model_call` has the tools that the model saw, the echo rule, and only the new messages. Restored once more
        under another echo rule, a call can be found by the requests of either.
        """
        parent = None if parent_id is None else self._by_call[parent_id]
        digests = [first_digest(model_call) if parent is None else parent.digest]
        for message in model_call.messages:
            digests.append(self._extend(digests[-1], message, model_call))
        tail = array("i", tail_ids)
        return self._add(call_id, parent, tail, completion_ids, digests, model_call.messages, reply, model_call)

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
    ) -> Turn:
        """Record a call. `digests` are those of the prefixes that the new messages and the reply follow."""
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
        if reply["content"].strip() or reply.get("tool_calls"):
            self._issued[message_digest(reply, model_call)] = call_id
        self._issued |= {tool_call["id"]: call_id for tool_call in reply.get("tool_calls", ())}
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

    def _changed_reply(self, messages: list[Message], digests: list[bytes], start: int) -> int | None:
        """Return the first assistant message from `start` on at whose place a recorded reply stands, or None.

        Where the messages leave the recorded conversations, the newest of these is followed.
        """
        recorded = digests[start]
        for i in range(start, len(messages)):
            if messages[i]["role"] == "assistant" and (self.incomplete or recorded in self._replies):
                return i
            if digests[i + 1] in self._next or digests[i + 1] in self._turns:
                recorded = digests[i + 1]
            elif (followed := self._next.get(recorded)) is not None:
                recorded = followed.digest
            elif not self.incomplete:
                return None
        return None

    def _sampled_by(self, model_call: ModelCall) -> str | None:
        """Return the first call whose reply is among the messages, in whatever conversation, or None."""
        for message in model_call.messages:
            if message["role"] != "assistant" or not self._turns:
                continue
            if (call_id := message.get("call_id")) in self._by_call:
                return str(call_id)
            tool_calls = (tool_call["id"] for tool_call in message.get("tool_calls", ()))
            for issued in (*tool_calls, message_digest(message, model_call)):
                if issued in self._issued:
                    return self._issued[issued]
        return None

    def _difference(self, model_call: ModelCall, digests: list[bytes], changed: int | None) -> str:
        """Describe where the conversation first differs from the recorded ones, at the latest in a changed reply."""
        messages = model_call.messages
        recorded = [n for n, digest in enumerate(digests) if digest in self._next or digest in self._turns]
        if not recorded:
            return "its tools are not those of any earlier call"
        shared = recorded[-1]  # the number of messages in the longest recorded prefix
        if self.incomplete and digests[shared] not in self._next:
            return f"after message {shared - 1} it may have the reply of a call that cannot be read"
        if changed is not None and digests[changed] in self._replies:
            shared, theirs = changed, self._replies[digests[changed]]
        elif shared == len(messages):
            return f"it ends within the conversation of call {self._next[digests[shared]].call_id}"
        else:
            theirs = self._next[digests[shared]]
        ours = canonical(messages[shared], model_call)
        if ours.startswith(theirs.excerpt):
            difference = f"it differs after {len(theirs.excerpt)} characters"
        else:
            difference = describe_difference(ours, theirs.excerpt)
        return f"message {shared} is not that of call {theirs.call_id}: {difference}"
