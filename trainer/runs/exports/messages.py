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
from rolltap.trainer.runs.exports.sessions import Turn, each_session, session_turns
from rolltap.trainer.traces.conversations import for_template
from rolltap.trainer.traces.reader import RecordedSession
from rolltap.trainer.traces.tree import find_ends, link_calls, path_to

logger = logging.getLogger(__name__)

_UNFINISHED = "messages"
_LISTS = {"messages": "json", "context": "int64", "call_ids": "string"}
_TEXTS = (
    "tools",
    "session_id",
    "task_id",
    "group_id",
    "harness",
    "role",
    "finish_reason",
    "left_out",
)
_VALUES = {**dict.fromkeys(_TEXTS, "string"), "reward": "float64", "malformed": "bool"}


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
    completed = [turn for turn in session_turns(recorded) if turn.call.status == "completed"]
    parents, _ = link_calls([turn.call for turn in completed])
    lines = []
    faults = {}
    for leaf in find_ends(parents, range(len(completed))):
        turn = completed[leaf]
        fault = turn.conversation.incomplete
        if fault is None and turn.conversation.reply is None:
            fault = "its reply was not recorded"
        if fault is None:
            path = path_to(leaf, parents.__getitem__)
            lines.append(_line(recorded, turn, [completed[i].call.call_id for i in path]))
        else:
            faults[turn.call.call_id] = fault
    return lines, faults


def _line(recorded: RecordedSession, turn: Turn, call_ids: list[str]) -> dict[str, Any]:
    session = recorded.session or Session(session_id=recorded.session_id, status="unknown")
    sent = turn.conversation.messages()
    assert turn.conversation.reply is not None
    messages = list(map(for_template, [*sent, turn.conversation.reply]))
    malformed = False
    for message in messages:
        for tool_call in message.get("tool_calls") or []:
            if not isinstance(tool_call["function"]["arguments"], dict):
                malformed = True
    # only the reward may be null: a loader that infers types finds none for a column that is null
    # in the first lines
    return {
        "messages": messages,
        "tools": json.dumps(turn.conversation.tools or None, ensure_ascii=False),
        "context": turn.conversation.context(),
        "session_id": recorded.session_id,
        "task_id": session.task_id,
        "group_id": session.group_id,
        "harness": session.harness,
        "reward": session.reward,
        "role": turn.call.role,
        "finish_reason": turn.call.finish_reason or "",
        "left_out": turn.left_out or "",
        "malformed": malformed,
        "call_ids": call_ids,
    }
