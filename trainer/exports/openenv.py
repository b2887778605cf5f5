"""OpenEnv `TrainingTrace` JSON, as TRL's `HarnessRolloutWorker` gets it from a session's `fetch_training_trace()`.

The contract is `openenv.core.harness.training` of openenv 0.10.0: a turn is one engine call with its full prompt, the
sampled tokens, their log-probabilities and a mask over both, and no other fields are allowed. How a run maps to it:

- A call that is trained has mask 1 on its completion. One that is left out has mask 0 everywhere, and the reason as
  `metadata.left_out`; `metadata.role` says what it was for.
- Calls with mask 0 come first, then each branch of the call tree as a whole, the agent's last: TRL joins a turn to the
  one before it where tokens agree and takes the last turn's messages as the rollout's. `metadata.index` is the
  position in which the call started.
- Not expressible, as the contract refuses them even with mask 0: calls whose log-probabilities are missing, not finite
  or positive, and those whose prompt is empty or cannot be rebuilt. `sessions.jsonl` names each under `left_out`.
- The reward, as it is `verify()` that gives it to TRL, and all else of the session: a line of `sessions.jsonl`.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rolltap.addons.store.records import Call
from rolltap.trainer.exports.sessions import dump_json, each_session
from rolltap.trainer.file_names import file_name
from rolltap.trainer.progress import Advance
from rolltap.trainer.traces.build import judge_calls
from rolltap.trainer.traces.conversations import CallConversation, on_the_wire, rebuild_conversations
from rolltap.trainer.traces.ledger import LeftOut
from rolltap.trainer.traces.reader import RecordedSession
from rolltap.trainer.traces.tree import find_ends, split_lines

SCHEMA_VERSION = 1
INDEX_FILE = "sessions.jsonl"
TRACES_FOLDER = "traces"


@dataclass(frozen=True, slots=True)
class SelectedCalls:
    """Which calls of a session become turns."""

    order: list[int]
    """Their positions among the session's calls, in the order of the turns."""
    left_out: list[LeftOut | None]
    """Why each call of the session is not trained, None when it is."""
    refused: list[dict[str, Any]]
    """The calls that cannot be a turn: `call_id`, `left_out`, `why` in words, and the `tokens` they sampled."""


def export(run: Path, out: Path, advance: Advance) -> int:
    """Write a `TrainingTrace` file per session and the index of them; returns the number of sessions."""
    (out / TRACES_FOLDER).mkdir()
    sessions = 0
    with (out / INDEX_FILE).open("w", encoding="utf-8") as index:
        for recorded in each_session(run, advance):
            options = select_calls(recorded.calls)
            file = f"{TRACES_FOLDER}/{file_name(recorded.session_id)}.json"
            with (out / file).open("w", encoding="utf-8") as trace:
                # turn by turn, as the text of a long session takes more memory than its calls
                trace.write(f'{{"schema_version": {SCHEMA_VERSION}, "turns": [')
                for n, turn in enumerate(training_turns(recorded.calls, options)):
                    trace.write((", " if n else "") + dump_json(turn))
                trace.write("]}\n")
            index.write(dump_json(index_line(recorded, file, options)) + "\n")
            sessions += 1
    return sessions


def select_calls(calls: Sequence[Call]) -> SelectedCalls:
    """Which of a session's calls, in the order in which they started, become turns."""
    parents, left_out = judge_calls(calls)
    faults = [find_fault(call) for call in calls]
    context = [i for i, reason in enumerate(left_out) if reason is not None and faults[i] is None]
    trained = [i for i, reason in enumerate(left_out) if reason is None and faults[i] is None]
    ends = sorted(find_ends(parents, trained), key=lambda i: (calls[i].role == "agent", i))
    wanted = set(trained)
    lines = [i for path, shared in split_lines(parents, ends) for i in path[shared:] if i in wanted]
    refused = [
        {"call_id": call.call_id, "left_out": reason, "why": fault, "tokens": len(call.completion_ids)}
        for call, reason, fault in zip(calls, left_out, faults, strict=True)
        if fault is not None
    ]
    return SelectedCalls(context + lines, left_out, refused)


def find_fault(call: Call) -> str | None:
    """Why the contract refuses the call's tokens, in words, or None."""
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


def training_turns(calls: Sequence[Call], options: SelectedCalls) -> Iterator[dict[str, Any]]:
    """The `TrainingTurn` of each selected call; the mask of one that is not trained is 0."""
    turns = rebuild_conversations(calls)
    return (_training_turn(turns[i], i, options.left_out[i]) for i in options.order)


def _training_turn(turn: CallConversation, index: int, left_out: str | None) -> dict[str, Any]:
    call = turn.call
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
        "n_tools": len(turn.tools or []),
        "sampling_params": sampling,
        "requested_sampling_params": asked,
        "weight_versions": [asdict(span) for span in call.weight_versions],
        "started_at": call.started_at.isoformat(),
    }
    if turn.incomplete is not None:
        metadata["incomplete_messages"] = turn.incomplete
    choices = []
    if turn.reply is not None:
        choices.append({"message": on_the_wire(turn.reply), "finish_reason": call.finish_reason})
    trained = int(left_out is None)
    return {
        "node_id": call.call_id,
        "prompt_token_ids": list(call.prompt_ids),
        "completion_token_ids": call.completion_ids,
        "per_token_logps": call.logprobs,
        "loss_mask": [0] * len(call.prompt_ids) + [trained] * len(call.completion_ids),
        "request": {"messages": [on_the_wire(message) for message in turn.messages()], "tools": turn.tools},
        "response": {"choices": choices},
        "metadata": metadata,
    }


def index_line(recorded: RecordedSession, file: str, options: SelectedCalls) -> dict[str, Any]:
    """A session's line in `sessions.jsonl`."""
    names = ("task_id", "group_id", "harness", "status", "reward", "policy_version")
    return {
        "session_id": recorded.session_id,
        "file": file,
        **{name: getattr(recorded.session, name, None) for name in names},
        "turns": len(options.order),
        "left_out": options.refused,
    }
