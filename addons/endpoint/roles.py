"""Role of a call, from the harness's headers and the structure of the request.

A call that is sampled under a grammar comes first: its role is one that is not trained. The rules that name a harness
were observed in its traffic, and come next. Then a conversation keeps the role of its earlier calls, and one that
begins while a tool call of another waits is a sub-agent's (`session_roles.py`). A call that matches no rule has the
role `agent`.
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
    # Copilot CLI
    ("x-interaction-type", "conversation-subagent", "subagent"),
]
"""(header, its value or "" for any non-empty value, role). The first match decides."""

_SYSTEM_PROMPTS: list[tuple[str, CallRole]] = [
    ("You are the component that summarizes", "compaction"),  # Qwen Code
    ("You are a specialized system component responsible for distilling chat history", "compaction"),  # Gemini CLI
    ("You are a context summarization agent", "compaction"),  # OpenCode
    ("You are a context summarization assistant", "compaction"),  # Pi
    ("You are a title generator", "auxiliary"),  # OpenCode
    ("You are an expert software engineer that generates concise, one-line Git commit messages", "auxiliary"),  # aider
]
"""(prefix of the system prompt, role)."""
_GEMINI_CLI_ENDS_WITH = "complete_task"
"""The tool with which Gemini CLI's sub-agents report. Its main agent does not have it."""


@dataclass(frozen=True, slots=True)
class Role:
    """A role, and the evidence for it: a header, field or structure of the request. Empty for the default."""

    role: CallRole
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Earlier:
    """Facts about a new call that follow from the session's earlier ones."""

    tools: bool = False
    """True when one of them had tools."""
    role: CallRole | None = None
    """The role of the call that it continues, or whose reply is among its messages."""
    waiting: str | None = None
    """The call whose tool calls have no results yet, when a conversation other than its own begins."""


def find_role(model_call: ModelCall, headers: Mapping[str, str], earlier: Earlier) -> Role:
    """Return the role of a call. `headers` needs lower-case keys, or lookups that ignore case."""
    if model_call.grammar is not None:
        return Role("auxiliary", "the reply must match a JSON schema, and it has no tools")
    metadata = {**model_call.client_metadata, **_codex_metadata(headers)}
    if "compaction" in metadata or metadata.get("request_kind") == "compaction":
        return Role("compaction", "the request asks for a compaction")
    for header, value, role in _HEADERS:
        found = headers.get(header)
        if found and value in ("", found):
            return Role(role, f"header {header}: {value}".removesuffix(": "))
    prompt_id = metadata.get("metadata.promptId", "")
    if "#" in prompt_id and "########" not in prompt_id:
        return Role("subagent", "metadata.promptId: that of a sub-agent")  # Qwen Code
    system = next((m["content"] for m in model_call.messages if m["role"] == "system"), "")
    for prefix, role in _SYSTEM_PROMPTS:
        if system.startswith(prefix):
            return Role(role, f"system prompt: {prefix}")
    names = {tool["function"]["name"] for tool in model_call.tools}
    if _GEMINI_CLI_ENDS_WITH in names and headers.get("user-agent", "").startswith("GeminiCLI"):
        return Role("subagent", f"its tool {_GEMINI_CLI_ENDS_WITH}")
    if earlier.role == "subagent":
        return Role("subagent", "it goes on with a sub-agent's call")
    if model_call.tools and earlier.waiting is not None:
        return Role("subagent", f"it begins while a tool call of call {earlier.waiting} has no result")
    if earlier.tools and not model_call.tools and earlier.role != "agent" and not _gives_results(model_call):
        return Role("auxiliary", "no tools, unlike earlier calls of the session")
    return Role("agent")


def _gives_results(model_call: ModelCall) -> bool:
    """Return True when the last message of the assistant is followed by a tool's result."""
    for message in reversed(model_call.messages):
        if message["role"] in ("assistant", "tool"):
            return bool(message["role"] == "tool")
    return False


def _codex_metadata(headers: Mapping[str, str]) -> dict[str, str]:
    try:
        metadata: Any = json.loads(headers.get("x-codex-turn-metadata", "{}"))
    except (ValueError, RecursionError):
        return {}
    kind = metadata.get("request_kind") if isinstance(metadata, dict) else None
    return {"request_kind": kind} if isinstance(kind, str) else {}
