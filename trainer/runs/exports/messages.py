"""Export to chat messages for supervised fine-tuning: JSON Lines that TRL's `SFTTrainer` reads.

One line per leaf of the call tree of the completed calls: the messages of its request, and its
reply. An assistant message before a branch point is in the lines of all leaves below it. `call_ids`
are the calls of a line.

- `messages` is in OpenAI's form, with `reasoning_content` where the model reasoned. Arguments of
  tool calls are objects: most chat templates iterate over their keys (of those in TRL 1.16, only
  DeepSeek's want text). Arguments that are not a JSON object stay as sampled, and `malformed` is
  true.
- `tools` is JSON text, which `SFTTrainer` parses: tool schemas have no common Arrow type. It is
  `null` without tools.
- `context` are the indices in `messages` of assistant messages that no call of the line sampled: a
  program wrote them, or repeated them from another conversation. Trainers of whole chats train on
  them too: mask them, or drop the line.
- `left_out` is why the ledger leaves the leaf's call out of training, a missing reward too; empty
  when it is trained.

The folder's card declares the column types, so `datasets.load_dataset(folder)` does not infer them
from the first lines. Sessions without a completed call have no line. Incomplete conversations have
none either; a warning counts them.
"""

import json
import logging
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCard, DatasetCardData

from rolltap.addons.store.records import Session, json_text
from rolltap.trainer.console import Advance
from rolltap.trainer.runs.exports.card import file_digest
from rolltap.trainer.runs.exports.sessions import each_session
from rolltap.trainer.traces.conversations import (
    CallConversation,
    for_template,
    rebuild_conversations,
)
from rolltap.trainer.traces.reader import RecordedSession
from rolltap.trainer.traces.sessions import judge_session
from rolltap.trainer.traces.tree import find_ends, link_calls, path_to

logger = logging.getLogger(__name__)

_UNFINISHED = "messages"
_LISTS = {"messages": "json", "context": "int64", "call_ids": "string"}
_VALUES = {
    **dict.fromkeys(("tools", "session_id", "task_id", "group_id", "harness"), "string"),
    **dict.fromkeys(("role", "finish_reason", "left_out"), "string"),
    "reward": "float64",
    "malformed": "bool",
}


def export(run: Path, out: Path, advance: Advance) -> int:
    """Write the lines and the card. Return the number of lines."""
    lines = incomplete = 0
    with (out / _UNFINISHED).open("w", encoding="utf-8") as file:
        for recorded in each_session(run, advance):
            conversations, faults = session_conversations(recorded)
            for conversation in conversations:
                file.write(json_text(conversation) + "\n")
            lines += len(conversations)
            incomplete += len(faults)
    name = f"messages-{file_digest(out / _UNFINISHED)}.jsonl"
    (out / _UNFINISHED).rename(out / name)
    _card(name).save(out / "README.md")
    if incomplete:
        logger.warning(
            "%s: %d conversations are left out: the run does not hold all their messages",
            run,
            incomplete,
        )
    return lines


def _card(file: str) -> DatasetCard:
    """Return a card with the column types of the file, which `load_dataset` would infer from its
    first lines."""
    features = [{"name": name, "list": kind} for name, kind in _LISTS.items()]
    features += [{"name": name, "dtype": kind} for name, kind in _VALUES.items()]
    configs = [{"config_name": "default", "data_files": file}]
    data = DatasetCardData(configs=configs, dataset_info={"features": features})
    about = "Conversations of agents, recorded with rolltap. One line is one conversation."
    return DatasetCard(f"---\n{data.to_yaml()}\n---\n\n{about}\n")


def session_conversations(recorded: RecordedSession) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the lines of a session; and for leaves without a line, call id -> why the conversation
    is incomplete."""
    calls = [call for call in recorded.calls if call.status == "completed"]
    parents, _ = link_calls(calls)
    reasons = judge_session(recorded)[1]
    left_out = {call.call_id: reason for call, reason in zip(recorded.calls, reasons, strict=True)}
    # of all calls: the recorded parent of a completed call may be one that is not completed
    conversations = {each.call.call_id: each for each in rebuild_conversations(recorded.calls)}
    lines, faults = [], {}
    for leaf in find_ends(parents, range(len(calls))):
        conversation = conversations[calls[leaf].call_id]
        fault = conversation.incomplete or (
            None if conversation.reply is not None else "its reply was not recorded"
        )
        if fault is not None:
            faults[conversation.call.call_id] = fault
            continue
        call_ids = [calls[i].call_id for i in path_to(leaf, parents.__getitem__)]
        lines.append(
            _line(recorded, conversation, call_ids, left_out[conversation.call.call_id] or "")
        )
    return lines, faults


def _line(
    recorded: RecordedSession, conversation: CallConversation, call_ids: list[str], left_out: str
) -> dict[str, Any]:
    call = conversation.call
    session = recorded.session or Session(session_id=recorded.session_id, status="unknown")
    messages = [
        for_template(message)
        for message in [*conversation.messages(), *filter(None, [conversation.reply])]
    ]
    tool_calls = [
        tool_call for message in messages for tool_call in message.get("tool_calls") or []
    ]
    # only the reward may be null: a loader that infers types finds none for a column that is null
    # in the first lines
    return {
        "messages": messages,
        "tools": json.dumps(conversation.tools or None, ensure_ascii=False),
        "context": conversation.context(),
        "session_id": recorded.session_id,
        **{name: getattr(session, name) for name in ("task_id", "group_id", "harness", "reward")},
        "role": call.role,
        "finish_reason": call.finish_reason or "",
        "left_out": left_out,
        "malformed": not all(
            isinstance(tool_call["function"]["arguments"], dict) for tool_call in tool_calls
        ),
        "call_ids": call_ids,
    }
