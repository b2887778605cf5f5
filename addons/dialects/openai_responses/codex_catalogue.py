"""The catalogue of models that Codex requests from chatgpt.com when it has an API key.

Codex takes its default model, its tools and the size of the context window from it. OpenAI does not document the
format. The fields below are those that Codex 0.169 requires, and those that choose its tools.
"""

from typing import Any

from rolltap.addons.dialects.model_call import ServedModel

_LONGEST_TOOL_OUTPUT = 10_000
"""Tokens, as in Codex's own catalogue."""
_INSTRUCTIONS = (
    "You are Codex, a coding agent in the user's terminal. Work in the current directory with the tools that you have. "
    "Look before you change anything, edit files with shell commands, check what you did, and go on until the task is "
    "done. End with a short account of what you changed."
)
"""The system prompt. Codex takes it from the catalogue and adds its own text about skills and the environment."""


def catalogue(models: list[ServedModel]) -> dict[str, Any]:
    """Return the catalogue of `models`. Codex uses the first as its default."""
    return {"models": [_entry(model, priority) for priority, model in enumerate(models)]}


def _entry(model: ServedModel, priority: int) -> dict[str, Any]:
    return {
        "slug": model.name,
        "display_name": model.name,
        "priority": priority,
        "visibility": "list",
        "supported_in_api": True,
        "context_window": model.context_window,
        # Codex's own limit is close to the full window; a model that reasons before its summary needs more room.
        "auto_compact_token_limit": model.context_window * 3 // 4,
        # Codex counts four bytes as one token, but one byte can be a token: an eighth may really be half the window.
        "truncation_policy": {"mode": "tokens", "limit": min(_LONGEST_TOOL_OUTPUT, model.context_window // 8)},
        "input_modalities": ["text"],
        "base_instructions": _INSTRUCTIONS,
        # Function tools only: a shell; no freeform apply_patch, which would need `apply_patch_tool_type`; no
        # namespaces of sub-agents.
        "shell_type": "unified_exec",
        "experimental_supported_tools": [],
        "multi_agent_version": "disabled",
        "use_responses_lite": False,
        "supports_parallel_tool_calls": True,
        "supported_reasoning_levels": [],
        "support_verbosity": False,
    }
