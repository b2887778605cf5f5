"""Export to OpenEnv's `TrainingTrace` JSON, which TRL's `HarnessRolloutWorker` gets from `fetch_training_trace()`.

The contract is `openenv.core.harness.training` of openenv 0.10.0. A turn is one engine call: its full prompt, the
sampled tokens, their log-probabilities, and a mask over prompt and completion. No other fields are allowed. The mapping
of a run:

- A call that is trained has mask 1 on its completion. A call that is left out has mask 0 everywhere, and the reason as
  `metadata.left_out`: that of the call, or that of a session without a reward. `metadata.role` is the call's role.
- Left-out calls come first, then the branches of the call tree one after the other, those that end with an agent's call
  last: TRL joins a turn to the turn before it when its prompt continues that turn's tokens, and takes the last turn's
  messages as the rollout's. `metadata.index` is the call's position by start time.
- Not expressible, because the contract refuses them even with mask 0: calls whose log-probabilities are missing, not
  finite or positive, and those whose prompt is empty or cannot be rebuilt. `sessions.jsonl` lists them as `left_out`.
- The reward and other fields of the session are a line of `sessions.jsonl`: TRL takes the reward from `verify()`.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rolltap.addons.store.records import Call, json_text
from rolltap.trainer.console import Advance
from rolltap.trainer.names import file_name
from rolltap.trainer.runs.exports.sessions import each_session, public_session
from rolltap.trainer.traces.conversations import CallConversation, on_the_wire, rebuild_conversations
from rolltap.trainer.traces.reader import RecordedSession
from rolltap.trainer.traces.sessions import judge_session
from rolltap.trainer.traces.tree import find_ends, split_lines

SCHEMA_VERSION = 1
INDEX_FILE = "sessions.jsonl"
TRACES_FOLDER = "traces"
SESSION_COLUMNS = ["task_id", "group_id", "harness", "status", "reward", "parts", "suspicions", "policy_version"]
SESSION_COLUMNS += ["harness_version", "task_digest", "runtime", "image_digest"]
"""Columns of a session's row in its line of the index."""


def export(run: Path, out: Path, advance: Advance) -> int:
    """Write a `TrainingTrace` file per session, and the index `sessions.jsonl`. Return the number of sessions."""
    (out / TRACES_FOLDER).mkdir()
    sessions = 0
    with (out / INDEX_FILE).open("w", encoding="utf-8") as index:
        for recorded in each_session(run, advance):
            turns, refused = training_turns(recorded)
            file = f"{TRACES_FOLDER}/{file_name(recorded.session_id)}.json"
            with (out / file).open("w", encoding="utf-8") as trace:
                # written turn by turn: each has its full prompt, so all of them take O(T^2) memory
                trace.write(f'{{"schema_version": {SCHEMA_VERSION}, "turns": [')
                for n, turn in enumerate(turns):
                    trace.write((", " if n else "") + json_text(turn))
                trace.write("]}\n")
            row = asdict(public_session(recorded.session)) if recorded.session else {}
            line = {
                "session_id": recorded.session_id,
                "file": file,
                **{name: row.get(name) for name in SESSION_COLUMNS},
                "turns": len(recorded.calls) - len(refused),
                "left_out": refused,
            }
            index.write(json_text(line) + "\n")
            sessions += 1
    return sessions


def training_turns(recorded: RecordedSession) -> tuple[Iterator[dict[str, Any]], list[dict[str, Any]]]:
    """Return the `TrainingTurn`s of a session's calls in their order, and the calls that cannot be a turn.

    A call that cannot be one has `call_id`, `left_out`, `why` in words, and the number of its sampled `tokens`.
    """
    calls = recorded.calls
    parents, left_out = judge_session(recorded)
    faults = [find_fault(call) for call in calls]
    context = [i for i, reason in enumerate(left_out) if reason is not None and faults[i] is None]
    trained = [i for i, reason in enumerate(left_out) if reason is None and faults[i] is None]
    ends = sorted(find_ends(parents, trained), key=lambda i: (calls[i].role == "agent", i))
    selected = set(trained)
    lines = [i for path, shared in split_lines(parents, ends) for i in path[shared:] if i in selected]
    conversations = rebuild_conversations(calls)
    turns = (_training_turn(conversations[i], i, left_out[i]) for i in context + lines)
    refused = [
        {"call_id": call.call_id, "left_out": reason, "why": fault, "tokens": len(call.completion_ids)}
        for call, reason, fault in zip(calls, left_out, faults, strict=True)
        if fault is not None
    ]
    return turns, refused


def find_fault(call: Call) -> str | None:
    """Return why the contract refuses the call, in words, or None."""
    if not call.prompt_ids:
        return "the prompt is empty"
    if call.violation and call.parent_id is not None and not call.prefix_length:
        return "the prompt cannot be rebuilt"
    if min(call.prompt_ids) < 0 or min(call.completion_ids, default=0) < 0:
        return "a token id is negative"
    if len(call.completion_ids) != len(call.logprobs):
        return f"{len(call.completion_ids)} token ids but {len(call.logprobs)} log-probabilities"
    if not all(math.isfinite(logprob) and logprob <= 0 for logprob in call.logprobs):
        return "a log-probability is positive or not finite"
    return None


def _training_turn(conversation: CallConversation, index: int, left_out: str | None) -> dict[str, Any]:
    call = conversation.call
    sampling = json.loads(call.sampling)
    asked = sampling.pop("asked", {})
    metadata = {
        "index": index,
        "role": call.role,
        "left_out": left_out,
        "status": call.status,
        "error": call.error,
        "violation": call.violation,
        "kind": call.kind,
        "model": call.model,
        "n_tools": len(conversation.tools or []),
        "sampling_params": sampling,
        "requested_sampling_params": asked,
        "weight_versions": [asdict(span) for span in call.weight_versions],
        "started_at": call.started_at.isoformat(),
    }
    if conversation.incomplete is not None:
        metadata["incomplete_messages"] = conversation.incomplete
    choices = []
    if conversation.reply is not None:
        choices.append({"message": on_the_wire(conversation.reply), "finish_reason": call.finish_reason})
    request = {"messages": [on_the_wire(message) for message in conversation.messages()], "tools": conversation.tools}
    trained = int(left_out is None)
    return {
        "node_id": call.call_id,
        "prompt_token_ids": list(call.prompt_ids),
        "completion_token_ids": call.completion_ids,
        "per_token_logps": call.logprobs,
        "loss_mask": [0] * len(call.prompt_ids) + [trained] * len(call.completion_ids),
        "request": request,
        "response": {"choices": choices},
        "metadata": metadata,
    }
