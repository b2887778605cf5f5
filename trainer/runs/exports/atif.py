"""Export to Harbor's Agent Trajectory Interchange Format, ATIF v1.7: one file per session.

The format is Harbor's RFC 0001. Its models, in harbor 0.25.0, allow no other fields. The calls of a
session form a tree by their recorded parents. A line is a path of this tree from a root to the last
call of one role.

- The line that ends with the agent's last call is the trajectory. Each message and each call is a
  step. A tool result is an observation of the step that asked for it. After a compaction, this is
  the conversation that began with the summary.
- Every other line is an embedded trajectory, with its last call's id: conversations before a
  compaction or beside the trajectory, sub-agents, compactions, side questions, superseded retries.
  `extra.role` is the last call's role. A step of a call that is also on an earlier line is marked
  `is_copied_context` and has no metrics. The trajectory refers to an embedded one from its last
  step that started earlier, if there is one. The wire does not tell which tool call started a
  sub-agent.
- `extra` holds what ATIF has no field for. In a step: the call's id, role, kind, status, why its
  tokens are not trained (`left_out`), and more. In metrics: the weight versions. In the trajectory:
  the session's row with its reward, parts, evidence and suspicions. Absolute paths of the machine
  that recorded it are cut to their last part.

Not expressible:

- Sessions without calls: a trajectory has at least one step. A warning counts them.
- The position of tool results among user messages: they belong to an earlier step.
- Log-probabilities that are not finite: all of that call are in `metrics.extra.logprobs`, NaN and
  infinity as text.
"""

import json
import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import Call, json_text
from rolltap.trainer.console import Advance
from rolltap.trainer.names import file_name, public_model
from rolltap.trainer.runs.exports.sessions import each_session, public_session
from rolltap.trainer.traces.conversations import (
    CallConversation,
    Message,
    for_template,
    rebuild_conversations,
)
from rolltap.trainer.traces.ledger import LeftOut
from rolltap.trainer.traces.reader import RecordedSession
from rolltap.trainer.traces.sessions import judge_session
from rolltap.trainer.traces.tree import Parents, find_ends, split_lines

logger = logging.getLogger(__name__)

Step = dict[str, Any]

VERSION = "ATIF-v1.7"
UNKNOWN = "unknown"


def export(run: Path, out: Path, advance: Advance) -> int:
    """Write a trajectory file per session that has calls. Return the number of files."""
    model = public_model(str(read_metadata(run).get("model", ""))) or None
    written = empty = 0
    for recorded in each_session(run, advance):
        document = trajectory(recorded, model)
        if document is None:
            empty += 1
            continue
        (out / f"{file_name(recorded.session_id)}.json").write_text(
            json_text(document) + "\n", encoding="utf-8"
        )
        written += 1
    if empty:
        logger.warning("%s: %d sessions are left out: they have no calls", run, empty)
    return written


def trajectory(recorded: RecordedSession, model: str | None = None) -> dict[str, Any] | None:
    """Return the trajectory of a session; None when it has no calls. `model` is the name of the
    model that answered."""
    if not recorded.calls:
        return None
    conversations, left_out = rebuild_conversations(recorded.calls), judge_session(recorded)[1]
    index = {call.call_id: i for i, call in enumerate(recorded.calls)}
    parents = [index[each.parent.call.call_id] if each.parent else None for each in conversations]
    lines = split_lines(parents, _ends(recorded.calls, parents))
    main, *others = [
        _Line(conversations, left_out, path, shared) for path, shared in lines if shared < len(path)
    ]
    for line in others:
        main.refer_to(line)
    version = (recorded.session.harness_version if recorded.session else "") or UNKNOWN
    agent = {
        "name": recorded.session.harness if recorded.session else UNKNOWN,
        "version": version,
        "model_name": model,
    }
    row = asdict(public_session(recorded.session)) if recorded.session else {}
    row.pop("session_id", None)
    document = {
        **main.document(recorded.session_id, agent),
        "session_id": recorded.session_id,
        "extra": _known(row),
    }
    embedded = [
        {**line.document(line.last.call_id, agent), "extra": {"role": line.last.role}}
        for line in others
    ]
    return {**document, "subagent_trajectories": embedded} if embedded else document


def _ends(calls: Sequence[Call], parents: Parents) -> list[int]:
    """Return the last calls of all lines: that of the trajectory, then the others by their
    start."""
    by_role: defaultdict[str, list[int]] = defaultdict(list)
    for i, call in enumerate(calls):
        by_role[call.role].append(i)
    main = by_role["agent"][-1] if "agent" in by_role else len(calls) - 1
    others = {end for same_role in by_role.values() for end in find_ends(parents, same_role)}
    return [main, *sorted(others - {main})]


