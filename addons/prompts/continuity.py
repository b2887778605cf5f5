"""Conversation to prompt token ids: continue a recorded call token for token, or render in full and record why.

A recorded call is found by comparing canonical messages (`canonical.py`). Its text is not tokenised again. Reasoning is
not compared, because some harnesses drop it. Reasoning, and the opaque field issued with it (`call_id`), only decide
between calls that are otherwise equal.
"""

import hashlib
import json
import marshal
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rolltap.addons.dialects.types import Message, ModelCall
from rolltap.addons.prompts.canonical import canonical
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.store.records import CallKind

_BEFORE, _AFTER = 30, 50
"""Characters shown before and after the start of a difference."""
_EXCERPT = 400
"""Characters of each recorded message that are kept to show a difference."""


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
    digests: list[bytes] = field(repr=False, default_factory=list)
    """The digest of each prefix of the conversation: `digests[n]` covers `messages[:n]`."""


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
        self._rendering = rendering
        self._turns: dict[bytes, list[Turn]] = {}
        self._by_call: dict[str, Turn] = {}
        self._next: dict[bytes, _Followed] = {}
        """Digest of a prefix -> the newest message that followed it, with the first call that had it."""
        self._newest: tuple[list[bytes], list[bytes]] = ([], [])
        """Cache: a fingerprint of each message of the newest request, and the digests of their prefixes."""

    def prompt(self, model_call: ModelCall) -> Prompt:
        """Return the prompt of a new call.

        It bridges the recorded call whose conversation and reply are the messages up to the last assistant message.
        Without such a call, all messages are rendered. A call that ends earlier is not continued, because the new
        messages would include an assistant message, whose sampled token ids belong to another call.
        """
        messages, tools = model_call.messages, model_call.tools
        fingerprints = [_fingerprint(message) for message in messages]
        digests = _prefix_digests(model_call, fingerprints, *self._newest)
        self._newest = fingerprints, digests
        reply_end = next((n for n in range(len(messages), 0, -1) if messages[n - 1]["role"] == "assistant"), 0)
        turns = self._turns.get(digests[reply_end], []) if reply_end else []
        turn = _pick(turns, messages[reply_end - 1]) if turns else None
        if turn is not None:
            completion_ids, new_messages = turn.completion_ids.tolist(), messages[reply_end:]
            ids = self._rendering.bridge(turn.prompt_ids(), completion_ids, new_messages, tools)
            if ids is not None:
                return Prompt(model_call, ids, "bridged", None, turn, turn.length, new_messages, digests)
            reason = self._rendering.refusal or f"the renderer cannot continue call {turn.call_id}"
        elif turns:
            reason = f"{len(turns)} earlier calls fit equally well up to message {reply_end}"
        else:
            reason = self._difference(model_call, digests) if self._turns else "no earlier call"
        ids = self._rendering.render([self._with_reasoning(message) for message in messages], tools)
        return Prompt(model_call, ids, "rendered" if reply_end else "root", reason, None, 0, messages, digests)

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
        digests = [_first_digest(model_call) if parent is None else parent.digest]
        for message in model_call.messages:
            digests.append(_extend_digest(digests[-1], message, model_call))
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
        digests = [*digests, _extend_digest(digests[-1], reply, model_call)]
        reasoning = reply.get("reasoning_content") or ""
        turn = Turn(call_id, base, shared, tail_ids, array("i", completion_ids), reasoning, digests[-1])
        self._turns.setdefault(turn.digest, []).append(turn)
        self._by_call[call_id] = turn
        for i, message in enumerate([*new_messages, reply]):
            followed = self._next.get(digests[i])
            if followed is None or followed.digest != digests[i + 1]:
                excerpt = canonical(message, model_call)[:_EXCERPT]
                self._next[digests[i]] = _Followed(digests[i + 1], call_id, excerpt)
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

    def _difference(self, model_call: ModelCall, digests: list[bytes]) -> str:
        """Describe where the conversation first differs from the recorded ones."""
        messages = model_call.messages
        recorded = [n for n, digest in enumerate(digests) if digest in self._next or digest in self._turns]
        if not recorded:
            return "its tools are not those of any earlier call"
        shared = recorded[-1]  # the number of messages in the longest recorded prefix
        if turns := self._turns.get(digests[shared]):
            return f"after call {turns[-1].call_id} it has an assistant message that no call sampled"
        theirs = self._next[digests[shared]]
        if shared == len(messages):
            return f"it ends within the conversation of call {theirs.call_id}"
        ours = canonical(messages[shared], model_call)
        if ours.startswith(theirs.excerpt):
            difference = f"it differs after {len(theirs.excerpt)} characters"
        else:
            difference = describe_difference(ours, theirs.excerpt)
        return f"message {shared} is not that of call {theirs.call_id}: {difference}"


def describe_difference(ours: str, theirs: str) -> str:
    """Return an excerpt of both texts around the first character in which they differ."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    start = max(0, at - _BEFORE)
    return f"{ours[start : at + _AFTER]!r} where it had {theirs[start : at + _AFTER]!r}"


def _prefix_digests(
    model_call: ModelCall, fingerprints: list[bytes], known: list[bytes], known_digests: list[bytes]
) -> list[bytes]:
    """Return the N + 1 digests of the prefixes of N messages. Each covers the tools and the echo rule too.

    `known_digests` are those of the messages with the fingerprints `known`: the digests of a shared prefix are copied
    instead of computed.
    """
    digests = [_first_digest(model_call)]
    for i, message in enumerate(model_call.messages):
        if i < len(known) and digests[i] == known_digests[i] and fingerprints[i] == known[i]:
            digests.append(known_digests[i + 1])
        else:
            digests.append(_extend_digest(digests[i], message, model_call))
    return digests


def _fingerprint(message: Message) -> bytes:
    """Return a digest that differs for messages with different values or types. Faster than the canonical form."""
    try:
        values = marshal.dumps(message, 0)
    except ValueError:  # nested too deeply: equal to no other
        return secrets.token_bytes(16)
    return hashlib.blake2b(values, digest_size=16).digest()


def _first_digest(model_call: ModelCall) -> bytes:
    """Return the digest of a conversation without messages."""
    rule = model_call.echo_rule and model_call.echo_rule.__name__
    first = json.dumps([model_call.tools, rule], sort_keys=True)
    return hashlib.blake2b(first.encode(), digest_size=16).digest()


def _extend_digest(digest: bytes, message: Message, model_call: ModelCall) -> bytes:
    """Return the digest of a prefix and the message after it."""
    text = canonical(message, model_call).encode("utf-8", "replace")
    return hashlib.blake2b(digest + text, digest_size=16).digest()


def _pick(turns: list[Turn], echoed: Message) -> Turn | None:
    """Return the turn that issued the echoed reply, or None when that is ambiguous.

    `turns` have the same canonical conversation and reply. Turns with equal token ids count as the same turn.
    """
    if len(turns) > 1 and (issued := [turn for turn in turns if turn.call_id == echoed.get("call_id")]):
        return issued[0]
    if len(turns) > 1:
        reasoning = echoed.get("reasoning_content") or ""
        turns = [turn for turn in turns if turn.reasoning == reasoning]
    if not turns:
        return None
    first = turns[0]
    if any(t.completion_ids != first.completion_ids or t.prompt_ids() != first.prompt_ids() for t in turns[1:]):
        return None
    return first
