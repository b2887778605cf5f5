"""Two sessions beside each other: the first message and the first token in which their main lines
differ.

The first calls of both are compared, then the second ones, and so on: each call's conversation with
its reply, and its prompt with its completion. Beyond the end of a line the other one is compared
with its last call.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.text import Text

from rolltap.addons.store.records import Call
from rolltap.trainer.runs.views.inspect import AFTER, BEFORE, load_decoder, message_text, written
from rolltap.trainer.traces.conversations import (
    CallConversation,
    Message,
    on_the_wire,
    rebuild_conversations,
)
from rolltap.trainer.traces.reader import RecordedSession
from rolltap.trainer.traces.tokens import common_length, pack
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
        return {"a": self.a, "b": self.b, "messages": self.messages, "tokens": self.tokens}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if (messages := self.messages) is None:
            yield Text("All messages are the same.", "bold")
        else:
            yield Text(f"The first {messages['common']} messages are the same.", "bold")
            for name, message in ((self.a, messages["a"]), (self.b, messages["b"])):
                yield Text(f"{name}: ", "cyan").append_text(
                    Text("ended") if message is None else message_text(message)
                )
        if (tokens := self.tokens) is None:
            yield Text("All tokens are the same.", "bold")
        else:
            decode = load_decoder(self.run) if self.run is not None else None
            where = f"of call {tokens['call_a']} and call {tokens['call_b']}"
            yield Text(f"The first {tokens['position']} tokens {where} are the same.", "bold")
            for name, part in (("common", "common"), (self.a, "a"), (self.b, "b")):
                yield Text(f"  {name}  {written(tokens[part], decode)}")


def compare_sessions(a: RecordedSession, b: RecordedSession, run: Path | None = None) -> Difference:
    """Return the first difference of two sessions of the folder `run`."""
    return Difference(
        a.session_id, b.session_id, _messages(a.calls, b.calls), _tokens(a.calls, b.calls), run
    )


def main_line(calls: Sequence[Call]) -> list[Call]:
    """Return the completed calls of role `agent` that no later answer superseded. `calls` are in
    `start_order`."""
    superseded = link_calls(calls)[1]
    agents = (
        i for i, call in enumerate(calls) if call.role == "agent" and call.status == "completed"
    )
    return [calls[i] for i in agents if i not in superseded]


def _messages(a: Sequence[Call], b: Sequence[Call]) -> dict[str, Any] | None:
    first, second = (
        {each.call.call_id: each for each in rebuild_conversations(calls)} for calls in (a, b)
    )
    for one, other in _pairs(a, b):
        ours, theirs = _conversation(first[one.call_id]), _conversation(second[other.call_id])
        same = takewhile(
            lambda pair: _comparable(pair[0]) == _comparable(pair[1]),
            zip(ours, theirs, strict=False),
        )
        if (common := sum(1 for _ in same)) < max(len(ours), len(theirs)):
            next_a, next_b = (next(iter(each[common:]), None) for each in (ours, theirs))
            return {"common": common, "a": next_a, "b": next_b}
    return None


def _tokens(a: Sequence[Call], b: Sequence[Call]) -> dict[str, Any] | None:
    for one, other in _pairs(a, b):
        ours, theirs = ([*call.prompt_ids, *call.completion_ids] for call in (one, other))
        if (at := common_length(pack(ours), pack(theirs))) < max(len(ours), len(theirs)):
            found = {"position": at, "call_a": one.call_id, "call_b": other.call_id}
            return {
                **found,
                "common": ours[max(at - BEFORE, 0) : at],
                "a": ours[at:][:AFTER],
                "b": theirs[at:][:AFTER],
            }
    return None


def _pairs(a: Sequence[Call], b: Sequence[Call]) -> Iterator[tuple[Call, Call]]:
    """Yield the calls of both main lines, side by side."""
    ours, theirs = main_line(a), main_line(b)
    for number in range(max(len(ours), len(theirs)) if ours and theirs else 0):
        yield ours[min(number, len(ours) - 1)], theirs[min(number, len(theirs) - 1)]


def _conversation(conversation: CallConversation) -> list[Message]:
    """Return the messages of a call and its reply."""
    return [
        on_the_wire(each)
        for each in (*conversation.messages(), conversation.reply)
        if each is not None
    ]


def _comparable(message: Message) -> str:
    """Return a message as text, without the ids of tool calls, which are other ones in each
    session."""
    kept: dict[str, Any] = {
        key: value for key, value in message.items() if key not in ("tool_call_id", "tool_calls")
    }
    kept["tool_calls"] = [call["function"] for call in message.get("tool_calls") or []]
    return json.dumps(kept, sort_keys=True)
