"""Conversation to prompt token ids: continue a recorded call token for token, or render in full and record why.

A recorded call is found by comparing canonical messages (`canonical.py`). Its text is not tokenised again. Reasoning is
not compared, because some harnesses drop it. Reasoning, and the opaque field issued with it (`call_id`), only decide
between calls that are otherwise equal.
"""

import hashlib
import json
from dataclasses import dataclass, field
from itertools import chain

from rolltap.addons.dialects.types import Message, ModelCall
from rolltap.addons.prompts.canonical import canonical
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.store.records import CallKind

_BEFORE, _AFTER = 30, 50
"""Characters shown before and after the start of a difference."""


@dataclass(slots=True)
class Turn:
    """A recorded call of a conversation.

    It holds only the prompt token ids that follow its parent's completion, so that memory grows linearly with a
    conversation.
    """

    call_id: str
    parent: "Turn | None"
    tail_ids: list[int]
    completion_ids: list[int]
    reasoning: str

    def prompt_ids(self) -> list[int]:
        """Return the full prompt of the call, in O(length of the prompt)."""
        pieces, turn = [self.tail_ids], self.parent
        while turn is not None:
            pieces += [turn.completion_ids, turn.tail_ids]
            turn = turn.parent
        return list(chain.from_iterable(reversed(pieces)))


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
    digests: list[str] = field(repr=False, default_factory=list)
    """The digest of each prefix of the conversation: `digests[n]` covers `messages[:n]`."""


class Conversations:
    """The recorded calls of one session, indexed by the digest of each call's conversation and reply.

    Not thread-safe.
    """

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering
        self._turns: dict[str, list[Turn]] = {}
        self._by_call: dict[str, Turn] = {}
        self._next: dict[str, dict[str, str]] = {}
        """Digest of a prefix -> each canonical message that followed it -> the first call that had this message."""
        self._newest: tuple[list[Message], list[str]] = ([], [])
        """Cache: the messages of the newest request and the digests of their prefixes."""
        self._newest_turn: tuple[Turn | None, list[int]] = (None, [])
        """Cache: the newest turn and its full prompt, which the next call usually continues."""

    def prompt(self, model_call: ModelCall) -> Prompt:
        """Return the prompt of a new call.

        It bridges the recorded call whose conversation and reply are the messages up to the last assistant message.
        Without such a call, all messages are rendered. A call that ends earlier is not continued, because the new
        messages would include an assistant message, whose sampled token ids belong to another call.
        """
        messages, tools = model_call.messages, model_call.tools
        digests = _prefix_digests(model_call, *self._newest)
        self._newest = messages, digests
        reply_end = next((n for n in range(len(messages), 0, -1) if messages[n - 1]["role"] == "assistant"), 0)
        turns = self._turns.get(digests[reply_end], []) if reply_end else []
        turn = _pick(turns, messages[reply_end - 1]) if turns else None
        if turn is not None:
            newest, newest_prompt_ids = self._newest_turn
            prompt_ids = newest_prompt_ids if turn is newest else turn.prompt_ids()
            ids = self._rendering.bridge(prompt_ids, turn.completion_ids, messages[reply_end:], tools)
            if ids is not None:
                prefix_length = len(prompt_ids) + len(turn.completion_ids)
                return Prompt(model_call, ids, "bridged", None, turn, prefix_length, messages[reply_end:], digests)
            reason = self._rendering.refusal or f"the renderer cannot continue call {turn.call_id}"
        elif turns:
            reason = f"{len(turns)} earlier calls fit equally well up to message {reply_end}"
        else:
            reason = self._difference(model_call, digests) if self._turns else "no earlier call"
        ids = self._rendering.render([self._with_reasoning(message) for message in messages], tools)
        return Prompt(model_call, ids, "rendered" if reply_end else "root", reason, None, 0, messages, digests)

    def add(self, call_id: str, prompt: Prompt, completion_ids: list[int], reply: Message) -> None:
        """Record a completed call for later calls to continue. `reply` is the message that the harness receives."""
        tail_ids = prompt.ids[prompt.prefix_length :]
        turn = Turn(call_id, prompt.parent, tail_ids, completion_ids, reply.get("reasoning_content") or "")
        self._turns.setdefault(_extend_digest(prompt.digests[-1], reply, prompt.model_call), []).append(turn)
        self._by_call[call_id] = turn
        self._newest_turn = turn, prompt.ids
        first_new = len(prompt.digests) - 1 - len(prompt.new_messages)
        for digest, message in zip(prompt.digests[first_new:], [*prompt.new_messages, reply], strict=True):
            self._next.setdefault(digest, {}).setdefault(canonical(message, prompt.model_call), call_id)

    def _with_reasoning(self, message: Message) -> Message:
        """Return the message with its recorded reasoning when the harness sent only the opaque field issued with it."""
        turn = self._by_call.get(message.get("call_id", ""))
        if turn is None or not turn.reasoning or message.get("reasoning_content"):
            return message
        return {**message, "reasoning_content": turn.reasoning}

    def _difference(self, model_call: ModelCall, digests: list[str]) -> str:
        """Describe where the conversation first differs from the recorded ones."""
        messages = model_call.messages
        recorded = [n for n, digest in enumerate(digests) if digest in self._next or digest in self._turns]
        if not recorded:
            return "its tools are not those of any earlier call"
        shared = recorded[-1]  # the number of messages in the longest recorded prefix
        if turns := self._turns.get(digests[shared]):
            return f"after call {turns[-1].call_id} it has an assistant message that no call sampled"
        theirs, call_id = next(reversed(self._next[digests[shared]].items()))
        if shared == len(messages):
            return f"it ends within the conversation of call {call_id}"
        ours = canonical(messages[shared], model_call)
        return f"message {shared} is not that of call {call_id}: {describe_difference(ours, theirs)}"


def describe_difference(ours: str, theirs: str) -> str:
    """Return an excerpt of both texts around the first character in which they differ."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    start = max(0, at - _BEFORE)
    return f"{ours[start : at + _AFTER]!r} where it had {theirs[start : at + _AFTER]!r}"


def _prefix_digests(model_call: ModelCall, known: list[Message], known_digests: list[str]) -> list[str]:
    """Return the N + 1 digests of the prefixes of N messages. Each covers the tools and the echo rule too.

    `known_digests` are those of the messages `known`: the digests of a shared prefix are copied instead of computed.
    """
    rule = model_call.echo_rule and model_call.echo_rule.__name__
    first = json.dumps([model_call.tools, rule], sort_keys=True)
    digests = [hashlib.blake2b(first.encode(), digest_size=16).hexdigest()]
    for i, message in enumerate(model_call.messages):
        if i < len(known) and digests[i] == known_digests[i] and _identical(message, known[i]):
            digests.append(known_digests[i + 1])
        else:
            digests.append(_extend_digest(digests[i], message, model_call))
    return digests


def _identical(message: Message, other: Message) -> bool:
    """Return True when two messages are equal and their tool calls have the same types: in Python, True == 1 == 1.0."""
    if message != other:
        return False
    return "tool_calls" not in message or repr(message["tool_calls"]) == repr(other["tool_calls"])


def _extend_digest(digest: str, message: Message, model_call: ModelCall) -> str:
    """Return the digest of a prefix and the message after it."""
    text = digest + canonical(message, model_call)
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()


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
