"""The role of a call, by the request's structure and the harness's own headers.

Every rule is a fact about a harness that was seen on the wire; a call that none of them matches is the agent's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rolltap.addons.dialects.types import ModelCall
from rolltap.addons.store.records import CallRole

_HEADERS: list[tuple[str, str, CallRole]] = [
    # Claude Code
    ("x-claude-code-request-class", "compaction", "compaction"),
    ("x-claude-code-request-class", "subagent", "subagent"),
    ("x-claude-code-agent-id", "", "subagent"),
    # Codex
    ("x-codex-parent-thread-id", "", "subagent"),
    ("x-openai-subagent", "", "subagent"),
    # OpenCode
    ("x-parent-session-id", "", "subagent"),
]
"""Header, its value (empty for any), and what it says. The first that is there decides."""

_SYSTEM_PROMPTS: list[tuple[str, CallRole]] = [
    ("You are the component that summarizes", "compaction"),  # Qwen Code
    ("You are a specialized system component responsible for distilling chat history", "compaction"),  # Gemini CLI
    ("You are a context summarization agent", "compaction"),  # OpenCode
    ("You are a context summarization assistant", "compaction"),  # Pi
    ("You are a title generator", "auxiliary"),  # OpenCode
    ("You are an expert software engineer that generates concise, one-line Git commit messages", "auxiliary"),  # aider
]
"""How a system prompt begins that is not the agent's."""


@dataclass(frozen=True, slots=True)
class Role:
    """A role and what says so."""

    role: CallRole
    evidence: str = ""


def find_role(model_call: ModelCall, headers: Mapping[str, str], *, tools_before: bool) -> Role:
    """The role of a call. `headers` are looked up in lower case; `tools_before` says whether an earlier call of the
    session had tools."""
    metadata = {**model_call.client_metadata, **_codex_metadata(headers)}
    if "compaction" in metadata or metadata.get("request_kind") == "compaction":
        return Role("compaction", "the request asks for a compaction")
    for header, value, role in _HEADERS:
        found = headers.get(header)
        if found and value in ("", found):
            return Role(role, f"header {header}: {found}")
    prompt_id = metadata.get("metadata.promptId", "")
    if "#" in prompt_id and "########" not in prompt_id:
        return Role("subagent", f"metadata.promptId: {prompt_id}")  # Qwen Code
    system = next((m["content"] for m in model_call.messages if m["role"] == "system"), "")
    for beginning, role in _SYSTEM_PROMPTS:
        if system.startswith(beginning):
            return Role(role, f"system prompt: {beginning}")
    if model_call.schema is not None:
        return Role("auxiliary", "the reply must match a JSON schema")
    if tools_before and not model_call.tools:
        return Role("auxiliary", "no tools, unlike earlier calls of the session")
    return Role("agent")


def _codex_metadata(headers: Mapping[str, str]) -> dict[str, str]:
    try:
        metadata: Any = json.loads(headers.get("x-codex-turn-metadata", "{}"))
    except ValueError:
        return {}
    kind = metadata.get("request_kind") if isinstance(metadata, dict) else None
    return {"request_kind": kind} if isinstance(kind, str) else {}
