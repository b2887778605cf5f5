"""The calls of a session as its rows have them."""

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rolltap.addons.dialects.types import EchoRule, Message, ModelCall, Tool

logger = logging.getLogger(__name__)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call whose prompt can be rebuilt."""

    row: Row
    messages: list[Message]
    """The messages after the parent's conversation and reply."""
    tools: list[Tool]
    reply: Message | None
    """None for a call that did not complete."""
    sampling: dict[str, Any]

    def model_call(self, rule: EchoRule | None) -> ModelCall:
        """Return the request with only the new messages, of a harness with this echo rule."""
        return ModelCall(self.row["model"], self.messages, self.tools, echo_rule=rule)


def parents_first(rows: dict[str, Row]) -> list[Row]:
    """Return rows in their order, but each parent before its children. Writers whose clocks differ may mix them.

    `rows` has each row under its call.
    """
    ordered: list[Row] = []
    seen: set[str] = set()
    for own in rows.values():
        row: Row | None = own
        path: list[Row] = []
        while row is not None and row["call_id"] not in seen:
            seen.add(row["call_id"])
            path.append(row)
            row = rows.get(row["parent_id"])
        ordered += reversed(path)
    return ordered


def readable_calls(rows: Iterable[Row]) -> Iterator[RecordedCall]:
    """Yield the calls among the rows of a session, parents first, whose prompts can be rebuilt.

    The others are left out with a warning.
    """
    found: dict[str | None, RecordedCall] = {}
    for row in rows:
        parent = found.get(row["parent_id"])
        known = parent.row["prompt_length"] + len(parent.row["completion_ids"]) if parent is not None else 0
        try:
            if row["parent_id"] is not None and (parent is None or parent.reply is None):
                raise ValueError(f"its parent {row['parent_id']} cannot be read")
            if row["prompt_length"] != known + len(row["prompt_tail_ids"]):
                raise ValueError(f"its prompt has {row['prompt_length']} tokens, but fewer or more can be rebuilt")
            tools = json.loads(row["tools"]) if row["tools"] is not None or parent is None else parent.tools
            messages, sampling = json.loads(row["messages"]), json.loads(row["sampling"])
            reply = json.loads(row["reply"]) if row["status"] == "completed" else None
            if reply is None and row["status"] == "completed":
                raise ValueError("it has no reply")
        except (ValueError, TypeError, RecursionError) as error:
            leave_out(row, str(error))
        else:
            recorded = found[row["call_id"]] = RecordedCall(row, messages, tools, reply, sampling)
            yield recorded


def leave_out(row: Row, why: str) -> None:
    """Warn that a call is not taken from its row."""
    where = f"session {row['session_id']}: call {row['call_id']}"
    logger.warning("%s cannot be continued after a restart: %s", where, why)
