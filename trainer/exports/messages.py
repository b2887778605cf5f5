"""Chat messages for supervised fine-tuning: JSON Lines that TRL's `SFTTrainer` reads.

One line per leaf of the call tree of the completed calls: the messages of its request and its reply. An assistant
message before a fork stands in the lines of all leaves after it; `call_ids` tells which calls a line holds.

- `messages` is in OpenAI's form, with `reasoning_content` where the model reasoned. Arguments of tool calls are
  objects, as most chat templates go through them key by key (of those in TRL 1.16, DeepSeek's alone want text). Where
  the model sampled arguments that are no JSON object they stay as they are, and `malformed` is true.
- `tools` is JSON text, which `SFTTrainer` parses: schemas of tools have no common type. It is `null` without tools.
- `left_out` is the reason why reinforcement learning leaves the leaf's call out, empty when it does not.

The folder's card gives the columns their types, so `datasets.load_dataset(folder)` needs not guess them from the first
lines. Sessions without a completed call have no line, nor have conversations whose beginning is not in the run; a
warning counts the latter.
"""

import json
import logging
from pathlib import Path
from typing import Any

from rolltap.trainer.exports.sessions import dump_json, each_session
from rolltap.trainer.progress import Advance
from rolltap.trainer.traces.build import judge_calls
from rolltap.trainer.traces.conversations import CallConversation, for_template, rebuild_conversations
from rolltap.trainer.traces.reader import RecordedSession
from rolltap.trainer.traces.tree import find_ends, path_to

logger = logging.getLogger(__name__)

FILE = "messages.jsonl"
CARD = f"""---
configs:
- config_name: default
  data_files: {FILE}
dataset_info:
  features:
  - {{name: messages, list: json}}
  - {{name: tools, dtype: string}}
  - {{name: session_id, dtype: string}}
  - {{name: task_id, dtype: string}}
  - {{name: group_id, dtype: string}}
  - {{name: harness, dtype: string}}
  - {{name: reward, dtype: float64}}
  - {{name: role, dtype: string}}
  - {{name: finish_reason, dtype: string}}
  - {{name: left_out, dtype: string}}
  - {{name: malformed, dtype: bool}}
  - {{name: call_ids, list: string}}
---

Conversations of agents, recorded with rolltap. One line is one conversation with everything the model was shown.
"""


def export(run: Path, out: Path, advance: Advance) -> int:
    """Write the lines and the card; returns the number of lines."""
    (out / "README.md").write_text(CARD, encoding="utf-8")
    lines = incomplete = 0
    with (out / FILE).open("w", encoding="utf-8") as file:
        for recorded in each_session(run, advance):
            conversations, faults = session_conversations(recorded)
            for conversation in conversations:
                file.write(dump_json(conversation) + "\n")
            lines += len(conversations)
            incomplete += len(faults)
    if incomplete:
        logger.warning("%s: %d conversations are left out, as the run does not hold all of them", run, incomplete)
    return lines


def session_conversations(recorded: RecordedSession) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The lines of a session, and why the conversations of other leaves are not known: call id -> words."""
    calls = [call for call in recorded.calls if call.status == "completed"]
    parents, left_out = judge_calls(calls)
    # all calls, as a completed one may have been recorded after one that is not
    turns = {turn.call.call_id: turn for turn in rebuild_conversations(recorded.calls)}
    lines, faults = [], {}
    for leaf in find_ends(parents, range(len(calls))):
        turn = turns[calls[leaf].call_id]
        fault = turn.incomplete or (None if turn.reply is not None else "its reply was not recorded")
        if fault is not None:
            faults[turn.call.call_id] = fault
            continue
        call_ids = [calls[i].call_id for i in path_to(leaf, parents.__getitem__)]
        lines.append(_line(recorded, turn, call_ids, left_out[leaf] or ""))
    return lines, faults


def _line(recorded: RecordedSession, turn: CallConversation, call_ids: list[str], left_out: str) -> dict[str, Any]:
    session, call = recorded.session, turn.call
    messages = [for_template(message) for message in [*turn.messages(), *filter(None, [turn.reply])]]
    tool_calls = [tool_call for message in messages for tool_call in message.get("tool_calls") or []]
    # no value but the reward is null: a column that is null in the first lines has no type for a loader that guesses
    return {
        "messages": messages,
        "tools": json.dumps(turn.tools or None, ensure_ascii=False),
        "session_id": recorded.session_id,
        "task_id": session.task_id if session else "",
        "group_id": session.group_id if session else "",
        "harness": session.harness if session else "",
        "reward": session.reward if session else None,
        "role": call.role,
        "finish_reason": call.finish_reason or "",
        "left_out": left_out,
        "malformed": not all(isinstance(tool_call["function"]["arguments"], dict) for tool_call in tool_calls),
        "call_ids": call_ids,
    }