class _Line:
    """The steps of one line. `path` are indices of `conversations`; its first `shared` calls are
    copied context."""

    def __init__(
        self,
        conversations: Sequence[CallConversation],
        left_out: Sequence[LeftOut | None],
        path: Sequence[int],
        shared: int,
    ) -> None:
        self.last = conversations[path[-1]].call
        self._started = path[shared]
        self._tools = conversations[path[0]].tools
        self._calls = [conversations[i].call for i in path[shared:]]
        self._steps: list[Step] = []
        self._of_call: dict[int, Step] = {}
        self._asking: Step | None = None
        """The agent step that tool results belong to."""
        for n, i in enumerate(path):
            conversation, copied = conversations[i], n < shared
            for message in conversation.new_messages:
                self._add_message(message, copied)
            self._asking = step = self._add(_call_step(conversation, left_out[i], copied))
            if not copied:
                self._of_call[i] = step
                if (
                    conversation.tools != self._tools
                ):  # the document's agent has the tools of the first call
                    step["extra"]["tools"] = conversation.tools

    def refer_to(self, line: "_Line") -> None:
        """Refer to another line's trajectory from the last step of a call that started before that
        line's own calls."""
        if earlier := [step for i, step in self._of_call.items() if i < line._started]:
            reference = {"trajectory_id": line.last.call_id, "extra": {"role": line.last.role}}
            _observe(earlier[-1], {"subagent_trajectory_ref": [reference]})

    def document(self, trajectory_id: str, agent: dict[str, Any]) -> dict[str, Any]:
        """Return the line as a trajectory."""
        return {
            "schema_version": VERSION,
            "trajectory_id": trajectory_id,
            "agent": _known({**agent, "tool_definitions": self._tools}),
            "steps": self._steps,
            "final_metrics": {
                "total_prompt_tokens": sum(len(call.prompt_ids) for call in self._calls),
                "total_completion_tokens": sum(len(call.completion_ids) for call in self._calls),
                "total_cached_tokens": sum(call.cached_tokens or 0 for call in self._calls),
                "total_steps": len(self._steps),
            },
        }

    def _add(self, step: Step) -> Step:
        self._steps.append({"step_id": len(self._steps) + 1, **step})
        return self._steps[-1]

    def _add_message(self, message: Message, copied: bool) -> None:
        mark = {"is_copied_context": True} if copied else {}
        if message["role"] == "tool":
            if self._asking is None:
                self._asking = self._add({"source": "system", "message": "", **mark})
            _observe(self._asking, _result(message, self._asking))
        elif message["role"] == "assistant":
            # no call of this session sampled it: an example, or a message that the program wrote
            self._asking = self._add(
                {"source": "agent", **_said(message), "is_copied_context": True}
            )
        else:
            self._add({"source": message["role"], "message": message["content"], **mark})


def _call_step(conversation: CallConversation, left_out: str | None, copied: bool) -> Step:
    """Return a call as an agent step. Copied context has the reply and the call's id, no
    metrics."""
    call = conversation.call
    said = _said(conversation.reply) if conversation.reply is not None else {"message": ""}
    step = {"timestamp": call.started_at.isoformat(), "source": "agent", **said}
    if copied:
        return {**step, "is_copied_context": True, "extra": {"call_id": call.call_id}}
    extra = {
        "call_id": call.call_id,
        "role": call.role,
        "role_evidence": call.role_evidence or None,
        "kind": call.kind,
        "kind_reason": call.kind_reason,
        "status": call.status,
        "error": call.error,
        "violation": call.violation,
        "left_out": left_out,
        "incomplete": conversation.incomplete,
        "finish_reason": call.finish_reason,
        "dialect": call.dialect,
        "requested_model": call.model,
        "sampling": json.loads(call.sampling),
        "finished_at": call.finished_at and call.finished_at.isoformat(),
    }
    return {**step, "metrics": _metrics(call), "llm_call_count": 1, "extra": _known(extra)}


def _metrics(call: Call) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        "prompt_tokens": len(call.prompt_ids),
        "completion_tokens": len(call.completion_ids),
        "cached_tokens": call.cached_tokens,
        "prompt_token_ids": list(call.prompt_ids),
        "completion_token_ids": call.completion_ids,
        "extra": {"weight_versions": [asdict(span) for span in call.weight_versions]},
    }
    finite = all(math.isfinite(logprob) for logprob in call.logprobs)
    (metrics if finite else metrics["extra"])["logprobs"] = call.logprobs
    return _known(metrics)


def _said(message: Message) -> dict[str, Any]:
    """Return the fields of an agent step that an assistant message fills."""
    message = for_template(message)
    return _known(
        {
            "message": message.get("content") or "",
            "reasoning_content": message.get("reasoning_content"),
            "tool_calls": [_tool_call(call) for call in message.get("tool_calls") or []] or None,
        }
    )


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    named = {"tool_call_id": call["id"], "function_name": function["name"]}
    if isinstance(arguments, dict):
        return {**named, "arguments": arguments}
    return {**named, "arguments": {}, "extra": {"arguments": arguments}}


def _result(message: Message, asking: Step) -> dict[str, Any]:
    """Return a tool message as a result. `source_call_id` must name a tool call of the step; else
    the id is `extra`."""
    tool_call_id = message.get("tool_call_id")
    asked = {call["tool_call_id"] for call in asking.get("tool_calls") or []}
    if tool_call_id in asked:
        return {"source_call_id": tool_call_id, "content": message["content"]}
    return {"content": message["content"], "extra": {"tool_call_id": tool_call_id}}


def _observe(step: Step, result: dict[str, Any]) -> None:
    """Add a result to a step."""
    step.setdefault("observation", {"results": []})["results"].append(result)


def _known(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}
