"""Conversation to prompt token ids: continue a recorded call token for token, or render in full and say why.

A recorded turn is found by what the harness sends back, compared as canonical messages (`canonical.py`). Its text is
never tokenised again. Reasoning does not take part in the comparison, as harnesses drop or keep it; like the opaque
field issued with it (`call_id`), it only decides between turns that are otherwise equal.
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
"""Characters shown on both sides of a difference."""


@dataclass(slots=True)
class Turn:
    """A finished call. Its own tokens only: those before are its parent's, so T turns hold O(T) tokens."""

    call_id: str
    parent: "Turn | None"
    tail_ids: list[int]
    completion_ids: list[int]
    reasoning: str

    def prompt_ids(self) -> list[int]:
        """The full prompt of the call."""
        pieces, turn = [self.tail_ids], self.parent
        while turn is not None:
            pieces += [turn.completion_ids, turn.tail_ids]
            turn = turn.parent
        return list(chain.from_iterable(reversed(pieces)))


@dataclass(slots=True)
class Prompt:
    """The prompt of a call, and how it came about."""

    model_call: ModelCall = field(repr=False)
    ids: list[int]
    kind: CallKind
    reason: str | None
    """Why the call is not `bridged`, and where it first differs from an earlier one; None when it is."""
    parent: Turn | None
    prefix_length: int
    """How many of `ids` are the parent's prompt and completion."""
    new_messages: list[Message]
    """The messages after the parent's conversation and reply; all of them without a parent."""
    states: list[str] = field(repr=False, default_factory=list)
    """A digest of each prefix of the conversation."""


class Conversations:
    """The turns of one session, by the conversation that each of them completed."""

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering
        self._turns: dict[str, list[Turn]] = {}
        self._by_call: dict[str, Turn] = {}
        self._next: dict[str, dict[str, str]] = {}
        """State -> the messages that came next, and the call of each."""
        self._newest: tuple[list[Message], list[str]] = ([], [])
        """The messages of the newest request and their states: most of the next one's, as a rule."""
        self._newest_turn: tuple[Turn | None, list[int]] = (None, [])
        """The newest turn and its full prompt: the next call continues it, as a rule."""

    def prompt(self, model_call: ModelCall) -> Prompt:
        """The prompt of a new call: the recorded conversation that ends with this one's last assistant message,
        bridged, or all of it rendered.

        An earlier one would leave an assistant message among the new ones, and its tokens are those of another call.
        """
        messages, tools = model_call.messages, model_call.tools
        states = _states(model_call, *self._newest)
        self._newest = messages, states
        length = next((n for n in range(len(messages), 0, -1) if messages[n - 1]["role"] == "assistant"), 0)
        turns = self._turns.get(states[length], []) if length else []
        turn = _pick(turns, messages[length - 1]) if turns else None
        if turn is not None:
            newest, newest_prompt_ids = self._newest_turn
            prompt_ids = newest_prompt_ids if turn is newest else turn.prompt_ids()
            ids = self._rendering.bridge(prompt_ids, turn.completion_ids, messages[length:], tools)
            if ids is not None:
                prefix = len(prompt_ids) + len(turn.completion_ids)
                return Prompt(model_call, ids, "bridged", None, turn, prefix, messages[length:], states)
            reason = self._rendering.refusal or f"the renderer cannot continue call {turn.call_id}"
        elif turns:
            reason = f"{len(turns)} earlier calls fit equally well up to message {length}"
        else:
            reason = self._difference(model_call, states) if self._turns else "no earlier call"
        ids = self._rendering.render([self._with_reasoning(message) for message in messages], tools)
        return Prompt(model_call, ids, "rendered" if length else "root", reason, None, 0, messages, states)

    def add(self, call_id: str, prompt: Prompt, completion_ids: list[int], reply: Message) -> None:
        """Remember a completed call, so that the next one can continue it. `reply` is what the harness saw."""
        tail = prompt.ids[prompt.prefix_length :]
        turn = Turn(call_id, prompt.parent, tail, completion_ids, reply.get("reasoning_content") or "")
        self._turns.setdefault(_next_state(prompt.states[-1], reply, prompt.model_call), []).append(turn)
        self._by_call[call_id] = turn
        self._newest_turn = turn, prompt.ids
        first = len(prompt.states) - 1 - len(prompt.new_messages)
        for state, message in zip(prompt.states[first:], [*prompt.new_messages, reply], strict=True):
            self._next.setdefault(state, {}).setdefault(canonical(message, prompt.model_call), call_id)

    def _with_reasoning(self, message: Message) -> Message:
        """The reasoning belongs to the context when the harness sends only the opaque field issued with it."""
        turn = self._by_call.get(message.get("call_id", ""))
        if turn is None or not turn.reasoning or message.get("reasoning_content"):
            return message
        return {**message, "reasoning_content": turn.reasoning}

    def _difference(self, model_call: ModelCall, states: list[str]) -> str:
        """Where the conversation leaves those that were recorded, in words."""
        messages = model_call.messages
        known = [i for i, state in enumerate(states) if state in self._next or state in self._turns]
        if not known:
            return "its tools are not those of any earlier call"
        length = known[-1]
        if turns := self._turns.get(states[length]):
            return f"after call {turns[-1].call_id} it has an assistant message that no call sampled"
        theirs, call_id = next(reversed(self._next[states[length]].items()))
        if length == len(messages):
            return f"it ends within the conversation of call {call_id}"
        ours = canonical(messages[length], model_call)
        return f"message {length} is not that of call {call_id}: {describe_difference(ours, theirs)}"


def describe_difference(ours: str, theirs: str) -> str:
    """Two texts around the first character in which they differ."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    start = max(0, at - _BEFORE)
    return f"{ours[start : at + _AFTER]!r} where it had {theirs[start : at + _AFTER]!r}"


def _states(model_call: ModelCall, known: list[Message], known_states: list[str]) -> list[str]:
    """A digest of each prefix of the conversation, the tools and the echo rule included; `states[n]` covers
    `messages[:n]`.

    `known` is a conversation whose states are known, so that what it shares with this one is not digested again.
    """
    rule = model_call.echo_rule and model_call.echo_rule.__name__
    first = json.dumps([model_call.tools, rule], sort_keys=True)
    states = [hashlib.blake2b(first.encode(), digest_size=16).hexdigest()]
    for i, message in enumerate(model_call.messages):
        if i < len(known) and states[i] == known_states[i] and _identical(message, known[i]):
            states.append(known_states[i + 1])
        else:
            states.append(_next_state(states[i], message, model_call))
    return states


def _identical(message: Message, other: Message) -> bool:
    """Whether two messages are equal, and also in their types: Python calls True and 1 equal."""
    if message != other:
        return False
    return "tool_calls" not in message or repr(message["tool_calls"]) == repr(other["tool_calls"])


def _next_state(state: str, message: Message, model_call: ModelCall) -> str:
    text = state + canonical(message, model_call)
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()


def _pick(turns: list[Turn], echoed: Message) -> Turn | None:
    """The turn that the echoed reply belongs to, or None in doubt. Turns of equal tokens are the same turn."""
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
