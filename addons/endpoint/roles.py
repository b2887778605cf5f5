"""Role of a call, from the harness's headers and the structure of the request.

A call under a grammar comes first: it is not trained. The rules that name a harness were
observed in its traffic, and come next. Then a conversation keeps the role of its earlier calls,
and one that begins while a tool call of another waits is a sub-agent's (`SessionRoles`). A call
that matches no rule has the role `agent`.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from operator import itemgetter
from typing import Any

from rolltap.addons.dialects.call import Message, ModelCall, Tool
from rolltap.addons.prompts.canonical import opening_digest
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
    # Qwen Code, Gemini CLI
    ("You are the component that summarizes", "compaction"),
    ("You are a specialized system component responsible for distilling chat", "compaction"),
    # OpenCode, Pi
    ("You are a context summarization agent", "compaction"),
    ("You are a context summarization assistant", "compaction"),
    # OpenCode, aider
    ("You are a title generator", "auxiliary"),
    ("You are an expert software engineer that generates concise, one-line Git", "auxiliary"),
]
"""(prefix of the system prompt, role)."""
_GEMINI_CLI_ENDS_WITH = "complete_task"
"""The tool with which Gemini CLI's sub-agents report. Its main agent does not have it."""


@dataclass(frozen=True, slots=True)
class Role:
    """A role, and the evidence for it: a header, field or structure of the request. Empty for
    the default."""

    role: CallRole
    evidence: str = ""


@dataclass(slots=True)
class Earlier:
    """Facts about a new call that follow from the session's earlier ones."""

    tools: bool = False
    """True when one of them had tools."""
    role: CallRole | None = None
    """The role of the call that it continues, or whose reply is among its messages."""
    waiting: str | None = None
    """The call whose tool calls have no results yet, when a conversation other than its own
    begins."""


def find_role(model_call: ModelCall, headers: Mapping[str, str], earlier: Earlier) -> Role:
    """Return the role of a call. `headers` needs lower-case keys, or lookups that ignore case."""
    if model_call.grammar is not None:
        return Role("auxiliary", "the reply must match a JSON schema, and it has no tools")
    if "compaction" in model_call.client_metadata or _codex_compacts(headers):
        return Role("compaction", "the request asks for a compaction")
    for header, value, role in _HEADERS:
        found = headers.get(header)
        if found and value in ("", found):
            return Role(role, f"header {header}: {value}".removesuffix(": "))
    prompt_id = model_call.client_metadata.get("metadata.promptId", "")
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
        why = f"it begins while a tool call of call {earlier.waiting} has no result"
        return Role("subagent", why)
    without_tools = earlier.tools and not model_call.tools
    if without_tools and earlier.role != "agent" and not _gives_results(model_call):
        return Role("auxiliary", "no tools, unlike earlier calls of the session")
    return Role("agent")


def _gives_results(model_call: ModelCall) -> bool:
    """Return True when the last message of the assistant is followed by a tool's result."""
    for message in reversed(model_call.messages):
        if message["role"] in ("assistant", "tool"):
            return bool(message["role"] == "tool")
    return False


def _codex_compacts(headers: Mapping[str, str]) -> bool:
    try:
        metadata: Any = json.loads(headers.get("x-codex-turn-metadata", "{}"))
    except (ValueError, RecursionError):
        return False
    return isinstance(metadata, dict) and metadata.get("request_kind") == "compaction"


@dataclass(slots=True)
class PastCall:
    """A call as its row has it. Raises `KeyError` and the like for messages that no recorder
    wrote."""

    row: Mapping[str, Any]
    """The row, with its reply parsed; None for a call that did not complete."""
    model_call: ModelCall
    """The request with only the messages after the parent's conversation and reply."""
    sampled_by: str | None
    """The `Prompt.sampled_by` of the call."""
    opening: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.opening = opening_digest(self.model_call)
        _answered(self.model_call.messages)
        _tool_calls(self.row["reply"])


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A sampled tool call whose result no request has given."""

    call_id: str
    opening: bytes


class SessionRoles:
    """The roles of a session's completed calls, and the tool calls without a result.

    An `opening` is a digest of a conversation's tools and leading system messages. Not thread-safe.

    A conversation that begins while a tool call waits is a sub-agent's: the tool call has
    started it. One with the opening of the call that waits longest is not: the program asks
    again, has shortened its history, or runs once more in the same session after a last tool
    call that it never answers (`submit`, `finish`). A later run with another opening, for
    instance with the time in its system prompt, is taken for a sub-agent then. A sub-agent in
    the background, whose tool call is answered at once ("started"), is taken for an agent. Both
    roles are trained.
    """

    def __init__(self) -> None:
        self.tools_seen = False
        """True when an earlier call of the session had tools."""
        self._roles: dict[str, CallRole] = {}
        self._waiting: dict[str, _Waiting] = {}
        """Id of a tool call -> the call that sampled it, in the order in which these completed."""

    def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        opening: bytes,
        sampled_by: str | None,
    ) -> Earlier:
        """Note a request that continues, or has the reply of, `sampled_by`.

        Return what earlier calls say of it. It ends the waiting of the tool calls that it answers
        or goes on without, and of those that began meanwhile.
        """
        answered = _answered(messages)
        over = False
        for tool_call, call in [*self._waiting.items()]:
            over = over or tool_call in answered or call.call_id == sampled_by
            if over:
                del self._waiting[tool_call]
        earlier = Earlier(tools=self.tools_seen, role=self._roles.get(sampled_by or ""))
        waiting = [*self._waiting.values()]
        if sampled_by is None and waiting and waiting[0].opening != opening:
            for call in waiting:
                if call.opening != opening:
                    earlier.waiting = call.call_id
        self.tools_seen |= bool(tools)
        return earlier

    def complete(
        self,
        call_id: str,
        role: CallRole,
        opening: bytes,
        reply: Message,
    ) -> None:
        """Note the reply of a completed call."""
        self._roles[call_id] = role
        if role == "compaction":
            self._waiting.clear()  # the results are part of the summary
        for tool_call in _tool_calls(reply):
            self._waiting[tool_call] = _Waiting(call_id, opening)

    def restore(self, calls: Iterable[PastCall]) -> None:
        """Note the calls of earlier rows as they were noted live: a request when it began, a reply
        when it completed.

        Each call's parent comes before it. A call that was running when the recorder was killed
        has no row: the results that its request gave are taken for missing until another request
        gives them.
        """
        openings: dict[str | None, bytes] = {}
        steps: list[tuple[datetime, Callable[[], object]]] = []
        for call in calls:
            row = call.row
            opening = openings.get(row["parent_id"], call.opening)
            openings[row["call_id"]] = opening
            asked = call.model_call
            began = row["started_at"]
            ask = partial(self.ask, asked.messages, asked.tools, opening, call.sampled_by)
            steps.append((began, ask))
            if row["reply"] is not None:
                what = row["call_id"], row["role"], opening, row["reply"]
                complete = partial(self.complete, *what)
                steps.append((max(began, row["finished_at"] or began), complete))
        for _, step in sorted(steps, key=itemgetter(0)):
            step()


def _answered(messages: Sequence[Message]) -> set[str]:
    """Return the ids of the tool calls with a result among the messages."""
    return {message["tool_call_id"] for message in messages if message["role"] == "tool"}


def _tool_calls(reply: Message | None) -> list[str]:
    """Return the ids of the tool calls of a reply."""
    return [tool_call["id"] for tool_call in (reply or {}).get("tool_calls", ())]
