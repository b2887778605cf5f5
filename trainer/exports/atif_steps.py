"""Calls and messages as the fields of ATIF steps."""

import json
import math
from dataclasses import asdict
from typing import Any

from rolltap.addons.store.records import Call
from rolltap.trainer.traces.conversations import Message, Turn, for_template

Step = dict[str, Any]


def call_step(turn: Turn, left_out: str | None, copied: bool) -> Step:
    """A call as an agent step; a copy says only what was said."""
    call = turn.call
    spoken = said(turn.reply) if turn.reply is not None else {"message": ""}
    step = {"timestamp": call.started_at.isoformat(), "source": "agent", **spoken}
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
        "incomplete": turn.incomplete,
        "finish_reason": call.finish_reason,
        "dialect": call.dialect,
        "requested_model": call.model,
        "sampling": json.loads(call.sampling),
        "finished_at": call.finished_at and call.finished_at.isoformat(),
    }
    return {**step, "metrics": _metrics(call), "llm_call_count": 1, "extra": known(extra)}


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
    return known(metrics)


def said(message: Message) -> dict[str, Any]:
    """The fields of an agent step that an assistant message fills."""
    message = for_template(message)
    return known(
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


def result(message: Message, asking: Step) -> dict[str, Any]:
    """A tool message as a result; its call's id is a reference only where the step has that call."""
    tool_call_id = message.get("tool_call_id")
    asked = {call["tool_call_id"] for call in asking.get("tool_calls") or []}
    if tool_call_id in asked:
        return {"source_call_id": tool_call_id, "content": message["content"]}
    return {"content": message["content"], "extra": {"tool_call_id": tool_call_id}}


def observe(step: Step, result: dict[str, Any]) -> None:
    """Add a result to a step."""
    step.setdefault("observation", {"results": []})["results"].append(result)


def known(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}
