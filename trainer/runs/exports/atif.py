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
from rolltap.trainer.runs.exports.sessions import (
    Turn,
    each_session,
    public_session,
    session_turns,
)
from rolltap.trainer.traces.conversations import Message, for_template
from rolltap.trainer.traces.reader import RecordedSession
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
    turns = session_turns(recorded)
    index = {call.call_id: i for i, call in enumerate(recorded.calls)}
    parents: list[int | None] = []
    for turn in turns:
        above = turn.conversation.parent
        parents.append(None if above is None else index[above.call.call_id])
    lines = []
    for path, shared in split_lines(parents, _ends(recorded.calls, parents)):
        if shared < len(path):
            lines.append(_Line(turns, path, shared))
    main, *others = lines
    for line in others:
        main.refer_to(line)
    agent = {"name": UNKNOWN, "version": UNKNOWN, "model_name": model}
    row: dict[str, Any] = {}
    if recorded.session is not None:
        agent["name"] = recorded.session.harness
        agent["version"] = recorded.session.harness_version or UNKNOWN
        row = asdict(public_session(recorded.session))
        del row["session_id"]
    document = main.document(recorded.session_id, agent)
    document["session_id"] = recorded.session_id
    document["extra"] = _known(row)
    embedded = []
    for line in others:
        part = line.document(line.last.call_id, agent)
        embedded.append({**part, "extra": {"role": line.last.role}})
    if embedded:
        document["subagent_trajectories"] = embedded
    return document


def _ends(calls: Sequence[Call], parents: Parents) -> list[int]:
    """Return the last calls of all lines: that of the trajectory, then the others by their
    start."""
    by_role: defaultdict[str, list[int]] = defaultdict(list)
    for i, call in enumerate(calls):
        by_role[call.role].append(i)
    main = by_role.get("agent", range(len(calls)))[-1]
    others: set[int] = set()
    for same_role in by_role.values():
        others.update(find_ends(parents, same_role))
    return [main, *sorted(others - {main})]


class _Line:
    """The steps of one line. `path` are indices of `turns`; its first `shared` calls are copied
    context."""

    def __init__(self, turns: Sequence[Turn], path: Sequence[int], shared: int) -> None:
        self.last = turns[path[-1]].call
        self.started = path[shared]
        self._tools = turns[path[0]].conversation.tools
        self._calls = [turns[i].call for i in path[shared:]]
        self._steps: list[Step] = []
        self._of_call: dict[int, Step] = {}
        self._asking: Step | None = None
        """The agent step that tool results belong to."""
        for place, i in enumerate(path):
            copied = place < shared
            for message in turns[i].conversation.new_messages:
                self._add_message(message, copied)
            self._asking = self._add(_call_step(turns[i], copied))
            if not copied:
                self._of_call[i] = self._asking
                tools = turns[i].conversation.tools
                # the document's agent has the tools of the first call
                if tools != self._tools:
                    self._asking["extra"]["tools"] = tools

    def refer_to(self, line: "_Line") -> None:
        """Refer to another line's trajectory from the last step of a call that started before that
        line's own calls."""
        earlier = [step for i, step in self._of_call.items() if i < line.started]
        if earlier:
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
        if message["role"] == "tool":
            if self._asking is None:
                self._asking = self._add(_marked({"source": "system", "message": ""}, copied))
            _observe(self._asking, _result(message, self._asking))
        elif message["role"] == "assistant":
            # no call of this session sampled it: an example, or a message that the program wrote
            self._asking = self._add(_marked({"source": "agent", **_said(message)}, True))
        else:
            step = {"source": message["role"], "message": message["content"]}
            self._add(_marked(step, copied))


def _marked(step: Step, copied: bool) -> Step:
    if copied:
        step["is_copied_context"] = True
    return step


def _call_step(turn: Turn, copied: bool) -> Step:
    """Return a call as an agent step. Copied context has the reply and the call's id, no
    metrics."""
    call = turn.call
    step: Step = {"timestamp": call.started_at.isoformat(), "source": "agent", "message": ""}
    if turn.conversation.reply is not None:
        step |= _said(turn.conversation.reply)
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
        "left_out": turn.left_out,
        "incomplete": turn.conversation.incomplete,
        "finish_reason": call.finish_reason,
        "dialect": call.dialect,
        "requested_model": call.model,
        "sampling": call.parsed_sampling,
        "finished_at": call.finished_at and call.finished_at.isoformat(),
    }
    return {
        **step,
        "metrics": _metrics(call),
        "llm_call_count": 1,
        "extra": _known(extra),
    }


def _metrics(call: Call) -> dict[str, Any]:
    extra: dict[str, Any] = {"weight_versions": [asdict(span) for span in call.weight_versions]}
    metrics: dict[str, Any] = {
        "prompt_tokens": len(call.prompt_ids),
        "completion_tokens": len(call.completion_ids),
        "cached_tokens": call.cached_tokens,
        "prompt_token_ids": list(call.prompt_ids),
        "completion_token_ids": call.completion_ids,
        "extra": extra,
    }
    if all(map(math.isfinite, call.logprobs)):
        metrics["logprobs"] = call.logprobs
    else:
        extra["logprobs"] = call.logprobs
    return _known(metrics)


def _said(message: Message) -> dict[str, Any]:
    """Return the fields of an agent step that an assistant message fills."""
    message = for_template(message)
    tool_calls = list(map(_tool_call, message.get("tool_calls") or []))
    said = {
        "message": message.get("content") or "",
        "reasoning_content": message.get("reasoning_content"),
        "tool_calls": tool_calls or None,
    }
    return _known(said)


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
