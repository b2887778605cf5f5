"""Two sessions beside each other: the first message and the first token in which their main lines
differ.

The first calls of both are compared, then the second ones, and so on: each call's conversation with
its reply, and its prompt with its completion. Beyond the end of a line the other one is compared
with its last call.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.text import Text

from rolltap.addons.store.records import Call
from rolltap.trainer.runs.views.calls import message_text, tokens_around, written
from rolltap.trainer.runs.views.text import load_decoder
from rolltap.trainer.traces.conversations import (
    CallConversation,
    Message,
    on_the_wire,
    rebuild_conversations,
)
from rolltap.trainer.traces.reader import RecordedSession
from rolltap.trainer.traces.tokens import common_length, to_bytes
from rolltap.trainer.traces.tree import link_calls


@dataclass(frozen=True, slots=True)
class Difference(JupyterMixin):
    """The first difference of the main lines of the sessions `a` and `b`. A part is None when
    nothing differs in it.

    Attributes:
        messages: `common`, the number of messages that both begin with, and the next one of each,
            `a` and `b`; None where it has ended.
        tokens: `position`, that of the first token that differs in the prompt and completion of
            `call_a` and `call_b`; `common`, the tokens before it; `a` and `b`, those from it on.
        run: Run folder, whose tokenizer decodes the tokens.
    """

    a: str
    b: str
    messages: dict[str, Any] | None
    tokens: dict[str, Any] | None
    run: Path | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the difference as JSON values."""
        return {
            "a": self.a,
            "b": self.b,
            "messages": self.messages,
            "tokens": self.tokens,
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        messages = self.messages
        if messages is None:
            yield Text("All messages are the same.", "bold")
        else:
            yield Text(f"The first {messages['common']} messages are the same.", "bold")
            yield _next_message(self.a, messages["a"])
            yield _next_message(self.b, messages["b"])
        tokens = self.tokens
        if tokens is None:
            yield Text("All tokens are the same.", "bold")
            return
        decode = None
        if self.run is not None:
            decode = load_decoder(self.run)
        where = f"of call {tokens['call_a']} and call {tokens['call_b']}"
        yield Text(f"The first {tokens['position']} tokens {where} are the same.", "bold")
        yield Text(f"  common  {written(tokens['common'], decode)}")
        yield Text(f"  {self.a}  {written(tokens['a'], decode)}")
        yield Text(f"  {self.b}  {written(tokens['b'], decode)}")


def _next_message(session_id: str, message: Message | None) -> Text:
    text = Text(f"{session_id}: ", "cyan")
    if message is None:
        return text.append_text(Text("ended"))
    return text.append_text(message_text(message))


def compare_sessions(a: RecordedSession, b: RecordedSession, run: Path | None = None) -> Difference:
    """Return the first difference of two sessions of the folder `run`."""
    messages = _differing_messages(a, b)
    return Difference(a.session_id, b.session_id, messages, _differing_tokens(a, b), run)


def main_line(calls: Sequence[Call]) -> list[Call]:
    """Return the completed calls of role `agent` that no later answer superseded. `calls` are in
    `start_order`."""
    _, superseded = link_calls(calls)
    line = []
    for number, call in enumerate(calls):
        if call.role == "agent" and call.status == "completed" and number not in superseded:
            line.append(call)
    return line


def _differing_messages(a: RecordedSession, b: RecordedSession) -> dict[str, Any] | None:
    first = {each.call.call_id: each for each in rebuild_conversations(a.calls)}
    second = {each.call.call_id: each for each in rebuild_conversations(b.calls)}
    for one, other in _pairs(a, b):
        ours = _messages(first[one.call_id])
        theirs = _messages(second[other.call_id])
        common = 0
        for our, their in zip(ours, theirs, strict=False):
            if _comparable(our) != _comparable(their):
                break
            common += 1
        if common < max(len(ours), len(theirs)):
            next_ours = next(iter(ours[common:]), None)
            next_theirs = next(iter(theirs[common:]), None)
            return {"common": common, "a": next_ours, "b": next_theirs}
    return None


def _differing_tokens(a: RecordedSession, b: RecordedSession) -> dict[str, Any] | None:
    for one, other in _pairs(a, b):
        ours = [*one.prompt_ids, *one.completion_ids]
        theirs = [*other.prompt_ids, *other.completion_ids]
        position = common_length(to_bytes(ours), to_bytes(theirs))
        if position < max(len(ours), len(theirs)):
            common, next_ours = tokens_around(ours, position)
            _, next_theirs = tokens_around(theirs, position)
            return {
                "position": position,
                "call_a": one.call_id,
                "call_b": other.call_id,
                "common": common,
                "a": next_ours,
                "b": next_theirs,
            }
    return None


def _pairs(a: RecordedSession, b: RecordedSession) -> Iterator[tuple[Call, Call]]:
    """Yield the calls of both main lines, side by side."""
    ours = main_line(a.calls)
    theirs = main_line(b.calls)
    if ours and theirs:
        for number in range(max(len(ours), len(theirs))):
            yield ours[min(number, len(ours) - 1)], theirs[min(number, len(theirs) - 1)]


def _messages(conversation: CallConversation) -> list[Message]:
    """Return the messages of a call and its reply."""
    messages = conversation.messages()
    if conversation.reply is not None:
        messages.append(conversation.reply)
    return list(map(on_the_wire, messages))


def _comparable(message: Message) -> str:
    """Return a message as text, without the ids of tool calls, which are other ones in each
    session."""
    compared = dict(message)
    compared.pop("tool_call_id", None)
    calls = message.get("tool_calls") or []
    compared["tool_calls"] = [call["function"] for call in calls]
    return json.dumps(compared, sort_keys=True)
